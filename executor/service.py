"""The executor over gRPC: Describe, GetTokenizer, Execute, Drain.

Owns the lease and the one open session, and turns domain errors into statuses (the table below). A stream has a reader,
a writer and a heartbeat, each a task of its own; plans run on the step thread, so all three answer while a step runs.
Knows no model: it serves before one is there, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from executor.lease import Holder, Lease, OwnedByOther, StaleSession
from executor.plan import InvalidPlan, StepResult
from executor.served import ServedModel
from executor.session import Beat, Cause, DrainNotice, Ending, Item, Opened, Session
from executor.step_thread import StepThread
from executor.wire import message_from_result, plan_from_message

if TYPE_CHECKING:
    from executor.tracing import SessionSpans, Tracing

PROTOCOL_VERSION = 1

_CHUNK_BYTES = 1 << 20
_LONGEST_ID = 128  # characters of a scheduler's id, which logs, Describe and refusals repeat


class Refused(Exception):
    """A call that this executor does not take; the message says why."""


class Unavailable(Refused):
    """Loading, or draining."""


class WrongExecutor(Refused):
    """The scheduler means another lifetime, or speaks another version."""


class BadOpening(Refused):
    """The stream's first message is not Hello, or one that names nobody."""


class NoHello(Refused):
    """The stream's first message did not come."""


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    WrongExecutor: grpc.StatusCode.FAILED_PRECONDITION,
    BadOpening: grpc.StatusCode.INVALID_ARGUMENT,
    NoHello: grpc.StatusCode.DEADLINE_EXCEEDED,
    OwnedByOther: grpc.StatusCode.ALREADY_EXISTS,
    StaleSession: grpc.StatusCode.FAILED_PRECONDITION,
}

_ENDING_STATUS: dict[Cause, grpc.StatusCode] = {
    Cause.INVALID_MESSAGE: grpc.StatusCode.INVALID_ARGUMENT,
    Cause.STEP_FAILED: grpc.StatusCode.INTERNAL,
    Cause.TAKEN_OVER: grpc.StatusCode.ABORTED,
    Cause.STOPPING: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What the service itself can be told."""

    model_name: str
    device: str
    incarnation: str
    heartbeat_seconds: float = 0.25
    hello_seconds: float = 10.0  # a stream that says nothing so long is ended


@dataclass(slots=True)
class _Serving:
    """A model that is loaded and warmed up."""

    model: ServedModel
    steps: StepThread


@dataclass(slots=True)
class _State:
    serving: _Serving | None = None
    session: Session | None = None
    draining: bool = False
    lease: Lease = field(default_factory=Lease)


class ExecutorService(pb_grpc.ExecutorServicer):
    """The servicer. All methods run on one event loop."""

    def __init__(self, options: ServiceOptions, tracing: Tracing | None = None) -> None:
        self._options = options
        self._tracing = tracing
        self._state = _State()
        self._no_session = asyncio.Event()
        self._no_session.set()
        self.drain_requested = asyncio.Event()
        self.drain_grace_seconds: float | None = None  # that the request named
        self._log = structlog.get_logger("executor")

    def serve(self, model: ServedModel, steps: StepThread) -> None:
        """The model is there and a warm-up step succeeded: sessions may open."""
        self._state.serving = _Serving(model, steps)

    def request_drain(self, grace_seconds: float | None = None) -> None:
        """By whoever may end this process. The first one counts."""
        if not self.drain_requested.is_set():
            self.drain_grace_seconds = grace_seconds
            self.refuse_sessions()
            self.drain_requested.set()

    def refuse_sessions(self) -> None:
        """Draining begins: no session opens any more."""
        self._state.draining = True

    def notify_drain(self, grace_seconds: float) -> None:
        """Tells the open session, if there is one, that this executor stops."""
        if self._state.session is not None:
            self._state.session.notify_drain(grace_seconds)

    def end_session(self, message: str) -> None:
        if self._state.session is not None:
            self._state.session.end(Cause.STOPPING, message)

    async def session_ended(self) -> None:
        """Returns when no session is open."""
        await self._no_session.wait()

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse]
    ) -> pb.DescribeResponse:
        state, options = self._state, self._options
        response = pb.DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            incarnation=options.incarnation,
            model_name=options.model_name,
            device=options.device,
            owner=state.lease.holder.scheduler_id if state.lease.holder else "",
        )
        if state.serving is not None:
            _describe_model(response, state.serving.model)
            response.debug.num_sequences = state.serving.steps.num_sequences
            response.debug.num_pending_plans = state.session.num_pending if state.session else 0
        return response

    async def GetTokenizer(
        self,
        request: pb.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.TokenizerChunk],
    ) -> AsyncIterator[pb.TokenizerChunk]:
        if self._state.serving is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        assert self._state.serving is not None
        for name, data in self._state.serving.model.tokenizer_files.items():
            for begin in range(0, max(len(data), 1), _CHUNK_BYTES):
                yield pb.TokenizerChunk(file=name, data=data[begin : begin + _CHUNK_BYTES])

    async def Drain(
        self,
        request: pb.DrainExecutorRequest,
        context: grpc.aio.ServicerContext[pb.DrainExecutorRequest, pb.DrainExecutorResponse],
    ) -> pb.DrainExecutorResponse:
        grace_seconds = request.grace_seconds if request.HasField("grace_seconds") else None
        if grace_seconds is not None and not 0 <= grace_seconds < math.inf:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"grace_seconds = {grace_seconds:g}: must be a time of at least 0"
            )
        self._log.info("asked to drain", peer=context.peer())
        self.request_drain(grace_seconds)
        return pb.DrainExecutorResponse(incarnation=self._options.incarnation)

    async def Execute(
        self,
        request_iterator: AsyncIterator[pb.ToExecutor],
        context: grpc.aio.ServicerContext[pb.ToExecutor, pb.FromExecutor],
    ) -> None:
        try:
            hello = await self._hello(context)
            session, serving = self._open(hello)
        except tuple(_STATUS) as error:
            self._log.info("session refused", peer=context.peer(), reason=str(error))
            await context.abort(_STATUS[type(error)], str(error))
            return
        log = self._log.bind(scheduler_id=hello.scheduler_id, session=hello.session)
        ending = Ending(Cause.CLOSED, "the scheduler went away")
        try:
            ending = await self._run_session(session, serving, context)
        finally:
            self._close(session, serving)
            log.info("session ended", reason=ending.message, last_step_id=session.last_step_id)
        if ending.cause is not Cause.CLOSED:
            await context.abort(_ENDING_STATUS[ending.cause], ending.message)

    async def _hello(self, context: grpc.aio.ServicerContext[pb.ToExecutor, pb.FromExecutor]) -> pb.Hello:
        try:
            async with asyncio.timeout(self._options.hello_seconds):
                first = await context.read()
        except TimeoutError:
            raise NoHello(f"no Hello within {self._options.hello_seconds:g} s") from None
        except DecodeError as error:
            raise BadOpening(f"the first message of a stream cannot be read: {error}") from None
        if not isinstance(first, pb.ToExecutor) or first.WhichOneof("message") != "hello":
            raise BadOpening("the first message of a stream must be Hello")
        return first.hello

    def _open(self, hello: pb.Hello) -> tuple[Session, _Serving]:
        """Grants the lease, or raises what stands in the table of statuses."""
        state = self._state
        if not (0 < len(hello.scheduler_id) <= _LONGEST_ID and hello.scheduler_id.isprintable()):
            raise BadOpening(
                f"scheduler_id has {len(hello.scheduler_id)} characters: 1 to {_LONGEST_ID} printable ones are needed"
            )
        if hello.protocol_version != PROTOCOL_VERSION:
            raise WrongExecutor(
                f"protocol version {hello.protocol_version} was asked for, this executor speaks {PROTOCOL_VERSION}"
            )
        if hello.incarnation != self._options.incarnation:
            raise WrongExecutor(
                f"incarnation {hello.incarnation[:_LONGEST_ID]!r} was expected, this is {self._options.incarnation!r}"
            )
        if state.draining:
            raise Unavailable("this executor is draining")
        if state.serving is None:
            raise Unavailable("the model is loading")
        session = Session(Holder(hello.scheduler_id, hello.session))
        if state.lease.acquire(session.holder) is not None:
            assert state.session is not None
            state.session.end(Cause.TAKEN_OVER, f"session {hello.session} of the same scheduler took over")
        state.session = session
        self._no_session.clear()
        self._log.info("session opens", scheduler_id=hello.scheduler_id, session=hello.session)
        return session, state.serving

    def _close(self, session: Session, serving: _Serving) -> None:
        session.ticket.closed = True
        self._state.lease.release(session.holder)
        if self._state.session is session:
            self._state.session = None
            self._no_session.set()
            serving.steps.call(serving.steps.runner.reset)

    async def _run_session(
        self,
        session: Session,
        serving: _Serving,
        context: grpc.aio.ServicerContext[pb.ToExecutor, pb.FromExecutor],
    ) -> Ending:
        await _leave_old_plans(serving.steps)
        session.opened()
        spans = self._tracing.session() if self._tracing is not None else None
        tasks = [
            asyncio.create_task(self._read(session, serving, context, spans), name="execute-reader"),
            asyncio.create_task(self._beat(session), name="execute-heartbeat"),
        ]
        try:
            while not isinstance(item := await session.next_item(), Ending):
                await context.write(_message(item, session, serving))
                if spans is not None and isinstance(item, StepResult):
                    spans.answered(item)
        finally:
            for task in tasks:
                task.cancel()
            if spans is not None:
                spans.end()
        return item

    async def _beat(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat_seconds)
            session.beat()

    async def _read(
        self,
        session: Session,
        serving: _Serving,
        context: grpc.aio.ServicerContext[pb.ToExecutor, pb.FromExecutor],
        spans: SessionSpans | None,
    ) -> None:
        steps, limits = serving.steps, serving.model.limits
        answer = _answerer(session, asyncio.get_running_loop())
        try:
            while isinstance(message := await context.read(), pb.ToExecutor):
                kind = message.WhichOneof("message")
                if kind == "plan":
                    await session.received(message.plan.step_id)
                    plan = plan_from_message(message.plan, limits)
                    if spans is not None:
                        spans.planned(plan)
                    steps.submit(session.ticket, plan, answer)
                elif kind == "drain":
                    self.request_drain()
                else:
                    raise InvalidPlan(f"a stream holds plans after its Hello, not {kind or 'an empty message'}")
            session.input_ended()
        except InvalidPlan as error:
            session.end(Cause.INVALID_MESSAGE, str(error))
        except Exception as error:
            # A broken stream shows here first; the handler learns the same from grpc. Anything else must not leave a
            # session that no longer listens.
            self._log.warning("reading from the scheduler failed", error=repr(error))
            session.end(Cause.STEP_FAILED, f"reading from the scheduler failed: {error!r}")


def _answerer(session: Session, loop: asyncio.AbstractEventLoop) -> Callable[[StepResult | Exception], None]:
    """Brings answers from the step thread to the loop, and logs what a step raised while its traceback is at hand."""
    log = structlog.get_logger("executor")

    def answer(result: StepResult | Exception) -> None:
        if isinstance(result, Exception):
            log.error("step failed", exc_info=None if isinstance(result, InvalidPlan) else result, reason=str(result))
        # A loop that is closed has no session left to answer.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(session.answered, result)

    return answer


async def _leave_old_plans(steps: StepThread) -> None:
    """Waits until the step thread has left every earlier plan, and forgotten every sequence."""
    left, loop = asyncio.Event(), asyncio.get_running_loop()

    def leave() -> None:
        steps.runner.reset()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(left.set)

    steps.call(leave)
    await left.wait()


def _message(item: Item, session: Session, serving: _Serving) -> pb.FromExecutor:
    if isinstance(item, StepResult):
        return pb.FromExecutor(result=message_from_result(item))
    if isinstance(item, Beat):
        steps = serving.steps
        return pb.FromExecutor(heartbeat=pb.Heartbeat(step_id=steps.running_step, progress=steps.progress))
    if isinstance(item, DrainNotice):
        return pb.FromExecutor(draining=pb.Draining(grace_seconds=item.grace_seconds))
    assert isinstance(item, Opened)
    limits = serving.model.limits
    return pb.FromExecutor(
        ready=pb.Ready(
            session=session.holder.session,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
    )


def _describe_model(response: pb.DescribeResponse, model: ServedModel) -> None:
    limits, defaults = model.limits, model.defaults
    response.model_name = model.name
    response.fingerprint = model.fingerprint
    response.vocab_size = limits.vocab_size
    response.max_model_len = limits.max_model_len
    response.block_size = limits.block_size
    response.num_blocks = limits.num_blocks
    response.max_num_seqs = limits.max_num_seqs
    response.max_num_batched_tokens = limits.max_num_batched_tokens
    response.dtype = model.dtype
    response.kv_dtype = model.kv_dtype
    response.eos_token_ids.extend(model.eos_token_ids)
    response.defaults.CopyFrom(
        pb.GenerationDefaults(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )
    )
    response.deterministic = model.deterministic
    response.device = model.device
    response.ready = True
