"""How the work of one step is cut into thread blocks: a pure function of lengths, in numpy.

Owns two lists. Decode: the K/V of each query row is cut into items of `chunk` tokens; a row of several items leaves
partial results in slots, which merge_states joins. Prefill: the queries of each sequence are cut into tiles. Knows
neither tensors nor kernels, and lengths alone decide: equal lengths give equal lists.

Invariant: the items of a row cover [begin, end) of its keys once, where begin is the first tile boundary that its
window reaches; slots are [0, num_slots), in row order, and only rows of two items or more own any.

The smallest chunk whose items still fill the machine once is the best one: fewer items leave multiprocessors idle, more
pay for merging (up to 1.47 times the time, as others measured). The deterministic mode's chunk is a constant counted
from position 0, so that a position's sum never depends on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

TILE = 64  # keys that a kernel reads at once; chunks are multiples of it
MIN_CHUNK = 128  # below this, merging costs more than it gains
DETERMINISTIC_CHUNK = 512


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Items of all decode rows, those with the most keys first."""

    items: Ints  # [num_items, 4]: row, kv_begin, kv_end, slot (-1: the row's only item, written out directly)
    slot_ptr: Ints  # [num_rows + 1]: row r owns slots [slot_ptr[r], slot_ptr[r + 1])
    chunk: int  # tokens of an item at most

    @property
    def num_slots(self) -> int:
        return int(self.slot_ptr[-1])


def decode_plan(
    seq_lens: Ints | Longs,
    ctas_per_item: int,
    num_ctas: int,
    window: int | None = None,
    deterministic: bool = False,
) -> DecodePlan:
    """seq_lens [num_rows]: keys of each row, the query's own counted. 0 is padding: such a row has no item.

    `num_ctas`: thread blocks that run on the device at once; one item takes `ctas_per_item` of them.
    """
    ends = np.asarray(seq_lens, np.int64)
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0) // TILE * TILE
    if deterministic:
        chunk, origins = DETERMINISTIC_CHUNK, np.zeros_like(begins)
    else:
        chunk, origins = choose_chunk(ends - begins, max(1, num_ctas // ctas_per_item)), begins
    first = (begins - origins) // chunk
    counts = np.where(ends > 0, -(-(ends - origins) // chunk) - first, 0)
    slots = np.where(counts > 1, counts, 0)
    slot_ptr = np.zeros(len(ends) + 1, np.int32)
    np.cumsum(slots, out=slot_ptr[1:])

    order = np.argsort(begins - ends, kind="stable")
    per_row = counts[order]
    row = np.repeat(order, per_row)
    within = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    left = origins[row] + (first[row] + within) * chunk
    items = np.empty((len(row), 4), np.int32)
    items[:, 0] = row
    items[:, 1] = np.maximum(left, begins[row])
    items[:, 2] = np.minimum(left + chunk, ends[row])
    items[:, 3] = np.where(counts[row] > 1, slot_ptr[row] + within, -1)
    return DecodePlan(items, slot_ptr, chunk)


def choose_chunk(spans: Longs, max_items: int) -> int:
    """The smallest multiple of TILE, MIN_CHUNK at least, by which `spans` [num_rows] make at most `max_items` items;
    if no chunk does, the one that splits nothing."""
    longest = int(spans.max(initial=0))
    low, high = MIN_CHUNK // TILE, max(MIN_CHUNK // TILE, -(-longest // TILE))
    while low < high:
        middle = (low + high) // 2
        if int((-(-spans // (middle * TILE))).sum()) > max_items:
            low = middle + 1
        else:
            high = middle
    return low * TILE


def max_items(num_rows: int, ctas_per_item: int, num_ctas: int) -> int:
    """The most items that `decode_plan` gives `num_rows` rows outside the deterministic mode, and the most slots."""
    return max(num_rows, num_ctas // ctas_per_item)


def prefill_tiles(query_lens: Ints | Longs, seq_lens: Ints | Longs, tile_tokens: int) -> Ints:
    """query_lens, seq_lens [num_seqs] -> [num_tiles, 2]: (sequence, first query of the tile, counted in the sequence's
    own queries). Tiles that read the most keys come first: the last ones to start should be short."""
    lens = np.asarray(query_lens, np.int64)
    counts = -(-lens // tile_tokens)
    sequence = np.repeat(np.arange(len(lens)), counts)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    visible = np.minimum(first + tile_tokens, lens[sequence]) + (np.asarray(seq_lens, np.int64) - lens)[sequence]
    order = np.argsort(-visible, kind="stable")
    return np.stack([sequence[order], first[order]], axis=1).astype(np.int32)


def padded(rows: Ints, capacity: int) -> Ints:
    """rows [n, ...] with zeros behind, [capacity, ...]: what a fixed grid reads, the valid count told apart."""
    assert len(rows) <= capacity, f"{len(rows)} rows in a grid of {capacity}"
    whole = np.zeros((capacity, *rows.shape[1:]), np.int32)
    whole[: len(rows)] = rows
    return whole
