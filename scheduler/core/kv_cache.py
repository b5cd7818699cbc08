"""Block tables: which physical blocks hold the K/V of which tokens of a sequence.

It gives a sequence blocks as its tokens arrive, finds blocks that hold its prefix already, shares blocks between
copies of a sequence, and splits a shared block on its first write. It decides nothing about who runs.
Invariants: only full blocks are found by hash; a block is in the index only after the step that filled it came back
well; a block with more than one holder is never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from scheduler.core.block_hash import extend_chain, root_hash
from scheduler.core.block_pool import BlockPool
from scheduler.core.plan import Copy, TableUpdate
from scheduler.core.request import Sequence


class Extension(NamedTuple):
    """What a sequence's table gained for the tokens of one step."""

    table: TableUpdate
    copy: Copy | None


class KVCache:
    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._pending: dict[bytes, int] = {}  # hash being filled by plans in flight -> how many fill it
        self._copy_sources: set[int] = set()  # of the plan being made
        self._held_sources: list[int] = []  # freed in this plan, kept from being overwritten until it is made

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has all blocks."""
        return self.pool.num_usable * self.block_size

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Prefixes.

    def find_prefix(self, sequence: Sequence) -> list[int] | None:
        """Blocks that hold the longest known prefix of the sequence, without its last token, which must be computed
        to get logits. None: a plan in flight is filling the next block, so it pays to wait for it."""
        blocks: list[int] = []
        if not self._prefix_caching or sequence.wants_prompt_logprobs:
            return blocks
        self._extend_hashes(sequence)
        for block_hash in sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                return None if block_hash in self._pending else blocks
            blocks.append(block_id)
        return blocks

    def count_cached_blocks(self, prompt_hashes: tuple[bytes, ...], num_tokens: int) -> tuple[int, int]:
        """Blocks that a sequence of `num_tokens` tokens would find, and how many of those are free."""
        cached = free = 0
        for block_hash in prompt_hashes[: (num_tokens - 1) // self.block_size] if self._prefix_caching else ():
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            cached += 1
            free += self.pool.ref_cnt(block_id) == 0
        return cached, free

    def adopt_prefix(self, sequence: Sequence, blocks: list[int]) -> None:
        """The sequence, which holds nothing, begins with these blocks."""
        assert not sequence.block_table
        for block_id in blocks:
            self.pool.touch(block_id)
        sequence.block_table = list(blocks)
        sequence.num_adopted_blocks = len(blocks)
        sequence.num_computed_tokens = len(blocks) * self.block_size

    def num_free_among(self, blocks: list[int]) -> int:
        return sum(self.pool.ref_cnt(block_id) == 0 for block_id in blocks)

    # Tables.

    def num_blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that the next `num_tokens` tokens of the sequence take; 0 means it has the slots."""
        needed = -(-(sequence.num_computed_tokens + num_tokens) // self.block_size) - len(sequence.block_table)
        return needed + (sequence.may_share_last_block and self._shared_last_block(sequence) is not None)

    def extend(self, sequence: Sequence, num_tokens: int) -> Extension:
        """Gives the sequence the slots of its next `num_tokens` tokens. The blocks needed must be free."""
        table = sequence.block_table
        start = len(table)
        copy = None
        shared = self._shared_last_block(sequence)
        if shared is not None:
            start -= 1
            copy = Copy(shared, self.pool.allocate())
            self._copy_sources.add(shared)
            self._release([shared])
            table[start] = copy.destination
            sequence.num_adopted_blocks = min(sequence.num_adopted_blocks, start)
        for _ in range(self.num_blocks_of(sequence.num_computed_tokens + num_tokens) - len(table)):
            table.append(self.pool.allocate())
        return Extension(TableUpdate(sequence.sequence_id, start, tuple(table[start:])), copy)

    def _shared_last_block(self, sequence: Sequence) -> int | None:
        """The partly filled block that the next token goes to, if others hold it too."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if offset and self.pool.ref_cnt(sequence.block_table[index]) > 1:
            return sequence.block_table[index]
        sequence.may_share_last_block = False
        return None

    def share(self, parent: Sequence, child: Sequence) -> None:
        """The child begins with all the blocks of its parent, the partly filled last one too."""
        for block_id in parent.block_table:
            self.pool.touch(block_id)
        child.block_table = list(parent.block_table)
        child.num_adopted_blocks = len(child.block_table)
        parent.may_share_last_block = child.may_share_last_block = True
        child.block_hashes = list(parent.block_hashes)

    def free(self, sequence: Sequence) -> None:
        """Takes all its blocks; the end of the sequence will be evicted before its beginning."""
        self._release(reversed(sequence.block_table))
        sequence.block_table = []

    def _release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id in self._copy_sources and self.pool.ref_cnt(block_id) == 1:
                self._held_sources.append(block_id)  # else it might become a destination of the same plan
            else:
                self.pool.release([block_id])

    def end_plan(self) -> None:
        """The plan is made: sources of its copies that nobody holds any more are free from the next one on."""
        self.pool.release(self._held_sources)
        self._held_sources.clear()
        self._copy_sources.clear()

    # The index, and what is on its way into it.

    def expect(self, sequence: Sequence, start: int, end: int) -> range:
        """A plan in flight computes [start, end): the blocks that it fills are pending, if their ids are known.
        Returns their indices, for `settle`."""
        if not self._prefix_caching:
            return range(0)
        self._extend_hashes(sequence)
        indices = range(start // self.block_size, min(end // self.block_size, len(sequence.block_hashes)))
        for block_hash in sequence.block_hashes[indices.start : indices.stop]:
            self._pending[block_hash] = self._pending.get(block_hash, 0) + 1
        return indices

    def settle(self, sequence: Sequence, indices: range) -> None:
        """That plan came back, or the sequence no longer waits for it."""
        for block_hash in sequence.block_hashes[indices.start : indices.stop]:
            self._pending[block_hash] -= 1
            if not self._pending[block_hash]:
                del self._pending[block_hash]

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """K/V of [start, end) is in the sequence's blocks: those that this filled can be found from now on."""
        if not self._prefix_caching:
            return
        self._extend_hashes(sequence)
        for index in range(start // self.block_size, end // self.block_size):
            parent = sequence.block_hashes[index - 1] if index else b""
            self.pool.index(sequence.block_table[index], sequence.block_hashes[index], parent, _writer(sequence))

    def forget_computed_by(self, sequence: Sequence) -> set[int]:
        """Takes every block that the sequence computed, in this generation or before, out of the index, and with it
        what others computed on such a block; returns those blocks and the ones the sequence fills now: whoever holds
        one must not build on it."""
        bad = set(sequence.block_table[sequence.num_adopted_blocks :])
        hashes = []
        for block_hash in sequence.block_hashes:
            block_id = self.pool.lookup(block_hash)
            if block_id is not None and self.pool.writer(block_id) == _writer(sequence):
                self.pool.forget(block_id)
                bad.add(block_id)
                hashes.append(block_hash)
        return bad | self.pool.forget_built_on(hashes) if hashes else bad

    def _extend_hashes(self, sequence: Sequence) -> None:
        known = len(sequence.token_ids) // self.block_size
        if len(sequence.block_hashes) < known:
            root = root_hash(sequence.request.cache_salt, sequence.request.adapter)
            extend_chain(sequence.block_hashes, root, sequence.token_ids, self.block_size)

    def check_integrity(self, sequences: list[Sequence], pending: Counter[bytes]) -> None:
        """Between plans: the pool agrees with the tables of the sequences that hold blocks, every indexed block in a
        table holds what its hash says, and the pending hashes are those of the plans in flight."""
        assert self._pending == pending
        assert not self._copy_sources
        assert not self._held_sources
        self.pool.check_integrity(block_id for s in sequences for block_id in s.block_table)
        for s in sequences:
            assert len(set(s.block_table)) == len(s.block_table), f"sequence {s.sequence_id} holds a block twice"
            assert len(s.block_table) * self.block_size >= s.num_computed_tokens
            chain: list[bytes] = []
            extend_chain(chain, root_hash(s.request.cache_salt, s.request.adapter), tuple(s.token_ids), self.block_size)
            for index, block_id in enumerate(s.block_table):
                found = self.pool.hash_of(block_id)
                if found is not None:
                    assert found == chain[index], f"block {block_id} has a hash of other contents"


def _writer(sequence: Sequence) -> int:
    """Who answers for a block: the whole request, since its outputs are copies of each other."""
    return sequence.request.sequence_ids[0]
