"""Ending an output at any moment: its blocks are free when the call returns, and nothing more is told of it."""

from __future__ import annotations

import itertools

import pytest

from tests.core.factories import Driver, create_driver, create_request, expected_output, force_preemption

LONG = list(range(30))


def waiting(driver: Driver) -> None:
    driver.core.add(create_request(1, LONG))


def prefilling(driver: Driver) -> None:
    waiting(driver)
    driver.plan()
    driver.answer()
    assert driver.core.sequence(1).num_computed_tokens == 16


def in_flight(driver: Driver) -> None:
    waiting(driver)
    assert driver.plan() is not None


def decoding(driver: Driver) -> None:
    driver.core.add(create_request(1, [1, 2]))
    driver.step()
    assert driver.outputs[1]


def preempted(driver: Driver) -> None:
    decoding(driver)
    force_preemption(driver.core, 1)
    driver.core.check_integrity()


def preempted_in_flight(driver: Driver) -> None:
    decoding(driver)
    driver.plan()
    force_preemption(driver.core, 1)
    driver.core.check_integrity()


STATES = [waiting, prefilling, in_flight, decoding, preempted, preempted_in_flight]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
def test_all_blocks_are_free_when_abort_returns(state, depth):
    driver = create_driver(max_num_batched_tokens=16, pipeline_depth=depth)
    state(driver)
    driver.core.abort(1)
    driver.core.check_integrity()
    assert driver.core.num_free_blocks == driver.core.num_blocks
    assert driver.core.sequence(1) is None
    told = len(driver.events)
    driver.core.abort(1)
    driver.run()
    assert len(driver.events) == told
    assert not driver.executor.sequences


def test_an_unknown_id_is_ignored():
    driver = create_driver()
    driver.core.abort(99)
    driver.core.finish(99, 3)
    assert driver.core.schedule() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_aborts_frees_everything(order):
    """One waits, one is prefilling, one decodes with a plan in flight, one was preempted; each is ended twice."""
    driver = create_driver(max_num_seqs=3, max_num_batched_tokens=16, pipeline_depth=2)
    driver.core.add(create_request(1, [1, 2], max_tokens=50))
    driver.step()
    driver.core.add(create_request(2, [3, 4], max_tokens=50))
    driver.plan()
    force_preemption(driver.core, 2)
    driver.core.add(create_request(3, range(60), priority=-1))
    driver.plan()
    driver.core.add(create_request(4, range(60)))
    for index in order:
        driver.core.abort(index + 1)
        driver.core.abort(index + 1)
        driver.core.check_integrity()
    assert driver.core.num_free_blocks == driver.core.num_blocks
    driver.run()
    assert not driver.executor.sequences


def test_others_go_on_undisturbed():
    driver = create_driver(pipeline_depth=2)
    kept = create_request(2, [1, 2, 3, 4, 5, 6])
    driver.core.add(create_request(1, [1, 2, 3, 4, 5, 7]))
    driver.core.add(kept)
    driver.step()
    driver.core.abort(1)
    driver.run()
    assert driver.outputs[2] == expected_output(kept, 0)


def test_the_executor_is_told_once_and_only_of_what_it_knows():
    driver = create_driver()
    driver.core.add(create_request(1))
    driver.core.add(create_request(2))
    driver.core.abort(2)
    driver.step()
    driver.core.abort(1)
    driver.run()
    assert [i for plan in driver.history for i in plan.finished] == [1]


@pytest.mark.parametrize("dropped", [1, 2, 3])
@pytest.mark.parametrize("planned", [False, True])
def test_one_of_several_outputs_ends_before_they_begin(dropped, planned):
    driver = create_driver(max_num_batched_tokens=16, pipeline_depth=2)
    request = create_request(1, range(20), n=3)
    driver.core.add(request)
    if planned:
        driver.plan()
    driver.core.abort(dropped)
    driver.core.check_integrity()
    driver.run()
    for index, sequence_id in enumerate(request.sequence_ids):
        if sequence_id != dropped:
            assert driver.outputs[sequence_id] == expected_output(request, index)
    assert dropped not in driver.outputs


def test_finish_ends_an_output_and_what_is_in_flight_counts_nowhere():
    driver = create_driver(pipeline_depth=3)
    driver.core.add(create_request(1, [1, 2], max_tokens=50))
    for _ in range(4):
        driver.step()
    told = len(driver.events)
    driver.plan()
    driver.core.finish(1, 2)
    assert driver.core.num_free_blocks == driver.core.num_blocks
    driver.run()
    assert len(driver.events) == told
