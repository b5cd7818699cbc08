"""The work lists of a step: what each item covers, how many there are, and that lengths alone decide."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.backends.cuda.plan import (
    DETERMINISTIC_CHUNK,
    MIN_CHUNK,
    TILE,
    DecodePlan,
    choose_chunk,
    decode_plan,
    max_items,
    padded,
    prefill_tiles,
)

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def plan(seq_lens: list[int], ctas_per_item: int = 8, num_ctas: int = 132, **options: object) -> DecodePlan:
    return decode_plan(np.array(seq_lens, np.int32), ctas_per_item, num_ctas, **options)  # type: ignore[arg-type]


def covered(decode: DecodePlan, row: int) -> list[tuple[int, int]]:
    """The [begin, end) of a row's items, in order of position."""
    return sorted((begin, end) for item_row, begin, end, _ in decode.items.tolist() if item_row == row)


@given(lengths, st.one_of(st.none(), st.integers(1, 600)), st.booleans(), st.integers(1, 8), st.integers(1, 300))
def test_the_items_of_a_row_cover_what_it_sees_once(
    seq_lens: list[int], window: int | None, deterministic: bool, ctas_per_item: int, num_ctas: int
) -> None:
    decode = plan(seq_lens, ctas_per_item, num_ctas, window=window, deterministic=deterministic)
    for row, length in enumerate(seq_lens):
        spans = covered(decode, row)
        start = 0 if window is None else max(0, length - window)
        assert spans[0][0] <= start < spans[0][0] + TILE
        assert spans[0][0] % TILE == 0
        assert spans[-1][1] == length
        assert all(left[1] == right[0] for left, right in pairwise(spans))
        assert all(end - begin <= decode.chunk for begin, end in spans)


@given(lengths, st.integers(1, 8), st.integers(1, 300))
def test_slots_are_those_of_split_rows_in_row_order(seq_lens: list[int], ctas_per_item: int, num_ctas: int) -> None:
    decode = plan(seq_lens, ctas_per_item, num_ctas)
    for row in range(len(seq_lens)):
        own = [(begin, slot) for item_row, begin, _, slot in decode.items.tolist() if item_row == row]
        slots = [slot for _, slot in sorted(own)]
        owned = list(range(decode.slot_ptr[row], decode.slot_ptr[row + 1]))
        assert slots == (owned if len(own) > 1 else [-1])


@given(lengths, st.integers(1, 8), st.integers(1, 300))
def test_items_fit_the_fixed_grid(seq_lens: list[int], ctas_per_item: int, num_ctas: int) -> None:
    decode = plan(seq_lens, ctas_per_item, num_ctas)
    most = max_items(len(seq_lens), ctas_per_item, num_ctas)
    assert len(decode.items) <= most
    assert decode.num_slots <= most


@given(lengths, st.integers(1, 200))
def test_the_chunk_is_the_smallest_that_fills_the_machine_once(seq_lens: list[int], most: int) -> None:
    spans = np.array(seq_lens, np.int64)
    chunk = choose_chunk(spans, most)
    assert chunk % TILE == 0
    assert chunk >= MIN_CHUNK
    fits = int((-(-spans // chunk)).sum()) <= most
    assert fits or chunk >= spans.max()
    if chunk > MIN_CHUNK:
        assert int((-(-spans // (chunk - TILE))).sum()) > most


def test_one_long_sequence_is_spread_over_the_machine() -> None:
    decode = plan([4096], ctas_per_item=8, num_ctas=132)
    assert decode.chunk == 256  # 16 items of 8 thread blocks
    assert decode.items[0].tolist() == [0, 0, 256, 0]
    assert decode.slot_ptr.tolist() == [0, 16]


def test_a_full_batch_is_not_split() -> None:
    decode = plan([4096] * 64, ctas_per_item=8, num_ctas=132)
    assert decode.items.shape == (64, 4)
    assert set(decode.items[:, 3].tolist()) == {-1}
    assert decode.num_slots == 0


def test_long_rows_start_first() -> None:
    assert plan([5, 300, 100], num_ctas=8).items[:, 0].tolist() == [1, 2, 0]


def test_a_last_item_may_be_of_one_token() -> None:
    assert covered(plan([257], ctas_per_item=1, num_ctas=3), 0) == [(0, 128), (128, 256), (256, 257)]


def test_padding_has_no_items() -> None:
    decode = plan([7, 0, 0])
    assert decode.items.tolist() == [[0, 0, 7, -1]]
    assert decode.slot_ptr.tolist() == [0, 0, 0, 0]


def test_an_empty_batch_has_no_items() -> None:
    decode = plan([])
    assert decode.items.shape == (0, 4)
    assert decode.slot_ptr.tolist() == [0]


@given(lengths, st.lists(st.integers(1, 5000), max_size=20), st.integers(1, 300))
def test_in_deterministic_mode_a_row_is_cut_alike_whatever_the_batch(
    seq_lens: list[int], others: list[int], num_ctas: int
) -> None:
    alone = [covered(plan([length], deterministic=True), 0) for length in seq_lens]
    together = plan(seq_lens + others, num_ctas=num_ctas, deterministic=True)
    assert [covered(together, row) for row in range(len(seq_lens))] == alone
    assert all(begin % DETERMINISTIC_CHUNK == 0 for spans in alone for begin, _ in spans)


def test_the_deterministic_cut_of_a_position_is_part_of_that_of_a_later_one() -> None:
    early, late = covered(plan([1100], deterministic=True), 0), covered(plan([1600], deterministic=True), 0)
    assert early == [(0, 512), (512, 1024), (1024, 1100)]
    assert late[:2] == early[:2]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=10))
def test_tiles_cover_each_query_once(sequences: list[tuple[int, int]]) -> None:
    query_lens = np.array([queries for queries, _ in sequences])
    seq_lens = query_lens + np.array([cached for _, cached in sequences])
    tiles = prefill_tiles(query_lens, seq_lens, 64)
    expected = [(sequence, first) for sequence, count in enumerate(query_lens) for first in range(0, count, 64)]
    assert sorted(map(tuple, tiles.tolist())) == expected


def test_tiles_that_read_the_most_come_first() -> None:
    tiles = prefill_tiles(np.array([130, 10]), np.array([130, 500]), 64)
    assert tiles.tolist() == [[1, 0], [0, 128], [0, 64], [0, 0]]


def test_a_fixed_grid_is_filled_with_zeros() -> None:
    assert padded(np.array([[1, 2]], np.int32), 3).tolist() == [[1, 2], [0, 0], [0, 0]]


def test_more_than_the_grid_holds_is_our_fault() -> None:
    with pytest.raises(AssertionError, match="2 rows in a grid of 1"):
        padded(np.zeros((2, 4), np.int32), 1)
