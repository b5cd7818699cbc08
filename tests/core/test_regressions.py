"""Defects that were found in the core, each by its smallest example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.plan import BatchPlan, StepResult
from scheduler.core.request import DoesNotFit, FinishReason
from scheduler.core.scheduler import Scheduler
from tests.core.factories import create_core, create_driver, create_request


def answer_beams(core: Scheduler, plan: BatchPlan) -> None:
    """The first step splits the search, from then on each hypothesis goes its own way; others draw token 0."""
    tokens, candidates = [], {}
    for sequence_id in plan.row_sequences:
        sequence = core.sequence(sequence_id)
        if sequence is None or sequence.num_computed_tokens < sequence.num_tokens - sequence.num_placeholders:
            continue
        if sequence.beam is None:
            tokens.append((sequence_id, 0))
            continue
        likely = (5, 6) if sequence.num_output_tokens == 0 else (sequence.token_ids[1],)
        candidates[sequence_id] = tuple(
            sorted(((t, -0.1 if t in likely else -9.0) for t in range(4, 9)), key=lambda c: -c[1])
        )[:4]
    core.update(StepResult(plan.step_id, tokens, {}, candidates))
    core.check_integrity()


def test_a_hypothesis_waits_for_no_blocks_kept_for_others_of_its_search():
    """Both were preempted and had to be computed again, each into blocks of its own. One block was kept for the first
    one, which was waiting for the second, and the two took turns for ever. Four blocks are all the search may need."""
    core = create_core(num_blocks=5, max_num_seqs=3, max_num_batched_tokens=8)
    core.add(create_request(9, [3], max_tokens=14, priority=-1))  # grows until nothing is left for the search
    core.add(create_request(1, [2], n=2, beam_width=2, max_tokens=7))
    for _ in range(60):
        plan = core.schedule()
        if plan is None:
            break
        answer_beams(core, plan)
    assert core.counters.preemptions >= 2
    assert not core.has_work


def test_two_searches_in_a_pool_for_one_both_end():
    driver = create_driver(num_blocks=5, max_num_seqs=4, max_num_batched_tokens=4)
    for sequence_id, prompt in ((1, [2]), (5, [1, 0])):
        driver.core.add(create_request(sequence_id, prompt, n=2, beam_width=2, max_tokens=6))
    driver.run(max_steps=200)
    assert set(driver.finished.values()) <= {FinishReason.LENGTH, FinishReason.STOP}
    assert sorted(driver.finished) == [1, 2, 5, 6]


def test_blocks_computed_on_a_failed_one_leave_the_index_with_it():
    """A failed sequence's blocks left the index, what another request had computed on top of them stayed, to be found
    as soon as somebody computed the first ones again."""
    driver = create_driver(block_size=4)
    driver.core.add(create_request(1, range(9), max_tokens=20))
    driver.step()
    driver.core.add(create_request(2, range(14), max_tokens=1))
    driver.plan()
    driver.answer()
    assert driver.finished == {2: FinishReason.LENGTH}
    probe = create_request(3, range(14))
    assert driver.core.num_cached_tokens(probe) == 12
    driver.plan()
    driver.answer(fail=frozenset([1]))
    assert driver.core.num_cached_tokens(probe) == 0
    driver.core.add(create_request(4, range(9), max_tokens=1))
    driver.run()
    assert driver.core.num_cached_tokens(probe) == 8


def test_a_request_with_its_outputs_is_refused_where_both_do_not_fit():
    """After a failover to a smaller executor: the prompt alone fitted, the table grew past the pool."""
    small = create_core(num_blocks=4, block_size=4)
    request = create_request(1, range(10), max_tokens=30)
    with pytest.raises(DoesNotFit, match="12 tokens leave no room for output in a KV cache of 12 tokens"):
        small.add(replace(request, output_token_ids=(1, 2)))
    small.add(replace(request, output_token_ids=(1,)))


def test_an_error_without_a_message_is_an_error():
    driver = create_driver()
    driver.core.add(create_request(1))
    plan = driver.plan()
    events = driver.core.update(StepResult(plan.step_id, errors={1: ""}))
    assert [(e.sequence_id, e.finish_reason, e.error) for e in events] == [(1, FinishReason.ERROR, "")]
    assert driver.core.num_free_blocks == driver.core.num_blocks


def test_a_sequence_passed_over_by_a_result_fails_alone():
    """It raised in the middle of a result: tokens taken before were in the state, but never told."""
    driver = create_driver()
    for sequence_id in (1, 2, 3):
        driver.core.add(create_request(sequence_id, [sequence_id]))
    plan = driver.plan()
    events = driver.core.update(StepResult(plan.step_id, [(1, 5), (3, 6)]))
    assert [(e.sequence_id, e.token_ids, e.finish_reason) for e in events] == [
        (1, (5,), None),
        (2, (), FinishReason.ERROR),
        (3, (6,), None),
    ]
    driver.core.check_integrity()
