"""Tenants through the engine: what each is charged, who is handed over next, and what waiting requests are told."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from scheduler.outputs import WaitingRequests
from scheduler.ticket import Ticket
from tests.executor.factories import greedy
from tests.services.executors import Fleet, LocalExecutor, fleet, read_one, submission, until


async def order_of_ends(tickets: list[Ticket]) -> list[str]:
    """Tenants, as their requests end."""
    ended: list[str] = []

    async def wait(ticket: Ticket) -> None:
        await read_one(ticket)
        ended.append(ticket.submission.tenant)

    await asyncio.gather(*(wait(ticket) for ticket in tickets))
    return ended


def submit(running: Fleet, tenant: str, count: int, max_tokens: int = 6, **overrides: object) -> list[Ticket]:
    """Prompts that share no block."""
    return [
        running.engine.submit(submission((number % 40, 3, 5), max_tokens, tenant=tenant, **overrides))
        for number in range(count)
    ]


async def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    async with fleet(LocalExecutor(max_num_seqs=2)) as running:
        flood = submit(running, "flood", 60)
        await until(lambda: any(ticket.outputs[0].ended for ticket in flood))
        ends = await order_of_ends(flood + submit(running, "other", 2))
        before = ends[: len(ends) - 1 - ends[::-1].index("other")]
        assert ends.count("other") == 2
        assert len(before) < 20


async def test_tenants_of_weights_3_and_1_are_served_3_to_1() -> None:
    async with fleet(LocalExecutor(max_num_seqs=2), tenant_weights={"gold": 3.0}) as running:
        ends = await order_of_ends(submit(running, "basic", 60) + submit(running, "gold", 60))
        served = Counter(ends[:72])
        assert served["gold"] / served["basic"] == pytest.approx(3.0, rel=0.15)


def record_charges(running: Fleet) -> list[tuple[str, int]]:
    charged: list[tuple[str, int]] = []
    running.engine._queue.charge = lambda tenant, tokens: charged.append((tenant, tokens))  # type: ignore[method-assign]
    return charged


async def test_what_is_computed_of_a_prompt_is_charged_at_once_and_each_output_token_as_it_is_told() -> None:
    prompt = tuple(range(1, 11))
    async with fleet(LocalExecutor()) as running:
        charged = record_charges(running)
        await read_one(running.engine.submit(submission(prompt, 3, tenant="first")))
        await read_one(running.engine.submit(submission(prompt, 2, tenant="second")))
    cached = 8
    assert charged == [("first", 10)] + 3 * [("first", 1)] + [("second", 10 - cached)] + 2 * [("second", 1)]


async def test_each_class_of_waiting_requests_tells_why_its_first_one_waits() -> None:
    executor = LocalExecutor(max_num_seqs=1)
    async with fleet(executor) as running:
        executor.model.gate.clear()
        submit(running, "a", 1)
        await until(lambda: not running.engine.load().queue_length)
        submit(running, "a", 2)
        submit(running, "b", 1)
        submit(running, "a", 3, priority=5)
        assert running.engine.load().waiting == (
            WaitingRequests("a", 0, 2, f"{executor.address}: 1 of 1 sequences run"),
            WaitingRequests("b", 0, 1, "another tenant was served less for its weight, or came earlier"),
            WaitingRequests("a", 5, 3, "requests of priority 0 come first"),
        )
        executor.model.gate.set()
        await until(lambda: not running.engine.load().waiting)


async def test_without_an_executor_the_reason_is_that_of_each_address() -> None:
    executor = LocalExecutor()
    async with fleet(executor) as running:
        await executor.kill()
        await until(lambda: not running.engine.members)
        submit(running, "a", 1)
        (waiting,) = running.engine.load().waiting
        assert waiting.reason.startswith(f"no executor takes requests: {executor.address} ")


async def test_what_a_lost_executor_had_begun_goes_on_before_what_a_lighter_tenant_asks_for() -> None:
    old = LocalExecutor()
    async with fleet(old) as running:
        begun = submit(running, "heavy", 4, max_tokens=30)
        await until(lambda: all(ticket.outputs[0].num_tokens >= 2 for ticket in begun))
        await old.kill()
        await until(lambda: not running.engine.members)
        late = submit(running, "light", 1, max_tokens=30)
        running.executors.append(await LocalExecutor(max_num_seqs=4).start(old.port))
        ends = await order_of_ends(begun + late)
        assert ends == ["heavy"] * 4 + ["light"]


async def test_what_is_computed_again_elsewhere_is_not_charged_again() -> None:
    old = LocalExecutor()
    async with fleet(old) as running:
        (ticket,) = submit(running, "moved", 1, max_tokens=20)
        await until(lambda: ticket.outputs[0].num_tokens >= 2)
        charged = record_charges(running)
        told = ticket.outputs[0].num_tokens
        await old.kill()
        running.executors.append(await LocalExecutor().start(old.port))
        assert (await read_one(ticket)).token_ids == greedy((0, 3, 5), 20)
        assert sum(tokens for _, tokens in charged) == 20 - told
