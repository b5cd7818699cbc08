"""The physical KV blocks of one executor: which are free, who holds the others, which hash each one carries.

It knows block ids and counts, nothing of sequences. Block 0 is the null block, never given out. The free list is in
eviction order: blocks are taken from its head and returned to its tail, and a free block keeps its hash, so it can be
found again until somebody else takes it.
Invariant: every usable block is either free (ref_cnt 0, in the free list) or held (ref_cnt > 0).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block; at least one more is needed."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more; num_blocks is {num_blocks}")
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._ref_cnt = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._parent_of: list[bytes] = [b""] * num_blocks  # hash of what a hashed block was computed on
        self._writer_of = [0] * num_blocks  # request that computed a hashed block, by its first output's id
        self._block_of: dict[bytes, int] = {}  # the index: one block for each hash

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def allocate(self) -> int:
        """Takes the block that is next to be evicted, with ref_cnt 1; what it held is forgotten."""
        block_id, _ = self._free.popitem(last=False)
        self.forget(block_id)
        self._ref_cnt[block_id] = 1
        return block_id

    def touch(self, block_id: int) -> None:
        """One more holder; a free block leaves the free list with its contents."""
        if self._ref_cnt[block_id] == 0:
            del self._free[block_id]
        self._ref_cnt[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder less of each; what nobody holds goes to the tail of the free list, in the order given."""
        for block_id in block_ids:
            assert self._ref_cnt[block_id] > 0, block_id
            self._ref_cnt[block_id] -= 1
            if self._ref_cnt[block_id] == 0:
                self._free[block_id] = None

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def index(self, block_id: int, block_hash: bytes, parent: bytes, writer: int) -> None:
        """Lets the block be found by its hash. Where another block has it already, that one stays."""
        if self._hash_of[block_id] is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._parent_of[block_id] = parent
            self._writer_of[block_id] = writer
            self._block_of[block_hash] = block_id

    def writer(self, block_id: int) -> int:
        """The request, by its first output, that computed a block which is in the index."""
        return self._writer_of[block_id]

    def forget(self, block_id: int) -> None:
        """Takes the block out of the index, if it is there."""
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block_id] = None

    def forget_built_on(self, block_hashes: Iterable[bytes]) -> set[int]:
        """Takes every block out of the index whose chain passes through one of the hashes, which are known to nobody
        any more; returns those blocks. Looks at the whole index: for rare events."""
        children: dict[bytes, list[int]] = {}
        for block_id in self._block_of.values():
            children.setdefault(self._parent_of[block_id], []).append(block_id)
        found: set[int] = set()
        parents = list(block_hashes)
        while parents:
            for block_id in children.pop(parents.pop(), ()):
                parents.append(self._hash_of[block_id] or b"")
                self.forget(block_id)
                found.add(block_id)
        return found

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash_of[block_id]

    def ref_counts(self) -> array[int]:
        """Of all blocks, by id; uint16."""
        return array("H", self._ref_cnt)

    def indexed(self) -> bytes:
        """1 for each block that can be found by its hash, by id."""
        return bytes(map(bool, self._hash_of))

    def check_integrity(self, holders: Iterable[int]) -> None:
        """`holders` lists every block once for each table that holds it."""
        expected = Counter(holders)
        assert NULL_BLOCK not in expected, "the null block is in a table"
        assert NULL_BLOCK not in self._free, "the null block is free to take"
        for block_id in range(1, self.num_blocks):
            assert self._ref_cnt[block_id] == expected[block_id], (
                f"block {block_id}: ref_cnt {self._ref_cnt[block_id]}, held by {expected[block_id]} tables"
            )
            assert (block_id in self._free) == (self._ref_cnt[block_id] == 0), f"block {block_id} is free and held"
        for block_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == block_hash, (
                f"block {block_id} is indexed by a hash that it does not carry"
            )
        assert len(self._block_of) == sum(h is not None for h in self._hash_of), "a hashed block is not in the index"
