"""Plans made before earlier ones are answered: the same outputs, and no step known to be for nothing."""

from __future__ import annotations

import pytest

from scheduler.core.plan import StepResult
from scheduler.core.request import FinishReason
from scheduler.core.scheduler import ProtocolError
from tests.core.factories import create_driver, create_request, expected_output


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_plans_as_the_depth_are_unanswered(depth):
    driver = create_driver(pipeline_depth=depth)
    driver.core.add(create_request(1, max_tokens=20))
    while driver.plan() is not None:
        pass
    assert driver.core.num_in_flight == depth
    driver.answer()
    assert driver.plan() is not None
    assert driver.plan() is None


def test_outputs_and_ends_do_not_depend_on_the_depth():
    told = []
    for depth in (1, 2, 3):
        driver = create_driver(pipeline_depth=depth, num_blocks=30, max_num_seqs=6, max_num_batched_tokens=12)
        for i in range(1, 25):
            driver.core.add(
                create_request(3 * i, [i % 5] * (i % 7 + 1), n=i % 3 + 1, max_tokens=i % 9 + 1, stop=[i % 7])
            )
        driver.run()
        told.append((sorted(driver.outputs.items()), sorted((i, r.name) for i, r in driver.finished.items())))
    assert told[0] == told[1] == told[2]


def test_a_steady_decode_names_no_token():
    """The executor goes on with the token that it sampled itself."""
    driver = create_driver(pipeline_depth=2, block_size=16)
    driver.core.add(create_request(1, max_tokens=10))
    driver.plan()
    plan = driver.plan()
    assert (plan.row_sequences, plan.row_tokens) == ([1], [1])
    rest = (plan.tokens, plan.new, plan.tables, plan.copies, plan.forks, plan.finished, plan.preempted)
    assert not any(rest)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_is_planned_beyond_the_last_token(depth):
    driver = create_driver(pipeline_depth=depth)
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=4))
    driver.run()
    assert [plan.num_tokens for plan in driver.history] == [3, 1, 1, 1, 0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_token_drawn_behind_a_stop_is_dropped(depth):
    free = create_request(1, [1, 2, 3], max_tokens=20)
    stop = expected_output(free, 0)[4]
    driver = create_driver(pipeline_depth=depth)
    request = create_request(1, [1, 2, 3], max_tokens=20, stop=[stop])
    driver.core.add(request)
    driver.run()
    assert driver.outputs[1] == expected_output(request, 0)
    assert driver.finished == {1: FinishReason.STOP}
    wasted = sum(plan.num_tokens for plan in driver.history) - 3 - (len(driver.outputs[1]) - 1)
    assert wasted == depth - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_only_finished_ids_make_a_plan_without_rows_once_all_else_is_answered(depth):
    driver = create_driver(pipeline_depth=depth)
    driver.core.add(create_request(1, [1], max_tokens=5))
    while driver.core.sequence(1) is not None:
        while driver.plan() is not None:
            pass
        driver.answer()
    while driver.plans:
        assert driver.plan() is None
        driver.answer()
    plan = driver.plan()
    assert (plan.finished, list(plan.row_sequences), list(plan.new)) == ([1], [], [])
    driver.answer()
    assert driver.plan() is None
    assert not driver.core.has_work


def test_finished_ids_travel_with_the_next_step_that_runs():
    driver = create_driver()
    driver.core.add(create_request(1, [1], max_tokens=1))
    driver.core.add(create_request(2, [2], max_tokens=3))
    driver.step()
    plan = driver.plan()
    assert (plan.finished, plan.row_sequences) == ([1], [2])


def test_a_block_freed_by_one_plan_serves_the_next_one():
    """Executors apply plans in order: the wasted token of the sequence that stopped is written before."""
    stop = expected_output(create_request(1, [1, 2, 3]), 0)[0]
    driver = create_driver(pipeline_depth=2, num_blocks=4, block_size=4, prefix_caching=False)
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=8, stop=[stop]))
    driver.plan()
    driver.plan()
    driver.core.add(create_request(2, range(10), max_tokens=2))
    driver.answer()
    assert driver.finished == {1: FinishReason.STOP}
    plan = driver.plan()
    assert set(plan.new[0].block_ids) == {1, 2, 3}
    driver.run()
    assert driver.outputs[2] == expected_output(create_request(2, range(10), max_tokens=2), 0)


@pytest.mark.parametrize("step_id", [0, 2])
def test_only_the_oldest_plan_can_be_answered(step_id):
    driver = create_driver(pipeline_depth=2)
    driver.core.add(create_request(1))
    driver.plan()
    driver.plan()
    with pytest.raises(ProtocolError, match=f"step {step_id}, expected 1"):
        driver.core.update(StepResult(step_id))
    driver.run()
    assert driver.outputs[1] == expected_output(create_request(1), 0)


def test_an_answer_without_a_plan_is_refused():
    with pytest.raises(ProtocolError, match="expected none"):
        create_driver().core.update(StepResult(1))
