"""The decoder against transformers in float32, however a sequence is cut into steps and wherever its blocks lie."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from executor.backends.cpu.backend import CpuBackend
from executor.model.errors import BrokenModel
from tests.executor.model.factories import (
    CONFIGS,
    PagedModel,
    Row,
    TinyModel,
    create_tiny_model,
    load,
    random_tokens,
)

PROMPT = random_tokens(45)  # across blocks, past the sliding window, ending inside a block

every_kind = pytest.mark.parametrize("kind", CONFIGS)


def paged(model: TinyModel, cache_dir: Path, block_size: int = 16, deterministic: bool = False) -> PagedModel:
    backend = CpuBackend(deterministic=deterministic)
    return PagedModel(load(model.directory, cache_dir, backend), backend, block_size)


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@every_kind
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("chunk", [45, 20, 16, 1], ids=["whole", "chunks", "blocks", "one by one"])
def test_logits_are_those_of_transformers(
    tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str, block_size: int, chunk: int
) -> None:
    model = tiny_models[kind]
    logits = paged(model, tmp_path, block_size).run(PROMPT, chunk)
    assert_close(logits, model.reference_logits(PROMPT))


@every_kind
def test_deterministic_logits_are_those_of_transformers(
    tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str
) -> None:
    model = tiny_models[kind]
    logits = paged(model, tmp_path, deterministic=True).run(PROMPT, 20)
    assert_close(logits, model.reference_logits(PROMPT))


@every_kind
def test_a_step_mixes_prefill_chunks_and_decodes(tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str) -> None:
    model = tiny_models[kind]
    run = paged(model, tmp_path)
    long, short, fresh = random_tokens(40, seed=1), random_tokens(5, seed=2), random_tokens(17, seed=3)
    run.step(Row("long", long[:39]), Row("short", short[:4]))
    run.step(Row("chunked", PROMPT[:21]))
    mixed = run.step(Row("short", short[4:]), Row("chunked", PROMPT[21:]), Row("long", long[39:]), Row("fresh", fresh))
    assert_close(mixed[0], model.reference_logits(short)[4:])
    assert_close(mixed[1], model.reference_logits(PROMPT)[21:])
    assert_close(mixed[2], model.reference_logits(long)[39:])
    assert_close(mixed[3], model.reference_logits(fresh))


@every_kind
def test_greedy_tokens_are_those_of_transformers(tiny_models: dict[str, TinyModel], tmp_path: Path, kind: str) -> None:
    model = tiny_models[kind]
    run = paged(model, tmp_path)
    tokens = list(PROMPT)
    step = PROMPT
    for _ in range(64):
        step = [int(run.step(Row("it", step))[0][-1].argmax())]
        tokens += step
    generated = model.reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
    )
    assert tokens == generated[0].tolist()


def test_copied_blocks_carry_a_sequence_on(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["llama"]
    run = paged(model, tmp_path)
    run.step(Row("parent", PROMPT[:40]))
    run.step(Row("child", PROMPT[:40]))
    for cache in (*run.backend.cache.keys, *run.backend.cache.values):
        cache[run.table("child")] = torch.nan
    run.backend.copy_blocks(run.table("parent"), run.table("child"))
    assert_close(run.step(Row("child", PROMPT[40:]))[0], model.reference_logits(PROMPT)[40:])


def test_only_the_rows_asked_for_get_logits(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["llama"]
    run = paged(model, tmp_path)
    metadata = run._metadata([Row("it", PROMPT)])
    logits = run.model.decoder.forward(torch.tensor(PROMPT), metadata, torch.tensor([44, 7]), lambda: None)
    assert_close(logits, model.reference_logits(PROMPT)[[44, 7]])


def test_a_step_may_ask_for_no_logits(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    run = paged(tiny_models["llama"], tmp_path)
    metadata = run._metadata([Row("it", PROMPT)])
    logits = run.model.decoder.forward(
        torch.tensor(PROMPT), metadata, torch.tensor([], dtype=torch.int64), lambda: None
    )
    assert logits.shape == (0, 128)


def test_progress_is_told_after_every_layer(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    run = paged(tiny_models["llama"], tmp_path)
    told: list[None] = []
    run.model.decoder.forward(
        torch.tensor([5]), run._metadata([Row("it", [5])]), torch.tensor([0]), lambda: told.append(None)
    )
    assert len(told) == 3


def test_bfloat16_loses_no_more_than_it_does_in_transformers(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["llama"]
    backend = CpuBackend(torch.bfloat16)
    logits = PagedModel(load(model.directory, tmp_path, backend), backend).run(PROMPT, 20)
    expected = model.reference_logits(PROMPT)
    with torch.no_grad():
        theirs = copy.deepcopy(model.reference).bfloat16()(torch.tensor([PROMPT])).logits[0].float()
    assert (logits - expected).square().mean() < 1.5 * (theirs - expected).square().mean()


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 100'))
    with pytest.raises(BrokenModel, match=r"'model.layers.0.mlp.gate_proj.weight' is \[96, 64\].*\[100, 64\]"):
        load(directory, tmp_path)


def test_a_tensor_that_nothing_computes_with_is_refused(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(BrokenModel, match=r"9 tensors are not part .* 'model.layers.2.input_layernorm.weight'"):
        load(directory, tmp_path)
