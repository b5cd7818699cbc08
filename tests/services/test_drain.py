"""A drain by call, of an executor that is a process of its own: it ends, and nothing of what it ran is lost."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from scheduler.outputs import ExecutorState, UnknownExecutor
from tests.executor.factories import greedy
from tests.executor.test_executor_process import LIMIT, Process, process
from tests.services.executors import LocalExecutor, fleet, read_one, submission, until

PROMPTS = [(number, 7) for number in range(12)]


async def ready(running: Process) -> str:
    return await asyncio.to_thread(running.wait_for, "ready")


async def exit_code(running: Process) -> int:
    return (await asyncio.to_thread(running.end))[0]


@pytest.mark.parametrize(
    "grace_period",
    [pytest.param("30", id="it finishes what it runs"), pytest.param("0", id="what it runs goes on elsewhere")],
)
async def test_an_executor_drained_through_its_scheduler_ends_and_loses_nothing(grace_period: str) -> None:
    staying = LocalExecutor(fingerprint="f00d")
    await staying.start()
    with process("--model", "fake", "--grace-period", grace_period) as leaving:
        address = await ready(leaving)
        async with fleet(staying, targets=[address, staying.address], wait=False) as running:
            await until(lambda: len(running.engine.members) == 2, LIMIT)
            tickets = [running.engine.submit(submission(prompt, 36)) for prompt in PROMPTS]
            await until(lambda: all(ticket.first_step_at is not None for ticket in tickets))
            incarnation = running.engine.drain_executor(address)
            assert sum(incarnation in ticket.executors for ticket in tickets) > 0
            late = running.engine.submit(submission((9, 9), 3))
            assert [(await read_one(t)).token_ids for t in tickets] == [greedy(p, 36) for p in PROMPTS]
            await read_one(late)
            assert late.executors == [staying.incarnation]
            assert await exit_code(leaving) == 0
            await until(lambda: incarnation not in running.engine.members)


async def test_an_idle_executor_ends_at_once_and_its_state_tells_who_asked() -> None:
    with process("--model", "fake") as leaving:
        address = await ready(leaving)
        async with fleet(targets=[address], wait=False) as running:
            await until(lambda: len(running.engine.members) == 1, LIMIT)
            running.engine.drain_executor(next(iter(running.engine.members)))
            (load,) = running.engine.load().executors
            assert (load.state, load.reason) == (ExecutorState.DRAINING, "a client asked for it")
            assert await exit_code(leaving) == 0
            await until(lambda: not running.engine.members)
            with pytest.raises(UnknownExecutor):
                running.engine.drain_executor(address)


async def test_the_executors_own_call_drains_it_as_sigterm_does() -> None:
    with process("--model", "fake") as leaving:
        address = await ready(leaving)
        async with fleet(targets=[address], wait=False) as running, grpc.aio.insecure_channel(address) as channel:
            await until(lambda: len(running.engine.members) == 1, LIMIT)
            answer = await pb_grpc.ExecutorStub(channel).Drain(pb.DrainExecutorRequest(grace_seconds=7.5))
            assert answer.incarnation in running.engine.members
            code, log = await asyncio.to_thread(leaving.end)
            assert code == 0
            assert "grace_seconds=7.5" in log


async def test_an_executor_that_loads_can_be_drained() -> None:
    with process("--model", "slow") as leaving:
        address = await asyncio.to_thread(leaving.wait_for, "listening")
        async with grpc.aio.insecure_channel(address) as channel:
            await pb_grpc.ExecutorStub(channel).Drain(pb.DrainExecutorRequest())
        assert await exit_code(leaving) == 0


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
async def test_a_grace_period_that_is_none_is_refused(seconds: float) -> None:
    executor = LocalExecutor()
    await executor.start()
    async with grpc.aio.insecure_channel(executor.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="grace_seconds") as caught:
            await pb_grpc.ExecutorStub(channel).Drain(pb.DrainExecutorRequest(grace_seconds=seconds))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await executor.kill()
