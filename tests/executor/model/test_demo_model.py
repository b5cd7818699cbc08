"""The demo model after its conversion, against transformers reading the same GGUF file; its tokenizer likewise."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from executor.backends.cpu.backend import CpuBackend
from executor.model.cache import build_once
from executor.model.demo import demo_gguf
from executor.model.weights import Weights
from tests.executor.model.factories import PagedModel, load

TEXTS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is 12345 + 678?<|im_end|>\n<|im_start|>assistant\n",
    "naïve café — 日本語のテキスト, русский, עברית, हिन्दी",
    "emoji 🙂 and 👩‍👩‍👧‍👦, a combining e\u0301, an ﬁ ligature, \u200bzero width",
    "  two  spaces,\ttabs\n\n\nand newlines \r\n at the end   ",
    "def f(x):\n    return x**2  # 3.14159\n",
    "",
]


@pytest.fixture(scope="module")
def reference(cache_dir: Path) -> torch.nn.Module:
    """transformers' own reading of the GGUF file, every weight dequantized to float32; slow, so it is kept."""

    def read(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            file = demo_gguf(Path(scratch))
            AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            ).save_pretrained(directory)

    directory = build_once(cache_dir / "tests" / "smollm2-transformers", read)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("text", TEXTS[:3])
def test_logits_are_those_of_transformers(
    demo_directory: Path, cache_dir: Path, reference: torch.nn.Module, text: str
) -> None:
    tokens = Tokenizer.from_file(str(demo_directory / "tokenizer.json")).encode(text).ids
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    backend = CpuBackend()
    logits = PagedModel(load(demo_directory, cache_dir, backend), backend).run(tokens, 7)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-3)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizers_library_alone_gives_the_ids_of_transformers(demo_directory: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_directory / "tokenizer.json"))
    expected = AutoTokenizer.from_pretrained(demo_directory)
    ids = tokenizer.encode(text).ids
    assert ids == expected(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids)


def test_its_chat_template_and_special_tokens_come_along(demo_directory: Path, cache_dir: Path) -> None:
    model = load(demo_directory, cache_dir)
    config = json.loads(model.tokenizer_files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert b"<|im_start|>" in model.tokenizer_files["chat_template.jinja"]
    assert (model.eos_token_ids, model.max_model_len, model.config.vocab_size) == ((2,), 8192, 49152)


def test_weights_are_those_of_transformers_bit_for_bit(demo_directory: Path, reference: torch.nn.Module) -> None:
    weights = Weights(demo_directory)
    state = reference.state_dict()
    assert all(torch.equal(weights.read(name), state[name]) for name in weights)


def test_it_samples_as_its_authors_recommend(demo_directory: Path, cache_dir: Path) -> None:
    """At temperature 1, the default of a model that says nothing, it answered with nonsense."""
    defaults = load(demo_directory, cache_dir).defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.2, 0.9, None)
