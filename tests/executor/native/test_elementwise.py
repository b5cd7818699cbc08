"""RMS norm, SiLU times up, RoPE with the K/V write, and the largest of a row, against float64, torch or numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.native.kernels import load_kernels
from executor.backends.cpu.native.library import Level
from tests.executor.native.factories import LEVELS, TOLERANCES, Shape, Span, Step

every_level = pytest.mark.parametrize("level", LEVELS)
both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


@every_level
@both_formats
@pytest.mark.parametrize("size", [7, 16, 64, 576, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_gives_the_norm_and_the_sum(level: Level, dtype: torch.dtype, size: int, with_residual: bool) -> None:
    x, weight = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    residual = random(5, size, dtype=dtype, seed=2) if with_residual else None
    kept = None if residual is None else residual.clone()
    normed, total = CpuBackend(dtype, level=level).rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, x if residual is None else x + residual)
    assert residual is None or torch.equal(residual, kept)
    wide = total.double()
    close(normed, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)


@every_level
@both_formats
@pytest.mark.parametrize("size", [5, 16, 96, 1536])
def test_silu_mul_gates(level: Level, dtype: torch.dtype, size: int) -> None:
    gate_up = random(9, 2 * size, dtype=dtype) * 20
    gate_up[0, 0], gate_up[1, 0] = -1e4, 1e4
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(CpuBackend(dtype, level=level).silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


@every_level
@both_formats
def test_silu_mul_of_nan_is_nan_there_alone(level: Level, dtype: torch.dtype) -> None:
    gate_up = random(3, 96, dtype=dtype)
    gate_up[1, 7] = torch.nan
    nan = CpuBackend(dtype, level=level).silu_mul(gate_up).isnan()
    assert nan.nonzero().tolist() == [[1, 7]]


@every_level
@both_formats
@pytest.mark.parametrize("head_size", [24, 64, 80, 256])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_rotates_q_and_k_and_writes_the_cache(
    level: Level, dtype: torch.dtype, head_size: int, with_norms: bool
) -> None:
    step = Step([Span(40, 9), Span(17), Span(5, 5)], Shape(head_size=head_size, dtype=dtype))
    num_tokens, heads = len(step.q), 6
    slots = torch.randperm(step.cache.shape[1] * 16)[:num_tokens]
    step.metadata.slot_mapping.copy_(slots)
    qkv = random(num_tokens, (heads + 4) * head_size, dtype=dtype)
    cos_sin = random(64, head_size, dtype=torch.float32, seed=1)
    norms = [random(head_size, dtype=dtype, seed=seed) for seed in (2, 3)] if with_norms else [None, None]
    native, plain = step.backend(level), step.backend(native=False)
    q, expected = (
        backend.rope_and_write_kv(0, qkv, cos_sin, step.metadata, heads, *norms, norm_eps=1e-6)
        for backend in (native, plain)
    )
    close(q, expected)
    written = torch.zeros(step.cache.shape[1], 16, dtype=torch.bool)
    written.view(-1)[slots] = True
    for cache, other in ((native.cache.keys[0], plain.cache.keys[0]), (native.cache.values[0], plain.cache.values[0])):
        by_slot, expected_by_slot = cache.transpose(1, 2), other.transpose(1, 2)
        close(by_slot[written], expected_by_slot[written])
        untouched = by_slot[~written], expected_by_slot[~written]
        assert torch.equal(untouched[0].nan_to_num(7), untouched[1].nan_to_num(7))


@every_level
@pytest.mark.parametrize("size", [1, 3, 16, 65, 2048, 2049, 49152])
def test_the_largest_of_a_row_is_the_first_of_equal_ones(level: Level, size: int) -> None:
    r = np.random.default_rng(size)
    rows = r.integers(-9, 9, (40, size)).astype(np.float32)
    rows[0], rows[1], rows[2] = -np.inf, np.where(r.random(size) < 0.5, 0.0, -0.0), -1
    rows[3, size // 2] = np.inf
    rows[4], rows[4, -1] = -np.inf, 2
    places, values = load_kernels(torch.float32, level).largest(rows)
    assert places.tolist() == rows.argmax(axis=1).tolist()
    assert values.tolist() == rows.max(axis=1).tolist()


@every_level
@pytest.mark.parametrize("place", [0, 1, 17, 2047, 2048, 4999])
def test_a_row_with_a_nan_has_no_largest(level: Level, place: int) -> None:
    rows = np.arange(15000, dtype=np.float32).reshape(3, 5000)
    rows[1, place] = np.nan
    _, values = load_kernels(torch.float32, level).largest(rows)
    assert np.isnan(values).tolist() == [False, True, False]


@every_level
@both_formats
def test_two_threads_give_the_same_bits(level: Level, dtype: torch.dtype, two_threads: None) -> None:
    backend = CpuBackend(dtype, level=level)
    gate_up, x, weight = random(200, 3072, dtype=dtype), random(200, 576, dtype=dtype), random(576, dtype=dtype)
    together = backend.silu_mul(gate_up), backend.rms_norm(x, weight, 1e-5, x)[0]
    torch.set_num_threads(1)
    assert torch.equal(together[0], backend.silu_mul(gate_up))
    assert torch.equal(together[1], backend.rms_norm(x, weight, 1e-5, x)[0])
