"""Decode attention, its kernels' own source on the CPU: every case under three orders and two ways of copying."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.kernels.decode import check_decode
from tests.kernels.factories import DecodeCase, cache_beyond_31_bits, decode_case, decode_inputs
from tests.kernels.sim import SimulatorBuild

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
Make = Callable[..., DecodeCase]
SPLIT = 1000  # thread blocks: rows are cut as small as the plan allows
HALF_SCALES = {"kv_dtype": FP8, "k_scale": 0.5, "v_scale": 0.25}


def simt(**overrides: object) -> DecodeCase:
    return decode_case(num_heads=4, num_kv_heads=2, **overrides)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_lengths_about_a_block_a_tile_and_several_tiles(kernel: Make, block_size: int) -> None:
    lengths = (1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 257)
    check_decode(kernel(seq_lens=lengths, block_size=block_size))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_partitions_join_to_the_whole(kernel: Make) -> None:
    inputs = check_decode(kernel(seq_lens=(129, 300, 64, 513), num_ctas=SPLIT))
    assert inputs.plan.num_slots == 2 + 3 + 5  # 129 and 513: the last partition holds one token


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_query_heads_on_a_kv_head(heads: int) -> None:
    check_decode(decode_case(seq_lens=(40, 200), num_heads=2 * heads, num_ctas=SPLIT))


def test_more_query_heads_than_a_tile_has_rows() -> None:
    check_decode(decode_case(seq_lens=(40, 200), num_heads=20, num_kv_heads=1, num_ctas=SPLIT))


def test_an_odd_group_of_heads_of_an_fp32_cache() -> None:
    check_decode(decode_case(seq_lens=(40, 200), num_heads=6, dtype=FP32, num_ctas=SPLIT))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_head_sizes(kernel: Make, kv_dtype: torch.dtype | None, head_size: int) -> None:
    check_decode(kernel(seq_lens=(70, 140), head_size=head_size, kv_dtype=kv_dtype, num_ctas=SPLIT))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_fp8_caches_with_scales(kernel: Make, dtype: torch.dtype) -> None:
    check_decode(kernel(seq_lens=(1, 33, 150), dtype=dtype, num_ctas=SPLIT, **HALF_SCALES))


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_formats(dtype: torch.dtype) -> None:
    check_decode(decode_case(dtype=dtype))


@pytest.mark.parametrize("head_size", [64, 256])
def test_little_shared_memory(head_size: int) -> None:
    check_decode(decode_case(seq_lens=(1, 150, 300), head_size=head_size), shared_limit=99 << 10)


@pytest.mark.parametrize("window", [1, 16, 17, 100, 1000])
@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_sliding_window(kernel: Make, window: int) -> None:
    check_decode(kernel(seq_lens=(1, 16, 130, 300), window=window, num_ctas=SPLIT))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_softcap(kernel: Make) -> None:
    check_decode(kernel(softcap=3.0, q_magnitude=8.0, seq_lens=(5, 130)))


@pytest.mark.parametrize("num_ctas", [1, SPLIT])
@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_logits_of_ten_thousand(kernel: Make, num_ctas: int) -> None:
    check_decode(kernel(q_magnitude=1e4, seq_lens=(2, 65, 300), num_ctas=num_ctas))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_equal_logits(kernel: Make) -> None:
    check_decode(kernel(equal_keys=True, seq_lens=(17, 300), num_ctas=SPLIT))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_blocks_that_tables_share(kernel: Make) -> None:
    check_decode(kernel(shared_blocks=3, seq_lens=(50, 49, 130, 200)))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_rows_scattered_among_other_tokens(kernel: Make) -> None:
    check_decode(kernel(token_rows=True, seq_lens=(3, 140, 20), num_ctas=SPLIT))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_padded_rows_are_left_alone(kernel: Make) -> None:
    check_decode(kernel(seq_lens=(0, 20, 0, 140, 0), num_ctas=SPLIT))


def test_a_batch_of_padding_writes_nothing() -> None:
    check_decode(decode_case(seq_lens=(0, 0)))


def test_an_empty_grid() -> None:
    check_decode(decode_case(seq_lens=(0,), spare_items=0))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_offsets_beyond_31_bits(kernel: Make) -> None:
    case = kernel(seq_lens=(20, 40), num_ctas=1)
    check_decode(case, inputs=cache_beyond_31_bits(decode_inputs(case)))


@pytest.mark.parametrize("kernel", [decode_case, simt])
def test_a_row_does_not_depend_on_the_batch_in_the_deterministic_mode(kernel: Make) -> None:
    lengths = (700, 1100)
    together = check_decode(kernel(seq_lens=lengths, deterministic=True))
    # The same first row alone: the generator hands out other blocks, so the cache is taken over.
    alone = check_decode(kernel(seq_lens=lengths[:1], deterministic=True), inputs=together.first_rows(1))
    assert torch.equal(alone.out[0], together.out[0])


@pytest.mark.parametrize(
    "case",
    [
        decode_case(seq_lens=(1, 65, 200), num_ctas=SPLIT),
        decode_case(seq_lens=(65, 200), window=30, head_size=80, **HALF_SCALES),
        simt(seq_lens=(65, 200), softcap=5.0),
        simt(seq_lens=(65, 200), dtype=FP32, q_magnitude=1e4, num_ctas=SPLIT),
    ],
)
def test_no_undefined_behaviour(case: DecodeCase) -> None:
    check_decode(case, SimulatorBuild(sanitize=True))


FORMATS = [(BF16, BF16), (BF16, FP8), (FP16, FP16), (FP16, FP8), (FP32, FP32), (FP32, FP8)]
EVERY_COMBINATION = list(
    itertools.product(FORMATS, [64, 80, 96, 128, 256], [16, 32], [1, 2, 4, 7, 16], [1, SPLIT], [None, 50], [None, 4.0])
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("formats", "head_size", "block_size", "heads", "num_ctas", "window", "softcap"), EVERY_COMBINATION
)
def test_every_combination(
    formats: tuple[torch.dtype, torch.dtype],
    head_size: int,
    block_size: int,
    heads: int,
    num_ctas: int,
    window: int | None,
    softcap: float | None,
) -> None:
    dtype, kv_dtype = formats
    check_decode(
        decode_case(
            seq_lens=(1, 31, 64, 129, 200),
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_size=head_size,
            block_size=block_size,
            num_heads=2 * heads,
            num_ctas=num_ctas,
            window=window,
            softcap=softcap,
        )
    )
