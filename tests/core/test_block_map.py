"""The picture of the pool: who holds which block, how full it is, and what free blocks still keep."""

from __future__ import annotations

from collections import Counter

from scheduler.core.block_map import BlockMap
from scheduler.core.scheduler import Scheduler
from tests.core.factories import FakeExecutor, create_core, create_request


def step(core: Scheduler, executor: FakeExecutor) -> None:
    plan = core.schedule()
    assert plan is not None
    core.update(executor.run(plan))


def table(core: Scheduler, sequence_id: int) -> list[int]:
    sequence = core.sequence(sequence_id)
    assert sequence is not None
    return sequence.block_table


def filled(block_map: BlockMap, blocks: list[int]) -> list[int]:
    return [block_map.num_filled[block_id] for block_id in blocks]


def test_an_empty_pool_shows_every_block_free() -> None:
    block_map = create_core(num_blocks=9, block_size=4).block_map()
    assert (block_map.num_blocks, block_map.block_size, block_map.holders) == (9, 4, ())
    assert list(block_map.holder_of) == list(block_map.ref_cnt) == list(block_map.num_filled) == [0] * 9


def test_the_last_block_is_filled_as_tokens_are_computed() -> None:
    core, executor = create_core(block_size=4), FakeExecutor(4)
    core.add(create_request(1, range(6), max_tokens=8))
    seen = []
    for _ in range(5):
        step(core, executor)
        block_map = core.block_map()
        seen.append(filled(block_map, table(core, 1)))
        [holder] = block_map.holders
        assert holder.num_computed_tokens == sum(seen[-1])
        assert (holder.num_prompt_tokens, holder.num_blocks, holder.num_tokens) == (6, len(seen[-1]), sum(seen[-1]) + 1)
    assert seen == [[4, 2], [4, 3], [4, 4], [4, 4, 1], [4, 4, 2]]


def test_a_chunk_shows_the_blocks_that_it_will_fill_once_it_is_planned() -> None:
    core = create_core(block_size=4, max_num_batched_tokens=6, max_num_seqs=6)
    core.add(create_request(1, range(15)))
    core.schedule()
    block_map = core.block_map()
    assert filled(block_map, table(core, 1)) == [4, 2]
    assert [block_map.holder_of[block_id] for block_id in table(core, 1)] == [1, 1]
    assert sum(map(bool, block_map.holder_of)) == 2


def test_a_shared_prefix_has_two_holders_and_the_mark_of_the_first() -> None:
    core, executor = create_core(block_size=4), FakeExecutor(4)
    core.add(create_request(1, [*range(8), 90]))
    step(core, executor)
    core.add(create_request(2, [*range(8), 91, 92]))
    step(core, executor)
    block_map = core.block_map()
    shared, own = table(core, 2)[:2], table(core, 2)[2:]
    assert shared == table(core, 1)[:2]
    assert [block_map.ref_cnt[block_id] for block_id in (*shared, *own)] == [2, 2, 1]
    assert [block_map.holder_of[block_id] for block_id in (*shared, *own)] == [1, 1, 2]
    assert filled(block_map, [*shared, *own]) == [4, 4, 2]
    assert [(h.sequence_id, h.num_cached_tokens, h.num_blocks) for h in block_map.holders] == [(1, 0, 3), (2, 8, 3)]


def test_outputs_of_one_prompt_share_its_partly_filled_block_until_they_write() -> None:
    core, executor = create_core(block_size=4), FakeExecutor(4)
    core.add(create_request(1, range(6), n=3))
    step(core, executor)
    block_map = core.block_map()
    assert [block_map.ref_cnt[block_id] for block_id in table(core, 1)] == [3, 3]
    assert filled(block_map, table(core, 1)) == [4, 2]
    assert {h.output_ids for h in block_map.holders} == {(1, 2, 3)}
    step(core, executor)
    block_map = core.block_map()
    assert Counter(block_map.ref_cnt) == {0: 101 - 4, 3: 1, 1: 3}
    assert [filled(block_map, table(core, i))[-1] for i in (1, 2, 3)] == [3, 3, 3]


def test_free_blocks_that_keep_a_prefix_are_full_and_nobodys() -> None:
    core, executor = create_core(block_size=4), FakeExecutor(4)
    core.add(create_request(1, range(10)))
    step(core, executor)
    blocks = list(table(core, 1))
    core.abort(1)
    block_map = core.block_map()
    assert [block_map.ref_cnt[block_id] for block_id in blocks] == [0, 0, 0]
    assert [block_map.holder_of[block_id] for block_id in blocks] == [0, 0, 0]
    assert filled(block_map, blocks) == [4, 4, 0]  # only full blocks have a hash
    assert sum(block_map.num_filled) == 8


def test_without_prefix_caching_full_blocks_are_full_all_the_same() -> None:
    core, executor = create_core(block_size=4, prefix_caching=False), FakeExecutor(4)
    core.add(create_request(1, range(10)))
    step(core, executor)
    blocks = list(table(core, 1))
    assert filled(core.block_map(), blocks) == [4, 4, 2]
    core.abort(1)
    assert sum(core.block_map().num_filled) == 0


def test_a_preempted_sequence_holds_nothing() -> None:
    core, executor = create_core(num_blocks=6, block_size=4), FakeExecutor(4)
    for i in (1, 2):
        core.add(create_request(i, [i * 10 + j for j in range(6)], max_tokens=10))
    while core.counters.preemptions == 0:
        step(core, executor)
    block_map = core.block_map()
    assert [h.sequence_id for h in block_map.holders] == [1]
    held = [block_id for block_id in range(6) if block_map.ref_cnt[block_id]]
    assert sorted(held) == sorted(table(core, 1))
