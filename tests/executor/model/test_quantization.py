"""Models with quantized weights: the tokens of the same model with its weights as numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from executor import loading
from executor.backends.cpu import quantized
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.linear import PackedLinear
from executor.backends.cpu.quantized import QuantizedLinear
from executor.backends.platform import PlatformError, open_platform
from executor.config import ExecutorConfig, StartupError
from executor.model import gguf as conversion
from tests.executor.model.factories import PagedModel, Row, TinyModel, load, random_tokens, write_tokenizer
from tests.executor.model.gguf_file import convert, write_gguf

PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((3, 17, 40))]
KINDS = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def tokenizer_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_write_tokenizer", lambda path, directory: write_tokenizer(directory))


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def converted(
    model: TinyModel, folder: Path, kind: str = "Q4_1", other: dict[str, gguf.GGMLQuantizationType] | None = None
) -> Path:
    architecture = {"llama": "llama", "qwen3": "qwen3"}[model.reference.config.model_type]
    write_gguf(folder / "model.gguf", model, architecture, KINDS[kind], other)
    return convert(folder / "model.gguf", folder / "converted")


def paged(directory: Path, cache_dir: Path, quantization: str, **mode: object) -> PagedModel:
    backend = CpuBackend(quantization=quantization, **mode)
    return PagedModel(load(directory, cache_dir, backend), backend, num_blocks=800)


def greedy(run: PagedModel) -> tuple[list[list[int]], float]:
    """Tokens that follow each prompt, all in one batch, and the least gap between the best and the second."""
    outputs, least = [list(prompt) for prompt in PROMPTS], float("inf")
    rows = [Row(str(index), output) for index, output in enumerate(outputs)]
    for _ in range(12):
        logits = torch.stack([row[-1] for row in run.step(*rows)])
        best = logits.topk(2).values
        least = min(least, float((best[:, 0] - best[:, 1]).min()))
        tokens = logits.argmax(-1).tolist()
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
        rows = [Row(str(index), [token]) for index, token in enumerate(tokens)]
    return outputs, least


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("model", ["llama", "llama-biases", "qwen3"])  # of these, the second is not tied
def test_blocks_give_the_tokens_of_their_values(
    tiny_models: dict[str, TinyModel], tmp_path: Path, model: str, kind: str
) -> None:
    directory = converted(tiny_models[model], tmp_path, kind)
    run = paged(directory, tmp_path, "gguf")
    expected, gap = greedy(paged(directory, tmp_path, "none"))
    assert gap > 1e-3
    assert greedy(run)[0] == expected
    assert isinstance(run.model.decoder._lm_head, QuantizedLinear)
    assert run.model.decoder._lm_head.kind.name == kind


def test_int8_gives_the_tokens_of_the_rounded_weights(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    directory = tiny_models["llama-biases"].directory
    rounded = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.copy_(quantized.dequantize(quantized.pack(quantized.quantize(weight), None)))
    rounded.save_pretrained(tmp_path / "rounded")
    write_tokenizer(tmp_path / "rounded")
    expected, gap = greedy(paged(tmp_path / "rounded", tmp_path, "none"))
    assert gap > 1e-3
    assert greedy(paged(directory, tmp_path, "int8"))[0] == expected


def test_the_embedding_is_looked_up_as_stored(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    """Also where the last product, of the same weights, is quantized."""
    run = paged(tiny_models["llama"].directory, tmp_path, "int8")
    assert isinstance(run.model.decoder._lm_head, QuantizedLinear)
    stored = tiny_models["llama"].reference.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(run.model.decoder._embedding, stored)


@pytest.mark.parametrize("quantization", ["int8", "gguf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_in_the_deterministic_mode_neither_chunks_nor_others_change_a_bit(
    tiny_models: dict[str, TinyModel],
    tmp_path: Path,
    quantization: str,
    dtype: torch.dtype,
    native: bool,
    two_threads: None,
) -> None:
    directory = converted(tiny_models["llama"], tmp_path)
    run = paged(directory, tmp_path, quantization, dtype=dtype, deterministic=True, native=native)
    prompt = random_tokens(80)
    whole = run.run(prompt, len(prompt))
    for chunk in (1, 7, 64) if native else (7, 64):  # without the library each step unpacks all weights
        assert torch.equal(run.run(prompt, chunk, f"in chunks of {chunk}"), whole), chunk
    run.run(prompt[:79], 79, "among others")
    others = [Row(f"other {number}", random_tokens(1 + number % 4, seed=number)) for number in range(40)]
    assert torch.equal(run.step(*others, Row("among others", prompt[79:]))[-1][0], whole[79])


def test_products_of_several_kinds_are_computed_from_values(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    """q, k and v are one product: blocks of two kinds cannot be, and neither can those of a kind that nothing reads."""
    directory = converted(tiny_models["llama"], tmp_path, other={"attn_v": KINDS.Q8_0, "ffn_down": KINDS.Q5_0})
    run = paged(directory, tmp_path, "gguf")
    layer = run.model.decoder._layers[0]
    kinds = [type(linear) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert kinds == [PackedLinear, QuantizedLinear, QuantizedLinear, PackedLinear]
    assert greedy(run)[0] == greedy(paged(directory, tmp_path, "none"))[0]


def test_the_demo_models_blocks_give_its_logits(demo_directory: Path, cache_dir: Path) -> None:
    tokens = random_tokens(20, vocab_size=49000)
    expected = paged(demo_directory, cache_dir, "none").run(tokens, 20)
    run = paged(demo_directory, cache_dir, "gguf")
    torch.testing.assert_close(run.run(tokens, 20), expected, rtol=1e-4, atol=2e-3)
    decoder = run.model.decoder
    assert decoder._lm_head.kind.name == "Q8_0"
    assert {linear.kind.name for it in decoder._layers for linear in (it.qkv, it.o, it.gate_up, it.down)} == {"Q4_1"}


def test_a_model_without_blocks_is_refused(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    config = ExecutorConfig(
        model=str(tiny_models["llama"].directory), quantization="gguf", cache_dir=tmp_path, threads=1
    )
    with pytest.raises(StartupError, match=r"keeps the blocks of a GGUF file \(Q4_0, Q4_1, Q8_0\), and this model has"):
        loading.load(config, "cpu", lambda line: None)


@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_a_gpu_is_refused(quantization: str) -> None:
    with pytest.raises(PlatformError, match=f"--quantization {quantization} needs --device cpu"):
        open_platform("cuda", "auto", False, quantization)


def test_what_is_served_is_another_model(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    def fingerprint(quantization: str) -> str:
        config = ExecutorConfig(
            model=str(tmp_path / "converted"), quantization=quantization, num_blocks=20, cache_dir=tmp_path, threads=1
        )
        return loading.load(config, "cpu", lambda line: None).model.fingerprint

    converted(tiny_models["llama"], tmp_path)
    assert len({fingerprint(quantization) for quantization in quantized.QUANTIZATIONS}) == 3
