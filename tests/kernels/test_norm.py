"""RMS norm with its residual, against float64."""

from __future__ import annotations

import pytest
import torch

from executor.backends.cuda.elementwise import RmsNorm
from tests.kernels.factories import poisoned
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher, guarded
from tests.kernels.ulps import assert_within_ulps

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return guarded(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def expected_norm(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = total.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("hidden", [8, 576, 1000, 4096, 5120, 16384])
def test_the_norm_of_a_sum_equals_float64(dtype: torch.dtype, hidden: int) -> None:
    x, residual = normal(3, hidden, dtype=dtype, seed=1), normal(3, hidden, dtype=dtype, seed=2)
    weight = normal(hidden, dtype=dtype, seed=3)
    out, total = (guarded(poisoned(x.shape, dtype)) for _ in range(2))
    RmsNorm(SimulatorLauncher(), dtype)(x, weight, EPS, residual, out, total)
    assert torch.equal(total, x + residual), "the sum is rounded once, as torch rounds it"
    assert_within_ulps(out, expected_norm(total, weight), 2)


def test_without_a_residual_the_total_is_the_input() -> None:
    x, weight = normal(2, 64, dtype=BF16, seed=1), normal(64, dtype=BF16, seed=2)
    out, total = RmsNorm(SimulatorLauncher(), BF16)(x, weight, EPS)
    assert total is x
    assert_within_ulps(out, expected_norm(x, weight), 2)


def test_results_may_take_the_place_of_the_inputs() -> None:
    x, residual = normal(2, 96, dtype=BF16, seed=1), normal(2, 96, dtype=BF16, seed=2)
    weight = normal(96, dtype=BF16, seed=3)
    norm = RmsNorm(SimulatorLauncher(), BF16)
    want_out, want_total = norm(x, weight, EPS, residual)
    norm(x, weight, EPS, residual, out=x, total=residual)
    assert torch.equal(x, want_out)
    assert torch.equal(residual, want_total)


def test_a_row_of_zeros_stays_zero() -> None:
    x, weight = guarded(torch.zeros(1, 64, dtype=BF16)), normal(64, dtype=BF16, seed=1)
    assert torch.equal(RmsNorm(SimulatorLauncher(), BF16)(x, weight, EPS)[0], x)


def test_no_row_launches_nothing() -> None:
    x, weight = torch.zeros(0, 64, dtype=BF16), normal(64, dtype=BF16, seed=1)
    assert RmsNorm(SimulatorLauncher(), BF16)(x, weight, EPS)[0].shape == (0, 64)


def test_the_norm_does_not_depend_on_who_runs_first() -> None:
    x, residual = normal(2, 1000, dtype=BF16, seed=1), normal(2, 1000, dtype=BF16, seed=2)
    weight = normal(1000, dtype=BF16, seed=3)
    identical_on_every_schedule(lambda launcher: RmsNorm(launcher, BF16)(x, weight, EPS, residual))


def test_the_norm_has_no_undefined_behaviour() -> None:
    x, weight = normal(2, 1000, dtype=BF16, seed=1), normal(1000, dtype=BF16, seed=3)
    out, _ = RmsNorm(SimulatorLauncher(build=SimulatorBuild(sanitize=True)), BF16)(x, weight, EPS, x)
    assert_within_ulps(out, expected_norm(x + x, weight), 2)


def test_a_row_that_is_no_multiple_of_16_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 60 torch\.bfloat16"):
        RmsNorm(SimulatorLauncher(), BF16).geometry(60)


def test_a_row_too_large_for_the_registers_of_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a norm over 65536 torch\.float32"):
        RmsNorm(SimulatorLauncher(), FP32).geometry(65536)
