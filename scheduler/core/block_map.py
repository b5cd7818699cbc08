"""A picture of one executor's KV cache between two steps: who holds which block, how full it is, what free ones keep.

A value, made when somebody looks and never otherwise. Columns have one entry for each physical block, the null block
included, so that an entry's place is its block's id. There are no tokens in it, only counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.core.kv_cache import KVCache
from scheduler.core.request import Sequence


class Holder(NamedTuple):
    """A running sequence, and what it has."""

    sequence_id: int
    output_ids: tuple[int, ...]  # of its request: those of one prompt share a colour
    priority: int
    num_prompt_tokens: int
    num_tokens: int  # known or being drawn
    num_computed_tokens: int  # K/V is in its blocks, or will be when the plans in flight have run
    num_cached_tokens: int  # of the prompt, found in the prefix cache at its first admission
    num_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """See the module."""

    block_size: int
    holders: tuple[Holder, ...]  # in the order in which they are served
    holder_of: array[int]  # [num_blocks] uint16: 1 + the place in `holders` of the first that holds it; 0: nobody
    ref_cnt: array[int]  # [num_blocks] uint16: sequences that hold it
    num_filled: bytes  # [num_blocks] slots with K/V; of a free block, all where its prefix can still be found, else 0

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return len(self.ref_cnt)


def draw_block_map(kv: KVCache, running: SequenceOf[Sequence]) -> BlockMap:
    """`running` are all sequences that hold blocks, in order. Blocks are many, so columns are made whole wherever that
    is possible, and only blocks that are not full are looked at closely."""
    place_of = [0] * kv.pool.num_blocks
    open_blocks: dict[int, int] = {}  # of sequences, not full: slots that are
    for place in range(len(running), 0, -1):  # the first one's mark is the last that is made
        sequence = running[place - 1]
        for block_id in sequence.block_table:
            place_of[block_id] = place
        num_full, rest = divmod(sequence.num_computed_tokens, kv.block_size)
        for block_id in sequence.block_table[num_full:]:
            open_blocks[block_id] = max(rest, open_blocks.get(block_id, 0))
            rest = 0
    ref_cnt = kv.pool.ref_counts()
    held_or_cached = _either(bytes(map(bool, ref_cnt)), kv.pool.indexed())
    num_filled = bytearray(held_or_cached.replace(b"\x01", bytes([kv.block_size])))
    for block_id, filled in open_blocks.items():
        num_filled[block_id] = filled
    return BlockMap(
        block_size=kv.block_size,
        holders=tuple(map(_holder, running)),
        holder_of=array("H", place_of),
        ref_cnt=ref_cnt,
        num_filled=bytes(num_filled),
    )


def _either(one: bytes, other: bytes) -> bytes:
    """1 where either is 1."""
    return (int.from_bytes(one, "big") | int.from_bytes(other, "big")).to_bytes(len(one), "big")


def _holder(sequence: Sequence) -> Holder:
    return Holder(
        sequence_id=sequence.sequence_id,
        output_ids=sequence.request.sequence_ids,
        priority=sequence.request.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_blocks=len(sequence.block_table),
        num_preemptions=sequence.generation,
    )
