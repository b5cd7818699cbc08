"""Each op of the CUDA backend, by the kernels' own source in the simulator, against the CPU backend's."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from executor.backends.base import AttentionMetadata, KVCacheSpec
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cuda.backend import UnsupportedShape
from executor.sampler import NON_FINITE, SamplingBatch
from tests.executor.model.factories import PagedModel, Row, create_tiny_model, load, random_tokens
from tests.executor.simulated import SimulatedBackend

torch.set_num_threads(1)

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 1, 64, 16
TABLES = [[5, 2, 9, 7], [3, 0, 0, 0], [8, 1, 0, 0]]
BFLOAT16 = 2.0**-8  # of the largest value that took part

AnyBackend = TypeVar("AnyBackend", CpuBackend, SimulatedBackend)


def spec(dtype: torch.dtype, **overrides: int) -> KVCacheSpec:
    shape = {"num_layers": 2, "num_blocks": 12, "num_kv_heads": KV_HEADS, "block_size": BLOCK, "head_size": HEAD_SIZE}
    return KVCacheSpec(**{**shape, **overrides}, dtype=dtype)


def with_cache(backend: AnyBackend, **overrides: int) -> AnyBackend:
    backend.allocate_kv_cache(spec(backend.dtype, **overrides))
    return backend


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    """Sequences whose blocks are those of TABLES, in order."""
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)])
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    slots = [
        TABLES[owner][place // BLOCK] * BLOCK + place % BLOCK for owner, place in zip(owners, positions, strict=True)
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(TABLES[: len(query_lens)], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        positions=torch.tensor(positions),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


MIXED = batch([10, 1, 5], [40, 13, 21])
DECODE = batch([1, 1, 1], [55, 1, 32])

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def close(actual: torch.Tensor, expected: torch.Tensor, ulps: float = 1.0) -> None:
    """Within so many roundings of the format, at the scale of the largest value."""
    unit = BFLOAT16 if expected.dtype == torch.bfloat16 else 1e-6
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=ulps * unit * scale)


@dtypes
def test_embed_is_a_gather(dtype: torch.dtype) -> None:
    table = random(50, 64, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(SimulatedBackend(dtype).embed(table, ids), table[ids])


@dtypes
def test_linear_has_weight_and_bias(dtype: torch.dtype) -> None:
    weight, bias, x = random(48, 64), random(48), random(5, 64, dtype=dtype)
    results = [
        backend.linear(x, backend.prepare_linear(weight, bias))
        for backend in (SimulatedBackend(dtype), CpuBackend(dtype))
    ]
    close(results[0], results[1], ulps=4)


@dtypes
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_gives_the_norm_and_the_sum(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = random(7, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    residual = random(7, 64, dtype=dtype, seed=2) if with_residual else None
    normed, total = SimulatedBackend(dtype).rms_norm(x, weight, 1e-5, residual)
    expected_normed, expected_total = CpuBackend(dtype).rms_norm(x, weight, 1e-5, residual)
    close(normed, expected_normed, ulps=2)
    assert torch.equal(total, expected_total)


@dtypes
def test_silu_mul_gates(dtype: torch.dtype) -> None:
    gate_up = random(7, 192, dtype=dtype)
    # The CPU rounds silu(gate) before the product, the kernel rounds once.
    close(SimulatedBackend(dtype).silu_mul(gate_up), CpuBackend(dtype).silu_mul(gate_up), ulps=2)


@dtypes
@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_rotates_q_and_k_and_writes_both_into_the_cache(dtype: torch.dtype, with_norms: bool) -> None:
    qkv = random(16, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, dtype=dtype)
    angles = random(64, HEAD_SIZE, seed=1)
    norms = [random(HEAD_SIZE, dtype=dtype, seed=seed) for seed in (2, 3)] if with_norms else [None, None]
    simulated, cpu = with_cache(SimulatedBackend(dtype)), with_cache(CpuBackend(dtype))
    q, expected = (
        backend.rope_and_write_kv(1, qkv, angles, MIXED, HEADS, *norms, norm_eps=1e-6) for backend in (simulated, cpu)
    )
    close(q, expected, ulps=2)
    for layer in range(2):
        close(simulated.cache.keys[layer], cpu.cache.keys[layer], ulps=2)
        assert torch.equal(simulated.cache.values[layer], cpu.cache.values[layer])


@dtypes
@pytest.mark.parametrize("metadata", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (11, None), (None, 5.0)])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_over_the_paged_cache(
    dtype: torch.dtype, metadata: AttentionMetadata, window: int | None, softcap: float | None, heads: int
) -> None:
    simulated, cpu = with_cache(SimulatedBackend(dtype)), with_cache(CpuBackend(dtype))
    for seed, caches in enumerate(("keys", "values")):
        contents = random(12, KV_HEADS, BLOCK, HEAD_SIZE, dtype=dtype, seed=seed)
        contents[0] = torch.nan  # nobody's block
        for backend in (simulated, cpu):
            getattr(backend.cache, caches)[1].copy_(contents)
    q = random(len(metadata.positions), heads, HEAD_SIZE, dtype=dtype, seed=2)
    out, expected = (
        backend.paged_attention(1, q, metadata, HEAD_SIZE**-0.5, window, softcap) for backend in (simulated, cpu)
    )
    close(out, expected, ulps=8 if dtype == torch.float32 else 2)


def test_copies_of_blocks_reach_every_layer() -> None:
    backend = with_cache(SimulatedBackend())
    for seed, cache in enumerate((*backend.keys, *backend.values)):
        cache.copy_(random(*cache.shape, seed=seed))
    before = [cache.clone() for cache in (*backend.keys, *backend.values)]
    backend.copy_blocks([3, 7], [1, 11])
    for cache, old in zip((*backend.keys, *backend.values), before, strict=True):
        assert torch.equal(cache[[1, 11]], old[[3, 7]])
        untouched = [block for block in range(12) if block not in (1, 11)]
        assert torch.equal(cache[untouched], old[untouched])


def test_no_copies_are_no_launch() -> None:
    SimulatedBackend().copy_blocks([], [])  # before there is a cache


def draws(num: int, **columns: object) -> SamplingBatch:
    values = {
        "logits_rows": None,
        "temperature": np.zeros(num, np.float32),
        "top_k": np.zeros(num, np.int64),
        "top_p": np.ones(num, np.float32),
        "min_p": np.zeros(num, np.float32),
        "seeds": np.arange(num, dtype=np.uint64) + np.uint64(1 << 40),
        "positions": np.arange(num),
        "sample_indices": np.zeros(num, np.int64),
    }
    return SamplingBatch(**{**values, **columns})  # type: ignore[arg-type]


def test_tokens_are_those_that_the_cpu_draws() -> None:
    logits = random(6, 500) * 3
    wanted = draws(
        6,
        temperature=np.array([0, 1, 0.7, 1, 1.3, 0], np.float32),
        top_k=np.array([0, 0, 20, 0, 0, 0]),
        top_p=np.array([1, 1, 1, 0.8, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0.05, 0], np.float32),
    )
    expected = CpuBackend().sample(logits, wanted).token_ids
    assert SimulatedBackend().sample(logits, wanted).collect().token_ids.tolist() == expected.tolist()


def test_a_row_with_nan_is_an_error_of_its_own() -> None:
    logits = random(3, 100)
    logits[1, 5] = torch.nan
    output = SimulatedBackend().sample(logits, draws(3)).collect()
    assert output.errors == {1: NON_FINITE}
    assert output.token_ids[[0, 2]].tolist() == logits[[0, 2]].argmax(1).tolist()


def test_sizes_without_a_kernel_are_a_sentence() -> None:
    backend = with_cache(SimulatedBackend(torch.bfloat16), head_size=24)
    with pytest.raises(UnsupportedShape, match="head size 24 is no multiple of 16"):
        backend.use_heads(4)


def test_a_second_cache_takes_the_place_of_the_first() -> None:
    backend = with_cache(SimulatedBackend())
    backend.allocate_kv_cache(spec(torch.float32, num_layers=1, num_blocks=3))
    assert [cache.shape[0] for cache in (*backend.keys, *backend.values)] == [3, 3]


def test_a_model_in_bf16_computes_on_tensor_cores_what_the_cpu_computes(tmp_path: Path) -> None:
    """Prompts, a chunk beside a decode row, and decode rows, through every layer."""
    create_tiny_model(tmp_path, "qwen3", head_dim=64, num_key_value_heads=1, num_hidden_layers=2)
    simulated, cpu = (
        PagedModel(load(tmp_path, tmp_path, backend), backend)
        for backend in (SimulatedBackend(torch.bfloat16), CpuBackend(torch.bfloat16))
    )
    tokens = random_tokens(70)
    for rows in (
        [Row("a", tokens[:37]), Row("b", tokens[5:6])],
        [Row("a", tokens[37:38]), Row("b", tokens[6:7])],
        [Row("a", tokens[38:60]), Row("b", tokens[7:8])],
    ):
        for logits, expected in zip(simulated.step(*rows), cpu.step(*rows), strict=True):
            close(logits.bfloat16(), expected.bfloat16(), ulps=8)
