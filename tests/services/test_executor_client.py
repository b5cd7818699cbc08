"""A session's end, seen from this side: who is told of it, and what is no reason for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import pytest
from octavo.v1 import executor_pb2 as pb

from scheduler.core.scheduler import ProtocolError
from scheduler.executor_client import ClientOptions, ExecutorGone, ExecutorSession
from scheduler.metrics import Metrics
from scheduler.wire import result_from_message

STEP_RUNS = pb.FromExecutor(heartbeat=pb.Heartbeat(step_id=1, progress=1))


class QuietCall:
    """A stream that brings some messages and then nothing more; as of gRPC's, its end cancels who reads."""

    def __init__(self, messages: Iterable[pb.FromExecutor] = ()) -> None:
        self.cancelled = asyncio.Event()
        self._messages = list(messages)

    async def read(self) -> pb.FromExecutor:
        if self._messages:
            return self._messages.pop(0)
        await self.cancelled.wait()
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self.cancelled.set()


async def read_all(session: ExecutorSession) -> None:
    answers: AsyncIterator[object] = session.receive()
    async for _ in answers:
        pass


def open_session(call: QuietCall, **options: float) -> ExecutorSession:
    return ExecutorSession(call, ClientOptions(**options), Metrics().executor("fake:1"))  # type: ignore[arg-type]


async def test_the_reader_learns_why_this_side_ended_the_session() -> None:
    session = open_session(QuietCall())
    reading = asyncio.create_task(read_all(session))
    await asyncio.sleep(0)
    session.fail("the first reason")
    session.fail("another one")
    with pytest.raises(ExecutorGone, match="the first reason"):
        await reading
    await session.close()


async def test_a_reader_that_is_cancelled_when_the_session_ends_is_cancelled() -> None:
    """It took its own cancellation for that of the call, went on, and the process never ended."""
    session = open_session(QuietCall())
    reading = asyncio.create_task(read_all(session))
    await asyncio.sleep(0)
    session.fail("no heartbeat")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await session.close()


async def test_a_pause_of_this_process_is_no_silence_and_no_stuck_step() -> None:
    call = QuietCall([STEP_RUNS])
    session = open_session(call, heartbeat_timeout=0.4, step_timeout=0.5)
    reading = asyncio.create_task(read_all(session))
    await asyncio.sleep(0)
    time.sleep(0.7)  # noqa: ASYNC251
    await asyncio.sleep(0.01)
    assert not call.cancelled.is_set()
    await session.close()
    await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize(
    "message",
    [
        pb.StepResult(sequence_ids=[1, 2], token_ids=[3]),
        pb.StepResult(logprobs=[pb.Logprobs(sequence_id=1, top_token_ids=[1, 2], top_logprobs=[0.5])]),
        pb.StepResult(prompt_logprobs=[pb.PromptPositions(logprobs=[0.5], ranks=[])]),
        pb.StepResult(prompt_logprobs=[pb.PromptPositions(num_top=2, logprobs=[0.5], ranks=[1])]),
        pb.StepResult(prompt_logprobs=[pb.PromptPositions(num_top=1, top_token_ids=[1], top_logprobs=[])]),
    ],
)
def test_columns_that_do_not_fit_together_are_named_as_the_executors_fault(message: pb.StepResult) -> None:
    with pytest.raises(ProtocolError):
        result_from_message(message)
