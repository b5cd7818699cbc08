"""Prefill attention against float64, on the CPU by the kernel's own source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor.backends.cuda.attention_prefill import PrefillAttention, PrefillSpec
from tests.kernels.prefill import (
    FAR_CASE,
    PrefillCase,
    beyond_31_bits,
    check_prefill,
    prefill_case,
    prefill_inputs,
)
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

TILES = prefill_case(query_lens=(1, 63, 64, 65, 130), seq_lens=(1, 63, 70, 90, 200))

CASES = {
    "chunks of one to 130 queries with offsets": TILES,
    "one head a K/V head": replace(TILES, query_lens=(65, 130), seq_lens=(65, 131), num_heads=1),
    "three heads": prefill_case(num_heads=3),
    "four heads on each of two": prefill_case(num_heads=8, num_kv_heads=2, query_lens=(3, 17), seq_lens=(40, 17)),
    "five heads": prefill_case(num_heads=5),
    "six heads": prefill_case(num_heads=6, query_lens=(22,)),
    "seven heads": prefill_case(num_heads=7),
    "eight heads": prefill_case(num_heads=8, query_lens=(17,)),
    "twelve heads": prefill_case(num_heads=12, query_lens=(11,)),
    "sixteen heads": prefill_case(num_heads=16, query_lens=(9,)),
    "head size 80": prefill_case(head_size=80),
    "head size 96": prefill_case(head_size=96, num_heads=4),
    "head size 128": prefill_case(head_size=128, query_lens=(40,), seq_lens=(130,)),
    "head size 256": prefill_case(head_size=256, query_lens=(40,)),
    "blocks of 32": prefill_case(block_size=32, query_lens=(1, 40), seq_lens=(33, 40)),
    "a window of one": prefill_case(window=1, query_lens=(70,), seq_lens=(150,)),
    "a window of a block": prefill_case(window=16, query_lens=(70,), seq_lens=(300,)),
    "a window beyond the sequence": prefill_case(window=1000, query_lens=(40,), seq_lens=(70,)),
    "a window inside a tile": prefill_case(window=100, query_lens=(130,), seq_lens=(260,), num_heads=1),
    "softcap": prefill_case(softcap=5.0, q_magnitude=4.0),
    "blocks that tables share": prefill_case(query_lens=(5, 9, 30), seq_lens=(70, 60, 96), shared_blocks=3),
    "logits of ten thousand": prefill_case(q_magnitude=1e4, query_lens=(40,), seq_lens=(140,)),
    "logits all equal": prefill_case(equal_keys=True),
    "fp16": prefill_case(dtype=FP16, query_lens=(40,), seq_lens=(140,)),
    "fp16, head size 128, window": prefill_case(dtype=FP16, head_size=128, window=20),
    "fp16, logits of ten thousand": prefill_case(dtype=FP16, q_magnitude=1e4),
    "fp8 cache": prefill_case(kv_dtype=FP8, k_scale=0.5, v_scale=0.25, query_lens=(40,), seq_lens=(140,)),
    "fp8 cache under fp16, head size 80": prefill_case(dtype=FP16, kv_dtype=FP8, head_size=80, v_scale=2.0),
    "fp8 cache, head size 256": prefill_case(kv_dtype=FP8, head_size=256, query_lens=(33,), seq_lens=(70,)),
    "fp32": prefill_case(dtype=FP32, query_lens=(1, 17, 40), seq_lens=(9, 40, 100), num_heads=6, num_kv_heads=2),
    "fp32, head size 80, window": prefill_case(dtype=FP32, head_size=80, window=33, query_lens=(40,), seq_lens=(130,)),
    "fp32, head size 256, softcap": prefill_case(dtype=FP32, head_size=256, softcap=3.0),
    "fp32, logits of ten thousand": prefill_case(dtype=FP32, q_magnitude=1e4),
    "fp32 with an fp8 cache": prefill_case(dtype=FP32, kv_dtype=FP8, k_scale=2.0, v_scale=0.5),
    "decode rows between chunks": prefill_case(query_lens=(4, 1, 5), seq_lens=(20, 30, 40), not_chunked=(1,)),
    "no chunk at all": prefill_case(query_lens=(1,), seq_lens=(30,), not_chunked=(0,)),
}


@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_float64(name: str) -> None:
    check_prefill(CASES[name])


@pytest.mark.parametrize(
    "case",
    [prefill_case(window=20), prefill_case(kv_dtype=FP8), prefill_case(dtype=FP32)],
    ids=["bf16", "fp8", "fp32"],
)
def test_prefill_has_no_undefined_behaviour(case: PrefillCase) -> None:
    check_prefill(case, SimulatorBuild(sanitize=True))


def test_a_cache_of_more_than_2_to_the_31_elements() -> None:
    check_prefill(FAR_CASE, inputs=beyond_31_bits(prefill_inputs(FAR_CASE)))


def test_a_device_with_too_little_shared_memory_is_named() -> None:
    with pytest.raises(ValueError, match=r"head size 128 takes 69632 bytes of shared memory a block.* has 49152"):
        PrefillAttention(SimulatorLauncher(shared_limit=48 << 10), prefill_case(head_size=128).spec)


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="7 heads do not share 2 K/V heads evenly"):
        PrefillSpec(7, 2, 64, 16, BF16, BF16)
