"""A step that is launched before the one ahead of it is collected: what it is fed, and what is told of both."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest

from executor.plan import BatchPlan, Fork, StepResult
from executor.sampler import NON_FINITE
from executor.step_thread import StepThread, Ticket
from tests.executor.factories import POISON, FakeModel, LateModel, create_new, create_runner, greedy, rows

PROMPT = [1, 2, 3]


def first(**sampling: object) -> BatchPlan:
    """Sequence 1 draws its first token."""
    return rows(1, {1: 3}, new=[create_new(1, PROMPT, [1, 2, 3], **sampling)])


def run(plans: Sequence[BatchPlan], model: type[FakeModel] = LateModel) -> list[StepResult | Exception]:
    """By the step thread, all at once; in the order of the answers."""
    runner, made = create_runner(model)
    if isinstance(made, LateModel):
        made.looks = 10**9  # nothing is ready of itself: a step is collected by what comes behind it
    steps, ticket, answers = StepThread(runner), Ticket(), queue.SimpleQueue[StepResult | Exception]()
    for plan in plans:
        steps.submit(ticket, plan, answers.put)
    steps.start()
    assert steps.stop(30)
    return [answers.get_nowait() for _ in range(answers.qsize())]


def told(answers: Sequence[StepResult | Exception]) -> list[tuple[object, ...]]:
    return [(a.step_id, a.sequence_ids, a.token_ids, a.errors) for a in answers if isinstance(a, StepResult)]


def test_a_step_is_fed_what_nobody_has_collected() -> None:
    runner, model = create_runner(LateModel)
    assert isinstance(model, LateModel)
    one = runner.launch(first())
    second = rows(2, {1: 1})
    assert runner.can_follow(second)
    two = runner.launch(second)
    assert [draws.collected for draws in model.draws] == [False, False]
    assert model.num_fed == 1
    assert [*one.collect().token_ids, *two.collect().token_ids] == greedy(PROMPT, 2)
    assert runner.run(rows(3, {1: 1})).token_ids == greedy(PROMPT, 3)[2:]
    assert model.num_fed == 1, "by then the host knows all"


def test_the_thread_launches_the_next_step_before_it_collects() -> None:
    answers = run([first(), *(rows(step, {1: 1}) for step in range(2, 7))])
    assert [a.step_id for a in answers if isinstance(a, StepResult)] == [1, 2, 3, 4, 5, 6]
    assert [token for a in answers if isinstance(a, StepResult) for token in a.token_ids] == greedy(PROMPT, 6)


def test_without_a_next_plan_a_step_is_collected_as_soon_as_it_is_over() -> None:
    runner, _ = create_runner(LateModel)
    steps, answers = StepThread(runner), queue.SimpleQueue[StepResult | Exception]()
    steps.start()
    steps.submit(Ticket(), first(), answers.put)
    result = answers.get(timeout=30)
    assert isinstance(result, StepResult)
    assert result.token_ids == greedy(PROMPT, 1)
    assert steps.stop(30)


PLANS = {
    "plain": [first(), rows(2, {1: 1}), rows(3, {1: 1})],
    "penalties": [first(repetition_penalty=1.5), rows(2, {1: 1}), rows(3, {1: 1})],
    "logprobs": [first(logprobs=2), rows(2, {1: 1}), rows(3, {1: 1})],
    "an end": [first(), rows(2, {1: 1}), BatchPlan(3, finished=[1])],
    "a slot that serves another": [
        first(),
        rows(2, {1: 1}),
        rows(3, {4: 2}, preempted=[1], new=[create_new(4, [7, 8], [5])]),
        rows(4, {4: 1}),
    ],
    "a replacement": [
        first(),
        rows(2, {1: 4}, new=[create_new(1, [*PROMPT, 9], [1, 2, 3])]),
        rows(3, {1: 1}),
    ],
    "a fork": [
        rows(1, {1: 3}, new=[create_new(1, PROMPT, [1, 2])], forks=[Fork(1, 2, 1)]),
        rows(2, {1: 1}),
        rows(3, {2: 1}),
    ],
    "a failure in the step ahead": [
        rows(1, {1: 2, 2: 2}, new=[create_new(1, [5, POISON], [1, 2]), create_new(2, [5, 6], [3, 4])]),
        rows(2, {1: 1, 2: 1}),
        rows(3, {2: 1}),
    ],
}


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS.keys())
def test_what_is_told_is_what_the_host_would_tell_step_by_step(plans: list[BatchPlan]) -> None:
    late, plain = run(plans), run(plans, FakeModel)
    assert len(late) == len(plans)
    assert told(late) == told(plain)


def test_of_a_sequence_that_failed_in_the_step_ahead_nothing_more_is_told() -> None:
    new = [create_new(1, [5, POISON], [1, 2]), create_new(2, [5, 6], [3, 4])]
    one, two = run([rows(1, {1: 2, 2: 2}, new=new), rows(2, {1: 1, 2: 1})])
    assert isinstance(one, StepResult)
    assert isinstance(two, StepResult)
    assert one.errors == {1: NON_FINITE}
    assert (two.errors, two.sequence_ids, two.token_ids) == ({}, [2], greedy([5, 6], 2)[1:])


def test_a_model_that_raises_does_not_keep_the_step_ahead_from_being_told() -> None:
    runner, model = create_runner(LateModel)
    steps, ticket, answers = StepThread(runner), Ticket(), queue.SimpleQueue[StepResult | Exception]()
    assert isinstance(model, LateModel)
    model.looks = 10**9
    forward, calls = model.forward, []

    def once(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return forward(*arguments)  # type: ignore[arg-type]

    model.forward = once  # type: ignore[assignment, method-assign]
    for plan in (first(), rows(2, {1: 1}), rows(3, {1: 1})):
        steps.submit(ticket, plan, answers.put)
    steps.start()
    assert steps.stop(30)
    result, error = answers.get_nowait(), answers.get_nowait()
    assert isinstance(result, StepResult)
    assert result.token_ids == greedy(PROMPT, 1)
    assert str(error) == "out of luck"
    assert answers.empty()
    assert ticket.closed


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"beam_candidates": 2}])
def test_a_step_that_reports_logits_is_collected_first(sampling: dict[str, object]) -> None:
    runner, _ = create_runner(LateModel)
    runner.launch(first(**sampling))
    assert not runner.can_follow(BatchPlan(2))


def test_a_session_that_begins_forgets_the_step_that_runs() -> None:
    runner, _ = create_runner(LateModel)
    runner.launch(first())
    runner.reset()
    assert runner.run(first()).token_ids == greedy(PROMPT, 1)
