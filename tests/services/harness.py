"""A real server around a fake engine, on loopback, and the raw stub to call it with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2
from octavo.v1 import generation_pb2 as pb
from octavo.v1.generation_pb2_grpc import GenerationStub

from scheduler.config import SchedulerConfig
from scheduler.server import ExitCode, Server
from scheduler.tracing import Tracing
from tests.services.fake_engine import FakeEngine, text_ids


@dataclass
class Running:
    """A server that listens, and a channel to it."""

    engine: FakeEngine
    server: Server
    channel: grpc.aio.Channel
    stub: GenerationStub
    over: asyncio.Task[ExitCode]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def generate(self, **fields: object) -> list[pb.GenerateResponse]:
        return [message async for message in self.stub.Generate(make_request(**fields))]


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, tracing: Tracing | None = None, **config: object
) -> AsyncIterator[Running]:
    engine = engine or FakeEngine()
    settings = {"port": 0, "grace_period": 5.0, **config}
    server = Server(SchedulerConfig(executors=("fake:1",), **settings), engine, tracing=tracing)  # type: ignore[arg-type]
    await server.start()
    over = asyncio.create_task(server.run())
    # Without the probe the flow-control window stays at 64 KB, so that a reader that waits is soon felt.
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield Running(engine, server, channel, GenerationStub(channel), over)
        for ticket in engine.tickets:
            engine.abort(ticket)
    server.stop()
    await over


async def until(condition: Callable[[], bool]) -> None:
    """Soon; pytest's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def make_request(**fields: object) -> pb.GenerateRequest:
    """A good request, with overrides; a prompt of any kind replaces the default one."""
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["token_ids"] = pb.TokenIds(ids=text_ids("Hello"))
    return pb.GenerateRequest(**fields)  # type: ignore[arg-type]


async def rest(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    """What comes after the messages that were read one by one."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.index == index)


def tokens_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [t for m in messages if m.HasField("delta") and m.delta.index == index for t in m.delta.token_ids]


def finished_of(messages: list[pb.GenerateResponse]) -> dict[int, pb.Finished]:
    """By index; each exactly once."""
    ends = [m.finished for m in messages if m.HasField("finished")]
    assert len({end.index for end in ends}) == len(ends)
    return {end.index: end for end in ends}


@dataclass(frozen=True)
class Refusal:
    """A status with its details."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    field: str | None
    retry_seconds: float | None


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        for kind in (info, bad, retry):
            detail.Unpack(kind)
    field = bad.field_violations[0].field if bad.field_violations else None
    has_retry = any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if has_retry else None
    return Refusal(error.code(), error.details() or "", info.reason, dict(info.metadata), field, seconds)
