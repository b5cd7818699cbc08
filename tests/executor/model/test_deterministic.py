"""In the deterministic mode a row's logits are the same bits however it is computed: alone, among others, in chunks of
any size, in a prefill or as a decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor.backends.cpu import deterministic, linear
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.deterministic import NotDeterministic
from executor.model.loader import LoadedModel
from tests.executor.model.factories import PagedModel, Row, TinyModel, load, random_tokens

PROMPT = random_tokens(150)  # three partitions of keys
KINDS = ["llama-biases", "mistral", "qwen3"]

in_both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def paged(directory: Path, cache_dir: Path, dtype: torch.dtype, num_blocks: int = 800) -> PagedModel:
    backend = CpuBackend(dtype, deterministic=True)
    return PagedModel(load(directory, cache_dir, backend), backend, num_blocks=num_blocks)


def again(run: PagedModel, block_size: int = 16) -> PagedModel:
    """The same model with an empty cache."""
    model: LoadedModel = run.model
    return PagedModel(model, run.backend, block_size, run.num_blocks)


@every_kind
@in_both_formats
def test_chunks_of_any_size_give_the_same_bits(
    tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    run = paged(tiny_models[kind].directory, tmp_path, dtype)
    whole = run.run(PROMPT, len(PROMPT))
    for chunk in (1, 7, 16, 64, 100):
        assert torch.equal(again(run).run(PROMPT, chunk), whole), chunk


@every_kind
@in_both_formats
def test_a_row_among_64_has_the_bits_of_a_row_alone(
    tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    run = paged(tiny_models[kind].directory, tmp_path, dtype)
    alone = run.run(PROMPT, 1)
    crowd = again(run)
    crowd.run(PROMPT[:142], 142)
    for position in range(142, 150):
        assert torch.equal(among_63_others(crowd, position), alone[position]), position


@in_both_formats
def test_two_threads_keep_the_bits_too(
    tiny_models: dict[str, TinyModel], tmp_path: Path, dtype: torch.dtype, two_threads: None
) -> None:
    run = paged(tiny_models["llama"].directory, tmp_path, dtype)
    whole = run.run(PROMPT, len(PROMPT))
    crowd = again(run)
    assert torch.equal(crowd.run(PROMPT[:149], 50), whole[:149])
    assert torch.equal(among_63_others(crowd, 149), whole[149])


def among_63_others(crowd: PagedModel, position: int) -> torch.Tensor:
    """Logits of the next token of the prompt, in a step with prefills and decodes before and behind it."""
    others = [Row(f"other {number}", random_tokens(1 + (number + position) % 9, seed=number)) for number in range(63)]
    place = position * 13 % 64
    return crowd.step(*others[:place], Row("it", [PROMPT[position]]), *others[place:])[place][0]


def test_the_block_size_changes_no_bit(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    run = paged(tiny_models["llama"].directory, tmp_path, torch.float32)
    whole = run.run(PROMPT, len(PROMPT))
    assert torch.equal(again(run, block_size=32).run(PROMPT, 40), whole)


def test_the_demo_model_keeps_its_bits(demo_directory: Path, cache_dir: Path) -> None:
    run = paged(demo_directory, cache_dir, torch.bfloat16)
    tokens = random_tokens(80, vocab_size=49000)
    whole = run.run(tokens, 80)
    assert torch.equal(again(run).run(tokens, 33), whole)
    crowd = again(run)
    crowd.run(tokens[:79], 79)
    others = [Row(f"other {number}", random_tokens(2, seed=number)) for number in range(20)]
    assert torch.equal(crowd.step(*others, Row("it", tokens[79:]))[-1][0], whole[79])


def test_a_machine_that_cannot_keep_the_mode_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "apply", lambda x, packed: x.sum(0, keepdim=True).expand_as(x))
    packed = linear.PackedLinear(torch.empty(0), None, 16, 16)
    with pytest.raises(NotDeterministic, match="product of 16 by 16 depends on the rows beside it"):
        deterministic.check_tiles(packed, torch.float32)
