"""One executor as the scheduler reaches it: what it serves, and a session that carries plans out and results back.

A session is opened with Hello and lives until its stream ends. It decides alone whether the executor is dead: stream
error, no heartbeat, no progress within a step, an answer that belongs to no plan. It knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
from octavo.tls import ClientCredentials
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from scheduler.core.plan import BatchPlan, StepResult
from scheduler.core.scheduler import ProtocolError
from scheduler.metrics import ExecutorMetrics
from scheduler.outputs import GenerationDefaults, ModelInfo
from scheduler.wire import plan_to_message, result_from_message

PROTOCOL_VERSION = 1


class ExecutorUnreachable(Exception):
    """It does not answer, or is still loading: worth another try."""


class ExecutorRefused(Exception):
    """It answers, but cannot be used as it is; the message names what differs."""


class ExecutorGone(Exception):
    """The session is over; the message says why."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    connect_timeout: float = 5.0  # seconds, of Describe, GetTokenizer and Hello
    heartbeat_timeout: float = 2.0  # seconds without any message
    step_timeout: float = 30.0  # seconds in one step without progress
    max_message_bytes: int = 64 << 20
    credentials: ClientCredentials | None = None  # None: no TLS
    server_name: str | None = None  # that certificates must hold; None: the address


@dataclass(frozen=True, slots=True)
class Description:
    """An executor that is ready."""

    incarnation: str
    model: ModelInfo
    num_blocks: int  # the null block included
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class ExecutorDraining:
    """It was asked to stop, and will after so many seconds at the latest."""

    grace_seconds: float


class ExecutorClient:
    """A channel to one target. Close it when done."""

    def __init__(self, target: str, options: ClientOptions) -> None:
        self.target = target
        self._options = options
        self._credentials = None if options.credentials is None else options.credentials.current()
        channel_options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", options.max_message_bytes),
            ("grpc.max_receive_message_length", options.max_message_bytes),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),  # 60 s by default
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        ]
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=channel_options)
        else:
            if options.server_name is not None:
                channel_options.append(("grpc.ssl_target_name_override", options.server_name))
            self._channel = grpc.aio.secure_channel(target, self._credentials, options=channel_options)
        self._stub = pb_grpc.ExecutorStub(self._channel)  # type: ignore[no-untyped-call]

    @property
    def is_outdated(self) -> bool:
        """Connections made from now on should show, or trust, another certificate."""
        credentials = self._options.credentials
        return credentials is not None and credentials.current() is not self._credentials

    async def close(self) -> None:
        await self._channel.close()

    async def describe(self) -> Description:
        """Raises ExecutorUnreachable while there is nothing to use yet, ExecutorRefused for another protocol."""
        try:
            d = await self._stub.Describe(pb.DescribeRequest(), timeout=self._options.connect_timeout)
        except grpc.aio.AioRpcError as error:
            refused = error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
            raise (ExecutorRefused if refused else ExecutorUnreachable)(_reason(error)) from None
        if d.protocol_version != PROTOCOL_VERSION:
            raise ExecutorRefused(f"it speaks protocol version {d.protocol_version}, this scheduler {PROTOCOL_VERSION}")
        if not d.ready:
            raise ExecutorUnreachable("it is loading its model")
        return _description(d)

    async def tokenizer_files(self) -> dict[str, bytes]:
        """By name. Raises ExecutorUnreachable."""
        files: dict[str, bytearray] = {}
        try:
            async for chunk in self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=self._options.connect_timeout):
                files.setdefault(chunk.file, bytearray()).extend(chunk.data)
        except grpc.aio.AioRpcError as error:
            raise ExecutorUnreachable(_reason(error)) from None
        return {name: bytes(data) for name, data in files.items()}

    async def open_session(
        self, scheduler_id: str, session: int, incarnation: str, metrics: ExecutorMetrics
    ) -> ExecutorSession:
        """Says Hello and waits for Ready. Raises ExecutorRefused with the executor's reason, or ExecutorUnreachable."""
        call = self._stub.Execute()
        hello = pb.Hello(
            scheduler_id=scheduler_id, session=session, incarnation=incarnation, protocol_version=PROTOCOL_VERSION
        )
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                await call.write(pb.ToExecutor(hello=hello))
                first = await call.read()
        except TimeoutError:
            call.cancel()
            raise ExecutorUnreachable(f"no Ready within {self._options.connect_timeout:g} s") from None
        except grpc.aio.AioRpcError as error:
            retry = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
            raise (ExecutorUnreachable if retry else ExecutorRefused)(_reason(error)) from None
        if not isinstance(first, pb.FromExecutor) or first.WhichOneof("message") != "ready":
            call.cancel()
            raise ExecutorRefused("its first message is not Ready")
        return ExecutorSession(call, self._options, metrics)


class ExecutorSession:
    """An open Execute stream. `send` never waits; `receive` yields what comes, in order, and raises ExecutorGone."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[pb.ToExecutor, pb.FromExecutor],
        options: ClientOptions,
        metrics: ExecutorMetrics,
    ) -> None:
        self._call = call
        self._options = options
        self._metrics = metrics
        self._steps_sent: dict[int, float] = {}  # when, by step id; those with rows, until they are answered
        self._outgoing: asyncio.Queue[pb.ToExecutor | None] = asyncio.Queue()
        self._verdict: str | None = None  # why this side ended it
        self._last_heard = time.monotonic()
        self._progress = (0, 0)  # (step_id, layers) of the last heartbeat
        self._progress_since = self._last_heard
        self._tasks = [
            asyncio.create_task(self._write(), name="executor-writer"),
            asyncio.create_task(self._watch(), name="executor-watchdog"),
        ]

    def send(self, plan: BatchPlan) -> None:
        message = plan_to_message(plan)
        self._outgoing.put_nowait(pb.ToExecutor(plan=message))
        self._metrics.sent(message.ByteSize(), len(plan.row_sequences), plan.num_tokens)
        if plan.row_sequences:
            self._steps_sent[plan.step_id] = time.monotonic()

    def drain(self) -> None:
        """Asks the executor to stop when this session is over, or its grace period is. Plans may still follow."""
        self._outgoing.put_nowait(pb.ToExecutor(drain=pb.Drain()))

    def finish(self) -> None:
        """No plan follows; the executor ends the stream when it has answered all."""
        self._outgoing.put_nowait(None)

    def fail(self, reason: str) -> None:
        """Ends the stream at once; `receive` raises ExecutorGone with the reason."""
        self._verdict = self._verdict or reason
        self._call.cancel()

    async def close(self) -> None:
        """Ends the stream at once."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def receive(self) -> AsyncIterator[StepResult | ExecutorDraining]:
        try:
            while isinstance(message := await self._call.read(), pb.FromExecutor):
                self._last_heard = time.monotonic()
                kind = message.WhichOneof("message")
                if kind == "result":
                    self._progress_since = self._last_heard
                    result = result_from_message(message.result)
                    self._measure(result, message.result.ByteSize())
                    yield result
                elif kind == "heartbeat":
                    self._note_progress(message.heartbeat)
                elif kind == "draining":
                    yield ExecutorDraining(message.draining.grace_seconds)
        except ProtocolError as error:
            raise ExecutorGone(f"it broke the protocol: {error}") from None
        except grpc.aio.AioRpcError as error:
            raise ExecutorGone(self._verdict or _reason(error)) from None
        except asyncio.CancelledError:
            # The call's own cancellation, by `fail`, arrives here as this task's would.
            task = asyncio.current_task()
            if self._verdict is None or (task is not None and task.cancelling()):
                raise
            raise ExecutorGone(self._verdict) from None
        raise ExecutorGone(self._verdict or "it ended the session")

    def _measure(self, result: StepResult, num_bytes: int) -> None:
        sent_at = self._steps_sent.pop(result.step_id, None)
        if sent_at is not None and result.timings is not None:
            self._metrics.answered(num_bytes, self._last_heard - sent_at, result.timings)

    async def _write(self) -> None:
        # A broken stream is reported by its reader.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()

    async def _watch(self) -> None:
        period = self._options.heartbeat_timeout / 4
        while True:
            before = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            if now - before > 2 * period:  # this process stood still itself: what came meanwhile is still unread
                self._last_heard = self._progress_since = now
            if (verdict := self._judge(now)) is not None:
                self.fail(verdict)
                return

    def _judge(self, now: float) -> str | None:
        if now - self._last_heard > self._options.heartbeat_timeout:
            return f"no heartbeat for {self._options.heartbeat_timeout:g} s"
        if self._progress[0] and now - self._progress_since > self._options.step_timeout:
            return f"no progress in step {self._progress[0]} for {self._options.step_timeout:g} s"
        return None

    def _note_progress(self, beat: pb.Heartbeat) -> None:
        if (beat.step_id, beat.progress) != self._progress:
            self._progress = (beat.step_id, beat.progress)
            self._progress_since = self._last_heard


def _description(d: pb.DescribeResponse) -> Description:
    defaults = d.defaults
    model = ModelInfo(
        name=d.model_name,
        fingerprint=d.fingerprint,
        vocab_size=d.vocab_size,
        max_model_len=d.max_model_len,
        block_size=d.block_size,
        dtype=d.dtype,
        kv_dtype=d.kv_dtype,
        eos_token_ids=tuple(d.eos_token_ids),
        defaults=GenerationDefaults(
            temperature=defaults.temperature if defaults.HasField("temperature") else None,
            top_k=defaults.top_k if defaults.HasField("top_k") else None,
            top_p=defaults.top_p if defaults.HasField("top_p") else None,
            min_p=defaults.min_p if defaults.HasField("min_p") else None,
            repetition_penalty=defaults.repetition_penalty if defaults.HasField("repetition_penalty") else None,
        ),
        capacity_tokens=(d.num_blocks - 1) * d.block_size,
        max_num_seqs=d.max_num_seqs,
        deterministic=d.deterministic,
        device=d.device,
    )
    return Description(d.incarnation, model, d.num_blocks, d.max_num_batched_tokens)


def _reason(error: grpc.aio.AioRpcError) -> str:
    details = error.details() or ""
    if details.endswith("Connection refused"):
        return "connection refused"  # the usual case, which gRPC tells in 150 characters
    return f"{error.code().name}: {details}"
