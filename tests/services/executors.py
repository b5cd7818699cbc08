"""Executors in this process, over real gRPC on loopback, with a model whose every answer is known.

An executor can be killed (its stream breaks), frozen (no heartbeats), held in a step, or made to raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from octavo.v1 import executor_pb2_grpc

from executor.plan import Limits
from executor.runner import Runner
from executor.served import GenerationDefaults, ServedModel
from executor.service import ExecutorService, ServiceOptions
from executor.step_thread import StepThread
from executor.tracing import Tracing
from scheduler.core.request import SamplingParams
from scheduler.core.scheduler import Scheduler
from scheduler.engine import Engine, EngineConfig
from scheduler.executor_client import ClientOptions
from scheduler.fleet import FleetConfig
from scheduler.outputs import OutputFinish, Submission
from scheduler.ticket import Ticket
from tests.executor.factories import VOCAB, FakeModel, create_limits


class LocalExecutor:
    """One lifetime of an executor."""

    def __init__(
        self,
        *,
        fingerprint: str = "model-a",
        heartbeat_seconds: float = 0.05,
        tracing: Tracing | None = None,
        model: type[FakeModel] = FakeModel,
        **limits: int,
    ) -> None:
        self.limits: Limits = create_limits(**limits)
        self.model = model(self.limits)
        self.incarnation = uuid.uuid4().hex
        self.port = 0
        self._fingerprint = fingerprint
        self._service = ExecutorService(ServiceOptions("fake", "cpu", self.incarnation, heartbeat_seconds), tracing)
        self.runner = Runner(self.model, self.model, self.limits)
        self._steps = StepThread(self.runner)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> LocalExecutor:
        executor_pb2_grpc.add_ExecutorServicer_to_server(self._service, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        served = ServedModel(
            name="fake",
            fingerprint=self._fingerprint,
            limits=self.limits,
            dtype="float32",
            kv_dtype="float32",
            eos_token_ids=(VOCAB - 2,),
            defaults=GenerationDefaults(),
            deterministic=True,
            device="cpu",
            tokenizer_files={"tokenizer.json": b"{}"},
        )
        self._steps.start()
        self._service.serve(served, self._steps)
        await self._server.start()
        return self

    async def kill(self) -> None:
        """Its streams break at once, in the middle of whatever they do."""
        self.model.gate.set()
        await self._server.stop(None)
        self._steps.stop(5)

    async def drain(self, grace_seconds: float) -> None:
        """As on SIGTERM."""
        self._service.refuse_sessions()
        self._service.notify_drain(grace_seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.session_ended(), grace_seconds)
        self._service.end_session("the grace period is over")
        await self.kill()


@dataclass(slots=True)
class Fleet:
    """An engine and its executors."""

    engine: Engine
    executors: list[LocalExecutor]
    task: asyncio.Task[None]  # the engine's

    def core(self, executor: LocalExecutor) -> Scheduler:
        return self.engine.members[executor.incarnation].core

    def executor_of(self, ticket: Ticket) -> LocalExecutor:
        """Where the ticket's request was computed last."""
        return next(e for e in self.executors if e.incarnation == ticket.executors[-1])


def client_options(**overrides: float) -> ClientOptions:
    return ClientOptions(**{"connect_timeout": 2.0, "heartbeat_timeout": 2.0, "step_timeout": 30.0, **overrides})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def fleet(
    *executors: LocalExecutor,
    targets: Sequence[str] | None = None,
    wait: bool = True,
    client: ClientOptions | None = None,
    fleet_settings: dict[str, object] | None = None,
    may_end: bool = False,
    **engine: object,
) -> AsyncIterator[Fleet]:
    """Starts executors that have no port yet, and an engine that knows them all; `may_end`: the engine's end is what
    the test is about."""
    for executor in executors:
        if not executor.port:
            await executor.start()
    names = tuple(targets or [executor.address for executor in executors])
    config = FleetConfig(names, client=client or client_options(), **(fleet_settings or {}))  # type: ignore[arg-type]
    serving = Engine(EngineConfig(config, **engine))  # type: ignore[arg-type]
    task = asyncio.create_task(serving.run())
    running = Fleet(serving, list(executors), task)
    test = asyncio.current_task()
    assert test is not None
    if not may_end:
        task.add_done_callback(lambda done: None if done.cancelled() else test.cancel())  # rather than wait for ever
    try:
        if wait:
            await until(lambda: len(running.engine.members) == len(executors))
        yield running
    finally:
        task.cancel()
        for executor in running.executors:
            await executor.kill()
        ended = await asyncio.gather(task, return_exceptions=True)
        if not may_end and not isinstance(ended[0], asyncio.CancelledError):
            raise AssertionError("the engine ended") from ended[0]


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def submission(prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8, **overrides: object) -> Submission:
    settings: dict[str, object] = {
        "prompt_token_ids": tuple(prompt), "n": 1, "beam_width": None, "max_tokens": max_tokens,
        "sampling": SamplingParams(temperature=0.0), "priority": 0, "cache_salt": "", "queue_timeout": 30.0,
        "tenant": "default",
    }  # fmt: skip
    return Submission(**(settings | overrides))  # type: ignore[arg-type]


@dataclass(slots=True)
class Heard:
    """What a reader of one output heard."""

    token_ids: list[int] = field(default_factory=list)
    finish: OutputFinish | None = None


async def read(ticket: Ticket) -> list[Heard]:
    """To the end; checks that positions follow on each other, and that nothing comes after the end."""
    outputs = [Heard() for _ in ticket.outputs]
    async for news in ticket:
        for event in news:
            heard = outputs[event.index]
            assert heard.finish is None, "news after the end"
            assert event.first_position == len(heard.token_ids), "a token was lost or told twice"
            heard.token_ids.extend(event.token_ids)
            heard.finish = event.finish
    assert all(heard.finish is not None for heard in outputs)
    return outputs


async def read_one(ticket: Ticket) -> Heard:
    (heard,) = await read(ticket)
    return heard
