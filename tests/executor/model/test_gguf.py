"""Converting GGUF files: names, the order of q and k rows, values of every stored format, what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from executor.backends.cpu.backend import CpuBackend
from executor.model import gguf as conversion
from executor.model.errors import BrokenModel, UnsupportedModel
from executor.model.weights import Weights
from tests.executor.model.factories import (
    PagedModel,
    TinyModel,
    create_tiny_model,
    load,
    random_tokens,
    write_tokenizer,
)
from tests.executor.model.gguf_file import convert, write_gguf

WRITE_TOKENIZER = conversion._write_tokenizer  # the fixture below replaces it


@pytest.fixture(autouse=True)
def tokenizer_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's conversion is transformers' own; the demo model's tests go through it."""
    monkeypatch.setattr(conversion, "_write_tokenizer", lambda path, directory: write_tokenizer(directory))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("llama", "llama"), ("llama-biases", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_converted_file_gives_the_models_logits(
    tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str, architecture: str
) -> None:
    """Rows of q and k come back to their order for llama, and stay where they are for qwen."""
    model = tiny_models[kind]
    write_gguf(tmp_path / "model.gguf", model, architecture)
    directory = convert(tmp_path / "model.gguf", tmp_path / "converted")
    backend = CpuBackend()
    tokens = random_tokens(30)
    logits = PagedModel(load(directory, tmp_path, backend), backend).run(tokens, 30)
    torch.testing.assert_close(logits, model.reference_logits(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tensors_are_those_of_the_model_bit_for_bit(
    tiny_models: dict[str, TinyModel], tmp_path: Path, architecture: str
) -> None:
    model = tiny_models[architecture]
    write_gguf(tmp_path / "model.gguf", model, architecture)
    weights = Weights(convert(tmp_path / "model.gguf", tmp_path / "converted"))
    state = model.reference.state_dict()
    assert all(torch.equal(weights.read(name), state[name]) for name in weights)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("Q4_1", torch.float32), ("Q8_0", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_stored_values_are_kept_exactly(
    tiny_models: dict[str, TinyModel], tmp_path: Path, quantization: str, dtype: torch.dtype
) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    write_gguf(tmp_path / "model.gguf", tiny_models["qwen2"], "qwen2", kind)
    read = Weights(convert(tmp_path / "model.gguf", tmp_path / "converted")).read("model.layers.0.mlp.up_proj.weight")
    original = tiny_models["qwen2"].reference.state_dict()["model.layers.0.mlp.up_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(original.numpy(), kind), kind)
    assert read.dtype == dtype
    assert np.array_equal(read.float().numpy(), expected)


def test_large_models_are_written_in_shards(
    tiny_models: dict[str, TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "MAX_SHARD_BYTES", 100_000)
    write_gguf(tmp_path / "model.gguf", tiny_models["qwen2"], "qwen2")
    directory = convert(tmp_path / "model.gguf", tmp_path / "converted")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert list(Weights(directory)) == sorted(tiny_models["qwen2"].reference.state_dict())


def test_end_tokens_and_ties_come_from_the_file(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_models["llama"], "llama")
    model = load(convert(tmp_path / "model.gguf", tmp_path / "converted"), tmp_path)
    assert (model.eos_token_ids, model.config.tie_word_embeddings) == ((2,), True)


def test_stored_rotary_factors_divide_the_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's scaling comes as a tensor of factors."""
    model = create_tiny_model(tmp_path / "plain")
    write_gguf(tmp_path / "model.gguf", model, "llama")
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    rope = conversion._rope(
        conversion._Metadata(gguf.GGUFReader(tmp_path / "model.gguf")), {"rope_freqs.weight": _Stored(factors)}
    )
    assert rope["short_factor"] == rope["long_factor"] == factors
    assert (rope["rope_type"], rope["attention_factor"]) == ("longrope", 1.0)


class _Stored:
    """As much of a stored tensor as is read of it."""

    def __init__(self, values: list[float]) -> None:
        self.data = np.array(values, np.float32)


def test_an_unknown_architecture_is_refused_by_name(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_models["qwen2"], "rwkv7")
    with pytest.raises(UnsupportedModel, match="GGUF architecture 'rwkv7' is not known"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"something else entirely")
    with pytest.raises(BrokenModel, match=r"cannot read .*model\.gguf"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_weights_that_cannot_be_written_are_an_error_of_the_file_system(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """The library's own error came out as a traceback where a disk was full."""
    write_gguf(tmp_path / "model.gguf", tiny_models["qwen2"], "qwen2")
    (tmp_path / "converted" / "model-00001.safetensors").mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        conversion.convert(tmp_path / "model.gguf", tmp_path / "converted", lambda message: None)


def test_a_tokenizer_that_cannot_be_read_is_the_models_fault(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    """Some of what transformers raises there is an OSError, which is no fault of the cache."""
    write_gguf(tmp_path / "model.gguf", tiny_models["qwen2"], "qwen2")
    with pytest.raises(BrokenModel, match=r"cannot read the tokenizer of .*model\.gguf: "):
        WRITE_TOKENIZER(tmp_path / "model.gguf", tmp_path)


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(WordLevel({"0": 0}, unk_token="0"))
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *names, **options: PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    )
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        WRITE_TOKENIZER(tmp_path / "model.gguf", tmp_path)
