"""The executor is gone: requests come back with their tokens, and go on elsewhere as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.request import Request, SamplingParams
from tests.core.factories import Driver, create_driver, create_request, expected_output, force_preemption


def go_on(old: Driver, **settings: object) -> Driver:
    """A fresh executor and core take what the old ones had; ids stay, since the new core has seen none."""
    new = create_driver(**settings)
    drained = old.core.drain_all()
    new.outputs = {i: list(told) for i, told in old.outputs.items()}
    new.finished = dict(old.finished)
    for request, _ in drained:
        new.core.add(request)
    return new


def test_a_request_comes_back_with_the_tokens_told():
    driver = create_driver()
    request = create_request(1, [1, 2, 3])
    driver.core.add(request)
    for _ in range(3):
        driver.step()
    [(back, in_flight)] = driver.core.drain_all()
    assert not in_flight
    assert back == replace(
        request, output_token_ids=tuple(driver.outputs[1]), sample_indices=(0,), num_prompt_logprobs_told=1
    )
    assert len(back.output_token_ids) == 3


def test_nothing_is_left():
    driver = create_driver(pipeline_depth=2)
    driver.core.add(create_request(1, n=2))
    driver.core.add(create_request(3, beam_width=2))
    driver.step()
    driver.plan()
    driver.core.drain_all()
    driver.core.check_integrity()
    assert not driver.core.has_work
    assert driver.core.num_free_blocks == driver.core.num_blocks
    assert driver.core.schedule() is None
    assert driver.core.num_cached_tokens(create_request(5, [1, 2, 3, 4, 5])) == 0


def test_only_what_an_unanswered_plan_held_was_in_flight():
    driver = create_driver(max_num_seqs=4)
    driver.core.add(create_request(1, [1]))
    driver.core.add(create_request(2, [2], beam_width=2))
    driver.plan()
    driver.core.add(create_request(4, [3]))
    driver.core.add(create_request(5, [4], beam_width=2))
    positions = {request.sequence_ids: in_flight for request, in_flight in driver.core.drain_all()}
    assert positions == {(1,): range(1), (2,): range(1), (4,): range(0), (5,): range(0)}


def test_a_preempted_one_with_a_plan_unanswered_was_in_flight():
    driver = create_driver(pipeline_depth=2)
    driver.core.add(create_request(1, [1]))
    driver.plan()
    driver.plan()
    force_preemption(driver.core, 1)
    assert [f for _, f in driver.core.drain_all()] == [range(2)]


def test_outputs_that_began_come_back_on_their_own():
    driver = create_driver()
    driver.core.add(create_request(1, [1, 2, 3], n=3))
    driver.step()
    driver.step()
    back = [r for r, _ in driver.core.drain_all()]
    assert [(r.sequence_ids, r.sample_indices, len(r.output_token_ids)) for r in back] == [
        ((1,), (0,), 2),
        ((2,), (1,), 2),
        ((3,), (2,), 2),
    ]


def test_outputs_that_did_not_begin_come_back_together():
    driver = create_driver(max_num_batched_tokens=16)
    driver.core.add(create_request(1, range(20), n=3))
    driver.plan()
    driver.core.abort(2)
    [(back, in_flight)] = driver.core.drain_all()
    assert in_flight
    assert (back.sequence_ids, back.sample_indices) == ((1, 3), (0, 2))


def test_beams_begin_anew():
    driver = create_driver()
    request = create_request(1, beam_width=3, n=2)
    driver.core.add(request)
    for _ in range(4):
        driver.step()
    [(back, _)] = driver.core.drain_all()
    assert back == request


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(8))
def test_outputs_are_those_of_an_undisturbed_run(steps, depth):
    requests: list[Request] = [
        create_request(1, range(20), n=3, max_tokens=9),
        create_request(10, [1, 2, 3], max_tokens=9),
        create_request(20, [1, 2, 3, 4], n=2, max_tokens=9, priority=1),
        create_request(30, [5], max_tokens=1),
    ]
    driver = create_driver(max_num_batched_tokens=16, pipeline_depth=depth, num_blocks=20)
    for request in requests:
        driver.core.add(request)
    for _ in range(steps):
        driver.step()
    driver.plan()
    driver = go_on(driver, max_num_batched_tokens=16, pipeline_depth=depth, num_blocks=20)
    for _ in range(steps):
        driver.step()
    driver = go_on(driver, pipeline_depth=depth, num_blocks=20, block_size=3)
    driver.run()
    for request in requests:
        for index, sequence_id in enumerate(request.sequence_ids):
            assert driver.outputs[sequence_id] == expected_output(request, index)


def told_positions(driver: Driver) -> list[tuple[int, float]]:
    return [
        (e.prompt_logprobs.first_position + i, entry.logprob)
        for e in driver.events
        if e.prompt_logprobs is not None
        for i, entry in enumerate(e.prompt_logprobs.entries)
    ]


ALL_POSITIONS = [(p, -float(p)) for p in range(1, 40)]
PROMPT_LOGPROBS = SamplingParams(prompt_logprobs=1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities_of_the_prompt_are_told_exactly_once(steps, depth, n):
    """Through a preemption, with a result that comes late, and through the loss of an executor."""
    settings = {"max_num_batched_tokens": 16, "pipeline_depth": depth}
    driver = create_driver(**settings)
    driver.core.add(create_request(1, range(40), n=n, sampling=PROMPT_LOGPROBS))
    for _ in range(steps):
        driver.step()
    driver.plan()
    if driver.core.sequence(1) is not None and driver.core.sequence(1).block_table:
        force_preemption(driver.core, 1)
    for _ in range(steps):
        driver.step()
    driver.plan()
    events = list(driver.events)
    driver = go_on(driver, **settings)
    driver.events = events
    driver.run()
    assert told_positions(driver) == ALL_POSITIONS


def test_they_are_computed_although_the_prefix_is_cached():
    driver = create_driver()
    driver.core.add(create_request(1, range(40), max_tokens=1))
    driver.run()
    driver.core.add(create_request(2, range(40), sampling=PROMPT_LOGPROBS, max_tokens=1))
    driver.run()
    assert told_positions(driver) == ALL_POSITIONS
    assert driver.core.counters.computed_tokens == 80


def test_once_told_a_preempted_request_uses_the_cache_again():
    driver = create_driver()
    driver.core.add(create_request(1, range(40), sampling=PROMPT_LOGPROBS))
    driver.step()
    force_preemption(driver.core, 1)
    assert driver.plan().new[0].num_computed_tokens == 40
    driver.run()
    assert told_positions(driver) == ALL_POSITIONS
