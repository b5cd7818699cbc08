"""Whom an executor's death makes a suspect, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.executor.factories import greedy
from tests.services.executors import LocalExecutor, fleet, read_one, submission, until

PROMPT = (1, 2, 3)


def before_each_step(executor: LocalExecutor, act: Callable[[], object]) -> None:
    forward = executor.model.forward

    def acting(*arguments):  # type: ignore[no-untyped-def]
        act()
        return forward(*arguments)

    executor.model.forward = acting  # type: ignore[method-assign]


async def test_an_executor_that_was_told_to_stop_makes_no_suspect() -> None:
    leaving, released = LocalExecutor(), threading.Event()
    before_each_step(leaving, lambda: released.wait(30))
    async with fleet(leaving) as running:
        ticket = running.engine.submit(submission(PROMPT, 10))
        await until(lambda: bool(ticket.executors))
        leaving._service.refuse_sessions()
        leaving._service.notify_drain(0.1)
        await until(lambda: not running.engine.ready)
        leaving._service.end_session("the grace period is over")
        await until(lambda: not running.engine.members)
        assert ticket.outputs[0].suspicions == 0
        released.set()
        await leaving.kill()
        running.executors.append(await LocalExecutor().start(leaving.port))
        assert (await read_one(ticket)).token_ids == greedy(PROMPT, 10)


async def test_a_suspect_is_computed_alone_until_its_next_token() -> None:
    executor, reached, go = LocalExecutor(), threading.Event(), threading.Event()
    steps = iter(range(1000))

    def act() -> None:
        if next(steps) < 2:
            raise RuntimeError("a fault")
        reached.set()
        go.wait(30)

    before_each_step(executor, act)
    async with fleet(executor) as running:
        ticket = running.engine.submit(submission(PROMPT, 20))
        output = ticket.outputs[0]
        await until(reached.is_set)
        sequence = running.core(executor).sequence(output.sequence_id)
        assert sequence is not None
        assert (output.suspicions, sequence.request.alone) == (2, True)
        go.set()
        await until(lambda: output.num_tokens > 0)
        assert (output.suspicions, sequence.request.alone) == (0, False)
        assert (await read_one(ticket)).token_ids == greedy(PROMPT, 20)


async def test_accidents_at_different_places_make_no_poison() -> None:
    executor = LocalExecutor(max_num_batched_tokens=4, max_num_seqs=4)
    prompt = tuple(range(20))
    deaths = {0, 1, 3, 6}  # steps: two make it a suspect; then [4, 8) fails alone, then [8, 12)
    steps = iter(range(1000))

    def act() -> None:
        if next(steps) in deaths:
            raise RuntimeError("an accident")

    before_each_step(executor, act)
    async with fleet(executor) as running:
        ticket = running.engine.submit(submission(prompt, 8))
        assert (await read_one(ticket)).token_ids == greedy(prompt, 8)
        assert next(steps) > max(deaths)
