"""Rope with the write of K and V, against float64: one rounding at the end, and nothing written that should not be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from executor.backends.cuda.elementwise import RopeKvWrite, RopeSpec
from executor.backends.cuda.launch import Launcher
from executor.model.rope import RopeConfig, cos_sin_table
from tests.kernels.factories import poisoned
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher, guarded
from tests.kernels.ulps import assert_within_ulps

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class RopeCase:
    """Tokens of one step, some of them padding."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    slots: tuple[int, ...] = (16, 17, 40, -1, 63, 50, 31)
    q_norm: bool = False
    k_norm: bool = False
    row_padding: int = 0  # elements between the rows of qkv
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def spec(self) -> RopeSpec:
        return RopeSpec(
            self.num_heads, self.num_kv_heads, self.head_size, self.block_size, self.dtype, self.kv_dtype or self.dtype
        )

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


def rope_case(**overrides: object) -> RopeCase:
    return replace(RopeCase(), **overrides)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Inputs:
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def rope_inputs(case: RopeCase) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_size
    rows = poisoned((case.num_tokens, width + case.row_padding), case.dtype)
    rows[:, case.row_padding :] = (3 * torch.randn(case.num_tokens, width, generator=generator)).to(case.dtype)
    norms = [(1 + torch.randn(case.head_size, generator=generator) / 4).to(case.dtype) for _ in range(2)]
    return Inputs(
        guarded(rows)[:, case.row_padding :],
        guarded(cos_sin_table(RopeConfig(), case.head_size, 100, 100)),
        guarded(torch.tensor([0 if slot < 0 else 7 * i + 3 for i, slot in enumerate(case.slots)], dtype=torch.int64)),
        guarded(torch.tensor(case.slots, dtype=torch.int64)),
        guarded(norms[0]) if case.q_norm else None,
        guarded(norms[1]) if case.k_norm else None,
    )


def run_rope(case: RopeCase, launcher: Launcher) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and the two caches, NaN where nothing was written."""
    inputs, spec = rope_inputs(case), case.spec
    q = guarded(poisoned((case.num_tokens, case.num_heads, case.head_size), case.dtype))
    shape = (4, case.num_kv_heads, case.block_size, case.head_size)
    k_cache, v_cache = (guarded(poisoned(shape, spec.kv_dtype)) for _ in range(2))
    RopeKvWrite(launcher, spec)(
        q,
        k_cache,
        v_cache,
        inputs.qkv,
        inputs.cos_sin,
        inputs.positions,
        inputs.slots,
        inputs.q_norm,
        inputs.k_norm,
        EPS,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    return q, k_cache, v_cache


def check_rope(case: RopeCase, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    inputs = rope_inputs(case)
    heads = inputs.qkv.double().reshape(case.num_tokens, -1, case.head_size)
    want_q, want_k, want_v = heads.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    table = inputs.cos_sin[inputs.positions].double()[:, None]
    want_q, want_k = rotated(want_q, table, inputs.q_norm), rotated(want_k, table, inputs.k_norm)
    largest = float(heads.abs().max())
    assert_within_ulps(q, want_q, 1, floor=largest * 2.0**-20)
    for cache, want, scale in ((k_cache, want_k, case.k_scale), (v_cache, want_v, case.v_scale)):
        expected = poisoned(cache.shape, cache.dtype)
        for token, slot in enumerate(case.slots):
            if slot < 0:
                continue
            block, offset = divmod(slot, case.block_size)
            assert_within_ulps(cache[block, :, offset], want[token] / scale, 1, floor=largest * 2.0**-20)
            expected[block, :, offset] = cache[block, :, offset]
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)), "other slots are left alone"


def rotated(x: torch.Tensor, table: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    if norm is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.double()
    half = x.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


CASES = {
    "head size 64": rope_case(),
    "head size 16": rope_case(head_size=16),
    "head size 80": rope_case(head_size=80, num_heads=3, num_kv_heads=1),
    "head size 96": rope_case(head_size=96, num_heads=5, num_kv_heads=5),
    "head size 128, blocks of 32": rope_case(head_size=128, block_size=32, slots=(33, 127, -1, 64)),
    "head size 256": rope_case(head_size=256, num_heads=3, num_kv_heads=1),
    "norms of q and k": rope_case(q_norm=True, k_norm=True),
    "norms at head size 80": rope_case(head_size=80, q_norm=True, k_norm=True),
    "a norm of q alone": rope_case(q_norm=True),
    "a norm of k alone": rope_case(k_norm=True),
    "rows that lie apart": rope_case(row_padding=64),
    "fp16": rope_case(dtype=FP16, k_norm=True),
    "fp32": rope_case(dtype=FP32, q_norm=True, k_norm=True),
    "fp8 cache": rope_case(kv_dtype=FP8, k_scale=0.5, v_scale=0.3),
    "fp8 cache that saturates": rope_case(kv_dtype=FP8, k_scale=1e-3, v_scale=1e-3),
    "fp8 cache under fp32": rope_case(dtype=FP32, kv_dtype=FP8),
    "padding alone": rope_case(slots=(-1, -1)),
    "no token": rope_case(slots=()),
}


@pytest.mark.parametrize("name", CASES)
def test_rope_and_the_write_equal_float64(name: str) -> None:
    if CASES[name].num_tokens == 0:
        run_rope(CASES[name], SimulatorLauncher())
        return
    check_rope(CASES[name], *run_rope(CASES[name], SimulatorLauncher()))


@pytest.mark.parametrize("name", ["norms at head size 80", "fp8 cache"])
def test_rope_does_not_depend_on_who_runs_first(name: str) -> None:
    q, k_cache, v_cache = identical_on_every_schedule(lambda launcher: run_rope(CASES[name], launcher))
    check_rope(CASES[name], q, k_cache, v_cache)


def test_rope_has_no_undefined_behaviour() -> None:
    case = rope_case(kv_dtype=FP8, q_norm=True)
    check_rope(case, *run_rope(case, SimulatorLauncher(build=SimulatorBuild(sanitize=True))))


def test_a_head_size_that_no_group_of_lanes_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="head size 72"):
        RopeSpec(4, 2, 72, 16, BF16, BF16)
