"""Native attention against a dense one in float64, at every instruction set that this CPU runs.

The caches hold NaN wherever no token of the step's sequences stands: in block 0, in unused blocks, past the end of each
last block.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from executor.backends.cpu.native.library import Level
from tests.executor.native.factories import LEVELS, Shape, Span, Step

MIXED = [Span(1), Span(150), Span(33, 33), Span(64), Span(90, 20), Span(16, 3), Span(130, 130)]

every_level = pytest.mark.parametrize("level", LEVELS)
both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@every_level
@both_formats
@pytest.mark.parametrize("block_size", [16, 32])
def test_decodes_of_every_length(level: Level, dtype: torch.dtype, block_size: int) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 127, 128, 129, 700]
    step = Step([Span(length) for length in lengths], Shape(block_size=block_size, dtype=dtype))
    step.assert_right(step.backend(level))


@every_level
@both_formats
@pytest.mark.parametrize("query_len", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("offset", [0, 1, 15, 64, 100])
def test_chunks_of_a_prompt(level: Level, dtype: torch.dtype, query_len: int, offset: int) -> None:
    step = Step([Span(offset + query_len, query_len)], Shape(num_kv_heads=1, dtype=dtype))
    step.assert_right(step.backend(level))


@every_level
@both_formats
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48])
def test_any_number_of_heads_shares_a_read(level: Level, dtype: torch.dtype, group: int) -> None:
    step = Step([Span(70), Span(40, 9), Span(17)], Shape(group=group, dtype=dtype))
    step.assert_right(step.backend(level))


@every_level
@both_formats
@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [16, 32])
def test_head_sizes(level: Level, dtype: torch.dtype, head_size: int, block_size: int) -> None:
    step = Step(MIXED[:5], Shape(head_size=head_size, block_size=block_size, dtype=dtype))
    step.assert_right(step.backend(level))


@every_level
@both_formats
@pytest.mark.parametrize("window", [1, 5, 16, 64, 70, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_softcaps(level: Level, dtype: torch.dtype, window: int, softcap: float | None) -> None:
    step = Step(MIXED, Shape(dtype=dtype))
    step.assert_right(step.backend(level), window, softcap)


@every_level
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("spans", [[Span(3000)], [Span(40), Span(1500, 5), Span(2000)]], ids=["alone", "among others"])
@pytest.mark.parametrize("window", [None, 1200])
def test_two_threads_share_long_contexts(
    level: Level, deterministic: bool, spans: Sequence[Span], window: int | None, two_threads: None
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        step = Step(spans, Shape(dtype=dtype))
        step.assert_right(step.backend(level, deterministic), window)


@every_level
@both_formats
def test_shared_blocks_serve_each_sequence(level: Level, dtype: torch.dtype) -> None:
    step = Step([Span(100, 36), Span(90, shares=4), Span(81, 17, shares=2)], Shape(dtype=dtype))
    step.assert_right(step.backend(level))


@every_level
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_of_ten_thousand_overflow_nothing(level: Level, softcap: float | None) -> None:
    step = Step([Span(200), Span(100, 50)], query_scale=3e3)
    logits = step.q.double().abs().max() * step.cache.nan_to_num().abs().max() * 64 * step.scale
    assert logits > 1e4
    out = step.attention(step.backend(level), softcap=softcap)
    # fp32 holds a logit of 1e4 to within 1e-3, and a weight is its exponential.
    torch.testing.assert_close(out.double(), step.expected(softcap=softcap), rtol=0, atol=2e-2)


@every_level
@both_formats
def test_a_query_of_nan_spoils_itself_alone(level: Level, dtype: torch.dtype) -> None:
    step = Step([Span(30), Span(80, 9), Span(30)], Shape(dtype=dtype))
    clean = step.attention(step.backend(level))
    step.q[4] = torch.nan
    out = step.attention(step.backend(level))
    assert out[4].isnan().all()
    assert torch.equal(torch.cat((out[:4], out[5:])), torch.cat((clean[:4], clean[5:])))


@every_level
@both_formats
def test_in_the_deterministic_mode_neither_chunks_nor_neighbours_change_a_bit(level: Level, dtype: torch.dtype) -> None:
    whole = Step([Span(1100, 40)], Shape(dtype=dtype))
    backend = whole.backend(level, deterministic=True)
    expected = whole.attention(backend)
    torch.set_num_threads(2)
    for first, last in ((0, 1), (5, 6), (3, 20), (39, 40)):
        part = Step([Span(1060 + last, last - first)], Shape(dtype=dtype))
        part.q, part.cache = whole.q[first:last].contiguous(), whole.cache
        tables = torch.zeros(1, whole.metadata.block_tables.shape[1], dtype=torch.int32)
        tables[0] = whole.metadata.block_tables[0]
        part.metadata.block_tables.resize_(tables.shape).copy_(tables)
        assert torch.equal(part.attention(backend), expected[first:last])
    torch.set_num_threads(1)


@both_formats  # with smaller logits: plain torch rounds them to the format
def test_a_cache_that_the_library_does_not_serve_is_read_in_plain_torch(dtype: torch.dtype) -> None:
    step = Step(MIXED, Shape(block_size=8, dtype=dtype), query_scale=1.0)
    step.assert_right(step.backend())
    step = Step(MIXED[:3], Shape(group=49, num_kv_heads=1, dtype=dtype), query_scale=1.0)
    step.assert_right(step.backend())


@pytest.mark.parametrize("deterministic", [False, True])
@both_formats
def test_plain_torch_gives_the_same(deterministic: bool, dtype: torch.dtype) -> None:
    step = Step(MIXED, Shape(dtype=dtype), query_scale=1.0)
    step.assert_right(step.backend(deterministic=deterministic, native=False), window=70)
