"""Out of blocks: who gives way, what is kept, and when it runs again."""

from __future__ import annotations

import random

import pytest

from tests.core.factories import create_driver, create_request, expected_output, force_preemption


def crowded(*, priorities=(0, 0, 0), depth=1):
    """Three sequences fill nine blocks with twelve tokens each: the next token of the first one takes a block."""
    driver = create_driver(num_blocks=10, block_size=4, pipeline_depth=depth, prefix_caching=False)
    for sequence_id, priority in zip((1, 2, 3), priorities, strict=True):
        driver.core.add(create_request(sequence_id, [sequence_id] * 5, max_tokens=12, priority=priority))
    return driver


def until_preemption(driver):
    while not driver.core.counters.preemptions:
        assert driver.step()
    return driver


def test_the_latest_arrival_gives_way():
    driver = until_preemption(crowded())
    assert [i for plan in driver.history for i in plan.preempted] == [3]


def test_the_lowest_priority_gives_way_whenever_it_came():
    driver = until_preemption(crowded(priorities=(5, 0, 0)))
    assert [i for plan in driver.history for i in plan.preempted] == [1]


def test_outputs_are_kept_and_come_back_with_the_sequence():
    driver = until_preemption(crowded())
    told = list(driver.outputs[3])
    assert told
    while not any(n.sequence_id == 3 for n in driver.history[-1].new):
        driver.step()
    again = next(n for n in driver.history[-1].new if n.sequence_id == 3)
    assert again.token_ids == (3, 3, 3, 3, 3, *told)
    assert again.num_prompt_tokens == 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_output_is_that_of_an_undisturbed_run(depth):
    driver = crowded(depth=depth)
    driver.run()
    assert driver.core.counters.preemptions > 0
    for sequence_id in (1, 2, 3):
        assert driver.outputs[sequence_id] == expected_output(
            create_request(sequence_id, [sequence_id] * 5, max_tokens=12), 0
        )


def test_nobody_is_admitted_in_a_plan_that_preempts():
    """Not even a request that comes before all others and would fit into what was given up."""

    def about_to_preempt(num_steps):
        driver = create_driver(num_blocks=12, block_size=4, prefix_caching=False)
        for sequence_id, length in ((1, 5), (2, 5), (3, 17)):
            driver.core.add(create_request(sequence_id, [sequence_id] * length, max_tokens=12))
        for _ in range(num_steps):
            driver.step()
        return driver

    num_steps = len(until_preemption(about_to_preempt(0)).history) - 1
    driver = about_to_preempt(num_steps)
    assert driver.core.counters.preemptions == 0
    driver.core.add(create_request(4, [4], priority=-1))
    plan = driver.plan()
    assert (plan.preempted, list(plan.new)) == ([3], [])
    driver.answer()
    assert [n.sequence_id for n in driver.plan().new] == [4]


def test_the_preempted_wait_in_their_own_order_before_later_arrivals():
    driver = create_driver(num_blocks=40, max_num_seqs=3)
    for sequence_id in (1, 2, 3):
        driver.core.add(create_request(sequence_id, [sequence_id] * 3, max_tokens=9))
    driver.step()
    driver.core.add(create_request(4, [4]))
    for sequence_id in (3, 1, 2):
        force_preemption(driver.core, sequence_id)
    assert [n.sequence_id for n in driver.plan().new] == [1, 2, 3]


def test_it_runs_again_only_with_room_for_all_it_knows_and_a_block_for_each_that_runs():
    """Begun again too early, it would be thrown out step after step. One holds two of seven blocks; the other knows 14
    tokens: it needs four blocks, and one to spare."""
    driver = create_driver(num_blocks=8, block_size=4, prefix_caching=False)
    driver.core.add(create_request(1, [1] * 5, max_tokens=20))
    driver.core.add(create_request(2, [2] * 13, max_tokens=3))
    driver.plan()
    driver.answer()
    force_preemption(driver.core, 2)
    plan = driver.plan()
    assert [n.sequence_id for n in plan.new] == [2]  # 1 holds two blocks: five are free
    driver.answer()
    force_preemption(driver.core, 2)
    admitted = {}
    while 2 not in driver.finished:
        free = driver.core.num_free_blocks
        known = driver.core.sequence(2).num_tokens
        plan = driver.plan()
        if any(n.sequence_id == 2 for n in plan.new):
            admitted = {"free": free, "needed": -(-known // 4)}
            break
        driver.answer()
    assert admitted["free"] >= admitted["needed"] + 1


def test_a_whole_prompt_that_does_not_fit_waits_until_it_does():
    driver = create_driver(num_blocks=8, block_size=4)
    driver.core.add(create_request(1, [1] * 9, max_tokens=3))  # three blocks
    driver.step()
    driver.core.add(create_request(2, [2] * 13, max_tokens=1))  # four, and one for the other
    assert driver.plan().row_sequences == [1]
    driver.answer()
    assert driver.plan().row_sequences == [1]
    driver.answer()
    assert driver.finished.keys() == {1}
    assert driver.plan().row_sequences == [2]


@pytest.mark.parametrize("depth", [2, 3])
def test_it_is_not_admitted_while_a_plan_that_held_it_is_unanswered(depth):
    driver = create_driver(pipeline_depth=depth)
    driver.core.add(create_request(1, [1, 2], max_tokens=9))
    driver.plan()
    driver.answer()
    driver.plan()
    force_preemption(driver.core, 1)
    assert driver.plan() is None
    driver.answer()
    assert [n.token_ids for n in driver.plan().new] == [(1, 2, *driver.outputs[1])]


def test_tokens_that_come_late_are_kept():
    driver = create_driver(pipeline_depth=3)
    driver.core.add(create_request(1, [1, 2], max_tokens=9))
    for _ in range(3):
        driver.plan()
    force_preemption(driver.core, 1)
    for _ in range(3):
        assert driver.plan() is None
        driver.answer()
    assert driver.outputs[1] == expected_output(create_request(1, [1, 2], max_tokens=3), 0)
    driver.run()
    assert driver.outputs[1] == expected_output(create_request(1, [1, 2], max_tokens=9), 0)


def test_a_late_token_may_end_it_in_the_queue():
    driver = create_driver(pipeline_depth=2)
    driver.core.add(create_request(1, [1, 2], max_tokens=2))
    driver.plan()
    driver.plan()
    force_preemption(driver.core, 1)
    driver.answer()
    driver.answer()
    assert driver.outputs[1] == expected_output(create_request(1, [1, 2], max_tokens=2), 0)
    assert 1 in driver.finished
    assert driver.core.num_waiting == 0
    driver.run()
    assert not driver.executor.sequences


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_no_more_tokens_are_computed_again_than_for_the_first_time(seed, depth):
    """In pools so small that they are always full."""
    r = random.Random(seed)
    block_size = r.randint(1, 4)
    driver = create_driver(
        num_blocks=r.randint(4, 20),
        block_size=block_size,
        max_num_seqs=r.randint(2, 8),
        max_num_batched_tokens=r.randint(8, 24),
        pipeline_depth=depth,
        prefix_caching=r.random() < 0.5,
    )
    requests = []
    for sequence_id in range(1, 25):
        length = r.randint(1, max(1, min(14, driver.core.capacity - 1)))
        prompt = [r.randint(0, 2) for _ in range(length)]
        requests.append(create_request(sequence_id, prompt, max_tokens=r.randint(1, 12)))
    pending = list(requests)
    while pending or driver.core.has_work:
        while pending and r.random() < 0.3:
            request = pending.pop(0)
            driver.core.add(request)
        driver.step()
    counters = driver.core.counters
    assert counters.recomputed_tokens <= counters.computed_tokens - counters.recomputed_tokens
    assert len(driver.finished) == 24


def test_a_sequence_alone_is_never_preempted():
    driver = create_driver(num_blocks=6, block_size=2, max_num_batched_tokens=16)
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=100))
    driver.run()
    assert driver.core.counters.preemptions == 0
    assert len(driver.outputs[1]) == 7
