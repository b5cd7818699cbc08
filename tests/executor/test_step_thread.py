"""Order, and what becomes of plans whose session is over."""

from __future__ import annotations

import queue

from executor.plan import BatchPlan, StepResult
from executor.step_thread import StepThread, Ticket
from tests.executor.factories import FakeModel, create_new, create_runner, rows

Answers = queue.SimpleQueue[StepResult | Exception]


def start() -> tuple[StepThread, FakeModel, Answers]:
    runner, model = create_runner()
    steps = StepThread(runner)
    steps.start()
    return steps, model, queue.SimpleQueue()


def test_plans_are_answered_in_the_order_they_came() -> None:
    steps, _, answers = start()
    for step_id in range(1, 6):
        steps.submit(Ticket(), BatchPlan(step_id), answers.put)
    assert steps.stop(10)
    results = [answers.get(timeout=10) for _ in range(5)]
    assert [result.step_id for result in results if isinstance(result, StepResult)] == [1, 2, 3, 4, 5]


def test_plans_of_a_closed_session_are_dropped() -> None:
    steps, model, answers = start()
    model.gate.clear()
    old, new = Ticket(), Ticket()
    steps.submit(old, rows(1, {1: 1}, new=[create_new(1, [1], [1])]), answers.put)
    steps.submit(old, BatchPlan(2), answers.put)
    steps.submit(new, BatchPlan(7), answers.put)
    assert model.entered.wait(10)
    old.closed = True
    model.gate.set()
    assert steps.stop(10)
    results = [answers.get(timeout=10) for _ in range(2)]
    assert [result.step_id for result in results if isinstance(result, StepResult)] == [1, 7]
    assert answers.empty()


def test_a_step_that_raises_ends_its_session_and_leaves_the_thread_running() -> None:
    steps, model, answers = start()
    model.fails_with = RuntimeError("out of luck")
    ticket = Ticket()
    steps.submit(ticket, rows(1, {1: 1}, new=[create_new(1, [1], [1])]), answers.put)
    steps.submit(ticket, BatchPlan(2), answers.put)
    steps.submit(Ticket(), BatchPlan(1), answers.put)
    assert steps.stop(10)
    assert str(answers.get(timeout=10)) == "out of luck"
    assert isinstance(answers.get(timeout=10), StepResult)
    assert answers.empty()
    assert ticket.closed


def test_the_running_step_is_told_while_it_runs() -> None:
    steps, model, answers = start()
    model.gate.clear()
    steps.submit(Ticket(), rows(4, {1: 1}, new=[create_new(1, [1], [1])]), answers.put)
    assert model.entered.wait(10)
    assert (steps.running_step, steps.progress) == (4, 1)
    model.gate.set()
    assert steps.stop(10)
    assert (steps.running_step, steps.progress) == (0, 2)
