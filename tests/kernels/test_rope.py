"""Rope with the write of K and V, against float64: one rounding at the end, and nothing written that should not be."""

from __future__ import annotations

import pytest
import torch

from executor.backends.cuda.elementwise import RopeSpec
from tests.kernels.rope import check_rope, rope_case, run_rope
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

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
}


@pytest.mark.parametrize("name", CASES)
def test_rope_and_the_write_equal_float64(name: str) -> None:
    check_rope(CASES[name])


def test_no_token_launches_nothing() -> None:
    q, k_cache, _ = run_rope(rope_case(slots=()), SimulatorLauncher())
    assert q.numel() == 0
    assert k_cache.isnan().all()


def test_rope_has_no_undefined_behaviour() -> None:
    check_rope(rope_case(kv_dtype=FP8, q_norm=True), SimulatorBuild(sanitize=True))


def test_a_head_size_that_no_group_of_lanes_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="head size 72"):
        RopeSpec(4, 2, 72, 16, BF16, BF16)
