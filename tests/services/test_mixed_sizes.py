"""Executors of one model that differ in size: each request goes where it fits, and what fits nowhere stops nobody."""

from __future__ import annotations

import pytest

from scheduler.outputs import DoesNotFit, EndReason, ExecutorState
from tests.executor.factories import greedy
from tests.services.executors import LocalExecutor, fleet, read_one, submission, until

LARGE = tuple(range(24))  # more than a small one holds


def small() -> LocalExecutor:
    return LocalExecutor(num_blocks=5)


async def test_what_only_the_large_one_holds_goes_there_though_the_small_one_is_idle() -> None:
    """The small one was offered it, and refused in the middle of the handing over: the stream never ended."""
    large = LocalExecutor()
    async with fleet(large, small()) as running:
        busy = running.engine.submit(submission((1, 2), 30))
        ticket = running.engine.submit(submission(LARGE, 12))
        assert (await read_one(ticket)).token_ids == greedy(LARGE, 12)
        assert ticket.executors == [large.incarnation]
        await read_one(busy)


async def test_whoever_is_next_is_offered_to_all_and_not_to_the_one_that_took_the_head() -> None:
    """It waited for the large one, which had just answered, while the small one stood idle."""
    large, other = LocalExecutor(max_num_seqs=1), small()
    async with fleet(large, other) as running:
        first = running.engine.submit(submission(LARGE, 3))
        head = running.engine.submit(submission(LARGE, 12))
        behind = running.engine.submit(submission((1, 2), 5))
        await read_one(first)
        assert (await read_one(behind)).token_ids == greedy((1, 2), 5)
        assert behind.executors == [other.incarnation]
        assert (await read_one(head)).token_ids == greedy(LARGE, 12)
        assert head.executors == [large.incarnation]


async def test_limits_at_the_door_are_those_of_the_largest_there_is() -> None:
    first, second = small(), LocalExecutor(max_num_seqs=3)
    await second.start()
    async with fleet(first, targets=[f"127.0.0.1:{(await first.start()).port}", second.address], wait=False) as running:
        running.executors.append(second)
        await until(lambda: len(running.engine.members) == 2)
        model = running.engine.model
        assert model is not None
        assert (model.capacity_tokens, model.max_num_seqs) == (63 * 4, 8)
        await second.kill()
        await until(lambda: len(running.engine.members) == 1)
        assert running.engine.model is not None
        assert running.engine.model.capacity_tokens == 16
        with pytest.raises(DoesNotFit, match="KV cache of 16 tokens"):
            running.engine.submit(submission(LARGE, 12))


async def test_what_waits_for_one_that_is_lost_ends_and_lets_the_others_pass() -> None:
    large, other = LocalExecutor(max_num_seqs=1), small()
    async with fleet(large, other) as running:
        for executor in (large, other):
            executor.model.gate.clear()
        running.engine.submit(submission(LARGE, 4))
        await until(large.model.entered.is_set)
        waiting = running.engine.submit(submission(LARGE, 8))
        behind = running.engine.submit(submission((1, 2), 5))
        await large.kill()
        other.model.gate.set()
        heard = await read_one(waiting)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "24 tokens leave no room for output in a KV cache of 16 tokens" in str(heard.finish.error)
        assert (await read_one(behind)).token_ids == greedy((1, 2), 5)


async def test_what_only_a_draining_one_holds_ends_and_lets_the_others_pass() -> None:
    """It waited at the head of the queue until its time was over, and everybody with it."""
    large, other = LocalExecutor(max_num_seqs=1), small()
    async with fleet(large, other) as running:
        large.model.gate.clear()
        running.engine.submit(submission(LARGE, 4))
        await until(large.model.entered.is_set)
        waiting = running.engine.submit(submission(LARGE, 8))
        behind = running.engine.submit(submission((1, 2), 5))
        running.engine.drain_executor(large.incarnation)
        heard = await read_one(waiting)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "KV cache of 16 tokens" in str(heard.finish.error)
        assert (await read_one(behind)).token_ids == greedy((1, 2), 5)
        large.model.gate.set()


async def test_limits_that_nothing_can_be_planned_for_are_a_refusal() -> None:
    """They ended the scheduler."""
    async with fleet(LocalExecutor(max_num_seqs=8, max_num_batched_tokens=4), wait=False) as running:
        await until(lambda: any(e.state is ExecutorState.REFUSED for e in running.engine.load().executors))
        (load,) = running.engine.load().executors
        assert "max_num_batched_tokens (4) must be at least max_num_seqs (8)" in load.reason
