"""silu(gate) * up, against float64."""

from __future__ import annotations

import pytest
import torch

from executor.backends.cuda.elementwise import SiluMul
from tests.kernels.factories import poisoned
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher, guarded
from tests.kernels.ulps import assert_within_ulps

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def gate_up(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return guarded((3 * torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(1))).to(dtype))


def expected(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize(("dtype", "ulps"), [(BF16, 1), (FP16, 1), (FP32, 4)])  # fp32: exp, a division, two products
@pytest.mark.parametrize("size", [8, 1536, 2056])
def test_the_gate_equals_float64(dtype: torch.dtype, ulps: int, size: int) -> None:
    x = gate_up(3, size, dtype)
    out = guarded(poisoned((3, size), dtype))
    SiluMul(SimulatorLauncher(), dtype)(x, out)
    assert_within_ulps(out, expected(x), ulps)


def test_gates_far_from_zero_overflow_nowhere() -> None:
    x = guarded(torch.tensor([[-200.0, -90.0, -88.0, 0.0, 88.0, 200.0, 1e4, -1e4] + 8 * [1.5]]))
    out = SiluMul(SimulatorLauncher(), FP32)(x)
    assert_within_ulps(out, expected(x), 4, floor=1e-36)


def test_no_row_launches_nothing() -> None:
    assert SiluMul(SimulatorLauncher(), BF16)(torch.zeros(0, 64, dtype=BF16)).shape == (0, 32)


def test_the_gate_does_not_depend_on_who_runs_first() -> None:
    x = gate_up(2, 2056, BF16)
    identical_on_every_schedule(lambda launcher: [SiluMul(launcher, BF16)(x)])


def test_the_gate_has_no_undefined_behaviour() -> None:
    x = gate_up(2, 40, BF16)
    assert_within_ulps(SiluMul(SimulatorLauncher(build=SimulatorBuild(sanitize=True)), BF16)(x), expected(x), 1)
