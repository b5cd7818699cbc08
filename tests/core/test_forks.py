"""Several outputs of one prompt: one computation, shared blocks, a copy at the first write."""

from __future__ import annotations

import itertools

import pytest

from scheduler.core.plan import Copy, Fork, StepResult
from tests.core.factories import create_core, create_driver, create_request, expected_output, force_preemption

PROMPT = [1, 2, 3, 4, 5, 6]  # a full block of 4, and half of one


def test_the_prompt_is_computed_once_and_all_outputs_begin_with_its_last_row():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, n=3))
    plan = driver.plan()
    assert (plan.row_sequences, plan.row_tokens) == ([1], [6])
    assert plan.forks == [Fork(1, 2, 1), Fork(1, 3, 2)]
    assert [n.sequence_id for n in plan.new] == [1]
    assert {tuple(driver.core.sequence(i).block_table) for i in (1, 2, 3)} == {(1, 2)}
    driver.answer()
    assert [driver.outputs[i][0] for i in (1, 2, 3)] == [
        expected_output(create_request(1, PROMPT), index)[0] for index in range(3)
    ]


def test_they_begin_with_the_last_chunk_and_not_before():
    driver = create_driver(max_num_batched_tokens=16, max_num_seqs=4)
    driver.core.add(create_request(1, range(40), n=2))
    forks = []
    for _ in range(3):
        forks.append(list(driver.plan().forks))
        driver.answer()
    assert forks == [[], [], [Fork(1, 2, 1)]]


def test_sample_indices_are_those_of_the_request():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, n=3, sample_indices=(4, 0, 2)))
    plan = driver.plan()
    assert plan.new[0].sample_index == 4
    assert plan.forks == [Fork(1, 2, 0), Fork(1, 3, 2)]
    driver.run()
    for sequence_id, index in ((1, 4), (2, 0), (3, 2)):
        assert driver.outputs[sequence_id] == expected_output(create_request(1, PROMPT), index)


def test_each_but_the_last_holder_copies_the_half_full_block_and_the_last_one_writes_in_place():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, n=3))
    driver.step()
    plan = driver.plan()
    assert plan.row_sequences == [1, 2, 3]
    assert plan.copies == [Copy(2, 3), Copy(2, 4)]
    assert [tuple(t) for t in plan.tables] == [(1, 1, (3,)), (2, 1, (4,))]
    assert [driver.core.sequence(i).block_table for i in (1, 2, 3)] == [[1, 3], [1, 4], [1, 2]]


def test_a_full_last_block_is_shared_without_a_copy():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT[:4], n=2))
    driver.step()
    plan = driver.plan()
    assert not plan.copies
    assert [driver.core.sequence(i).block_table for i in (1, 2)] == [[1, 2], [1, 3]]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", range(1, 10))
def test_every_output_is_its_own(depth, length):
    driver = create_driver(pipeline_depth=depth)
    request = create_request(1, range(length), n=4, max_tokens=9)
    driver.core.add(request)
    driver.run()
    for index, sequence_id in enumerate(request.sequence_ids):
        assert driver.outputs[sequence_id] == expected_output(request, index)
    assert driver.core.counters.computed_tokens == length + 4 * 8


def test_children_give_way_one_by_one():
    driver = create_driver()
    request = create_request(1, PROMPT, n=3, max_tokens=9)
    driver.core.add(request)
    driver.step()
    force_preemption(driver.core, 2)
    assert (driver.core.num_running, driver.core.num_waiting) == (2, 1)
    plan = driver.plan()
    assert plan.preempted == [2]
    assert [n.sequence_id for n in plan.new] == [2]
    driver.run()
    for index, sequence_id in enumerate(request.sequence_ids):
        assert driver.outputs[sequence_id] == expected_output(request, index)


def test_the_lead_gives_way_before_its_siblings_began_and_begins_with_them():
    driver = create_driver(max_num_batched_tokens=16)
    request = create_request(1, range(20), n=3, max_tokens=3)
    driver.core.add(request)
    driver.plan()
    driver.answer()
    force_preemption(driver.core, 1)
    driver.run()
    for index, sequence_id in enumerate(request.sequence_ids):
        assert driver.outputs[sequence_id] == expected_output(request, index)


def test_a_copys_source_freed_in_its_own_plan_becomes_no_destination_of_it():
    """Hypotheses 100 and 105 share one half-full block, 101 and 104 another, and one block is free. 100 copies its
    block into that one. 101 needs one more, so 105 gives way, the last holder of the block that 100 copies from. Were
    that block free at once, 101 would copy into it, before or after it is read."""
    core = create_core(itertools.count(100).__next__, block_size=4)
    core.add(create_request(1, [1, 2], n=1, beam_width=4, max_tokens=9))
    core.update(StepResult(core.schedule().step_id, candidates={100: tuple((t, -0.01 * t) for t in range(8))}))
    unlikely = tuple((t, -50.0 - t) for t in range(8))
    core.update(
        StepResult(
            core.schedule().step_id,
            candidates={
                100: ((0, -1.0), (1, -1.1), *unlikely[2:]),
                101: ((0, -0.1), (1, -0.2), *unlikely[2:]),
                102: unlikely,
                103: unlikely,
            },
        )
    )
    tables = {i: core.sequence(i).block_table for i in (100, 101, 104, 105)}
    assert tables[100] == tables[105] != tables[101] == tables[104]
    source = tables[100][0]
    while core.num_free_blocks > 1:
        core._kv.pool.allocate()
    last = next(iter(core._kv.pool._free))
    plan = core.schedule()
    assert plan.copies == [Copy(source, last)]
    assert plan.row_sequences == [100, 101]
    assert core._kv.pool.ref_cnt(source) == 0
    assert list(core._kv.pool._free)[-1] == source


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", range(5, 12))
def test_outputs_survive_pools_in_which_they_crowd_each_other_out(depth, num_blocks):
    driver = create_driver(num_blocks=num_blocks, block_size=3, pipeline_depth=depth, max_num_batched_tokens=16)
    requests = [
        create_request(10 * i, [i] * (i + 1), n=n, max_tokens=6) for i, n in ((1, 3), (2, 4), (3, 1), (4, 2), (5, 5))
    ]
    for request in requests:
        driver.core.add(request)
    driver.run()
    for request in requests:
        for index, sequence_id in enumerate(request.sequence_ids):
            assert driver.outputs[sequence_id] == expected_output(request, index)
    assert driver.core.num_free_blocks == driver.core.num_blocks
