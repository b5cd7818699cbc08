"""The pool by itself: who gets which block next, and how long a free block can be found."""

from __future__ import annotations

import pytest

from scheduler.core.block_pool import NULL_BLOCK, BlockPool

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_blocks_come_in_order_and_the_null_block_never():
    pool = BlockPool(5)
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(KeyError):
        pool.allocate()
    assert pool.ref_cnt(NULL_BLOCK) == 0


def test_freed_blocks_go_to_the_tail_in_the_order_given():
    pool = BlockPool(5)
    held = [pool.allocate() for _ in range(3)]
    pool.release(reversed(held))
    assert [pool.allocate() for _ in range(4)] == [4, 3, 2, 1]


def test_a_free_block_is_found_until_it_is_handed_out():
    pool = BlockPool(3)
    block_id = pool.allocate()
    pool.index(block_id, A, b"", writer=7)
    pool.release([block_id])
    assert pool.lookup(A) == block_id
    assert pool.writer(block_id) == 7
    assert pool.allocate() == 2
    assert pool.lookup(A) == block_id
    assert pool.allocate() == block_id
    assert pool.lookup(A) is None
    assert pool.hash_of(block_id) is None


def test_touching_a_free_block_takes_it_out_of_the_middle():
    pool = BlockPool(6)
    pool.touch(3)
    assert pool.ref_cnt(3) == 1
    assert pool.num_free == 4
    assert [pool.allocate() for _ in range(4)] == [1, 2, 4, 5]


def test_a_block_is_free_when_its_last_holder_leaves():
    pool = BlockPool(3)
    block_id = pool.allocate()
    pool.touch(block_id)
    pool.release([block_id])
    assert pool.num_free == 1
    pool.release([block_id])
    assert pool.num_free == 2


def test_the_first_block_of_a_hash_stays_the_one_that_is_found():
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.index(first, A, b"", writer=1)
    pool.index(second, A, b"", writer=2)
    assert pool.lookup(A) == first
    assert pool.hash_of(second) is None


def test_an_indexed_block_takes_no_second_hash():
    pool = BlockPool(3)
    block_id = pool.allocate()
    pool.index(block_id, A, b"", writer=1)
    pool.index(block_id, B, b"", writer=1)
    assert (pool.lookup(A), pool.lookup(B)) == (block_id, None)


def test_forgetting_takes_the_hash_and_keeps_the_holder():
    pool = BlockPool(3)
    block_id = pool.allocate()
    pool.index(block_id, A, b"", writer=1)
    pool.forget(block_id)
    pool.forget(block_id)
    assert pool.lookup(A) is None
    assert pool.ref_cnt(block_id) == 1


def test_what_was_built_on_a_hash_is_forgotten_with_all_that_follows():
    pool = BlockPool(6)
    first, second, third, other = (pool.allocate() for _ in range(4))
    pool.index(first, A, b"", writer=1)
    pool.index(second, B, A, writer=2)
    pool.index(third, C, B, writer=3)
    pool.index(other, b"d" * 16, b"", writer=4)
    assert pool.forget_built_on([A]) == {second, third}
    assert [pool.lookup(h) for h in (A, B, C, b"d" * 16)] == [first, None, None, other]


def test_a_pool_needs_one_block_besides_the_null_block():
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool.touch(1),
        lambda pool: pool._free.pop(2),
        lambda pool: pool._free.update({0: None}),
        lambda pool: pool._block_of.update({A: 2}),
        lambda pool: pool._hash_of.__setitem__(1, A),
    ],
)
def test_the_integrity_check_sees_a_contradiction(spoil):
    pool = BlockPool(4)
    held = pool.allocate()
    pool.check_integrity([held])
    spoil(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity([held])
