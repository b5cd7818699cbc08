"""Cases of rope with the write of K and V, run under every schedule and compared with float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from executor.backends.cuda.elementwise import RopeKvWrite, RopeSpec
from executor.backends.cuda.launch import Launcher
from executor.model.rope import RopeConfig, cos_sin_table
from tests.kernels.factories import poisoned
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, guarded
from tests.kernels.ulps import assert_within_ulps

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class RopeCase:
    """Tokens of one step, some of them padding."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
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


def check_rope(case: RopeCase, build: SimulatorBuild | None = None) -> None:
    """Under every schedule: the same bits, and right ones, one rounding from exact; no other slot is written."""
    q, k_cache, v_cache = identical_on_every_schedule(lambda launcher: run_rope(case, launcher), build)
    inputs = rope_inputs(case)
    heads = inputs.qkv.double().reshape(case.num_tokens, -1, case.head_size)
    want_q, want_k, want_v = heads.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    table = inputs.cos_sin[inputs.positions].double()[:, None]
    want_q, want_k = rotated(want_q, table, inputs.q_norm), rotated(want_k, table, inputs.k_norm)
    largest = float(heads.abs().max())
    ulps = 1.0 if case.dtype == torch.float32 else 0.51  # one rounding, of what was computed in fp32
    assert_within_ulps(q, want_q, ulps, floor=largest * 2.0**-20)
    for cache, want, scale in ((k_cache, want_k, case.k_scale), (v_cache, want_v, case.v_scale)):
        expected = poisoned(cache.shape, cache.dtype)
        for token, slot in enumerate(case.slots):
            if slot < 0:
                continue
            block, offset = divmod(slot, case.block_size)
            assert_within_ulps(cache[block, :, offset], want[token] / scale, ulps, floor=largest * 2.0**-20)
            expected[block, :, offset] = cache[block, :, offset]
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)), "other slots are left alone"


def rotated(x: torch.Tensor, table: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    if norm is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.double()
    half = x.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
