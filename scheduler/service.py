"""The Generation service: calls in, streams out.

Owns the requests in flight by (tenant, request id), and what becomes of an error. Whatever ends a call, a client's
cancellation, a deadline or a fault of ours, its request is aborted before the call is over; once Started was sent,
every output ends in exactly one Finished, unless the call ends in a status. One summary line per request is logged,
without the prompt's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import Message
from octavo.v1 import generation_pb2 as pb
from octavo.v1.generation_pb2_grpc import GenerationServicer

from scheduler import messages
from scheduler.chat_template import ChatTemplateError
from scheduler.detokenizer import UnknownDecoder, prompt_text
from scheduler.inspection import Inspection, Inspector
from scheduler.metrics import Metrics
from scheduler.output import Output
from scheduler.outputs import (
    Draining,
    EndReason,
    ModelInfo,
    NoExecutor,
    OutputFinish,
    ServingEngine,
    Submission,
    TicketT,
)
from scheduler.pace import Pace
from scheduler.request_stream import Log, RequestStream
from scheduler.statuses import InvalidArgument, RequestExists, TenantFull, is_ours, status_of
from scheduler.stop_strings import StopStrings
from scheduler.tokenizer import Tokenizer, TokenizerError
from scheduler.validation import (
    check_stop_strings,
    check_token_ids,
    read_identity,
    read_interval,
    read_messages,
    read_submission,
)

if TYPE_CHECKING:
    from scheduler.tracing import RequestSpan, Tracing

ResponseT = TypeVar("ResponseT")
# Longer texts (characters, or tokens) are worked on beside the event loop, so that health and other streams go on.
MAX_INLINE_SIZE = 4096
TURN_SIZE = 64  # characters that cost as much as the rendering of one turn of a conversation
NUM_THREADS = 2  # for those


class Context(Protocol):
    """What is used of grpc.aio's ServicerContext."""

    async def write(self, message: Message) -> None: ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn: ...


class _ClientGone(Exception):
    """The call is over: cancelled, past its deadline, or its connection is closed."""


@dataclass(slots=True)
class _InFlight(Generic[TicketT]):
    """A request from its call's arrival on; it has a ticket once the engine accepted it."""

    ticket: TicketT | None = None
    aborted: bool = False


class GenerationService(GenerationServicer, Generic[TicketT]):
    """One per process, on one event loop."""

    def __init__(
        self,
        engine: ServingEngine[TicketT],
        metrics: Metrics,
        *,
        queue_timeout: float = 60.0,
        stall_timeout: float = 60.0,
        max_tenant_requests: int | None = None,
        share_prefixes: bool = False,
        pace: Pace | None = None,
        inspector: Inspector | None = None,
        tracing: Tracing | None = None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_drain` is called when a client asks for the scheduler's drain; `drain` follows."""
        self._engine = engine
        self._metrics = metrics
        self._queue_timeout = queue_timeout
        self._stall_timeout = stall_timeout
        self._max_tenant_requests = max_tenant_requests
        self._share_prefixes = share_prefixes
        self._pace = pace or Pace()
        self._inspector = inspector or Inspector(engine.inspect)
        self._shown: tuple[Inspection, pb.WatchBlocksResponse] | None = None  # the latest
        self._tracing = tracing
        self._on_drain = on_drain
        self._log: Log = structlog.get_logger("service")
        self._in_flight: dict[tuple[str, str], _InFlight[TicketT]] = {}
        self._num_in_flight: Counter[str] = Counter()  # by tenant; those that have none are left out
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_begun = asyncio.Event()
        self._tokenizer: tuple[str, Tokenizer] | None = None  # with the fingerprint of its model

    @property
    def draining(self) -> bool:
        return self._drain_begun.is_set()

    async def prepare(self) -> None:
        """Loads the tokenizer of the engine's model, so that the first request need not. Raises NoExecutor."""
        await self._model()

    def drain(self) -> None:
        """From now on new requests are UNAVAILABLE."""
        self._drain_begun.set()
        self._engine.drain()

    async def wait_idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    def abort_all(self) -> None:
        for request in self._in_flight.values():
            self._abort(request)

    # --- calls

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        request_id = request.request_id or uuid.uuid4().hex
        with contextlib.suppress(_ClientGone):  # nobody is left to answer
            generate = self._generate if self._tracing is None else self._generate_traced
            await self._answer(context, request_id, generate(request, request_id, context))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async def tokenize() -> pb.TokenizeResponse:
            model, tokenizer = await self._model()
            if request.WhichOneof("prompt") is None:
                raise InvalidArgument("prompt", None, "text or chat must be set")
            special = request.add_special_tokens or not request.HasField("add_special_tokens")
            ids = await self._tokenize(model, tokenizer, request, add_special_tokens=special)
            return pb.TokenizeResponse(token_ids=ids)

        return await self._answer(context, "", tokenize())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async def detokenize() -> pb.DetokenizeResponse:
            model, tokenizer = await self._model()
            check_token_ids("token_ids", request.token_ids, model.vocab_size)
            skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
            ids = list(request.token_ids)
            text = await self._beside_the_loop(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=skip))
            return pb.DetokenizeResponse(text=text)

        return await self._answer(context, "", detokenize())

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        async def get_model() -> pb.GetModelResponse:
            model, tokenizer = await self._model()
            return messages.model(model, has_chat_template=tokenizer.has_chat_template)

        return await self._answer(context, "", get_model())

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        async def get_load() -> pb.GetLoadResponse:
            return messages.load(self._engine.load(), draining=self.draining)

        return await self._answer(context, "", get_load())

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> None:
        with contextlib.suppress(_ClientGone):
            await self._answer(context, "", self._watch_load(request, context))

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: Context) -> None:
        with contextlib.suppress(_ClientGone):
            await self._answer(context, "", self._watch_blocks(request, context))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        async def drain() -> pb.DrainResponse:
            if request.HasField("executor"):
                return pb.DrainResponse(incarnation=self._engine.drain_executor(request.executor))
            self._on_drain()
            return pb.DrainResponse()

        return await self._answer(context, "", drain())

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async def abort() -> pb.AbortResponse:
            identity = read_identity(request)
            running = self._in_flight.get((identity.tenant, identity.request_id or ""))
            if running is not None:
                self._abort(running)
            return pb.AbortResponse(found=running is not None)

        return await self._answer(context, "", abort())

    async def _watch_load(self, request: pb.WatchLoadRequest, context: Context) -> None:
        interval = read_interval(request)
        drained = asyncio.create_task(self._drained())
        try:
            while True:
                change = asyncio.create_task(self._engine.wait_change())
                await asyncio.sleep(0)  # from here on it listens, so that no change falls between two messages
                over = drained.done()
                try:
                    await _send(context, messages.load(self._engine.load(), draining=self.draining))
                    if over:
                        return
                    await asyncio.wait({change, drained}, timeout=interval, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
        finally:
            drained.cancel()

    async def _watch_blocks(self, request: pb.WatchBlocksRequest, context: Context) -> None:
        interval = read_interval(request)
        drained = asyncio.create_task(self._drained())
        try:
            while not drained.done():
                await _send(context, self._inspect())
                await asyncio.wait({drained}, timeout=self._inspector.pause(interval))
        finally:
            drained.cancel()

    def _inspect(self) -> pb.WatchBlocksResponse:
        """One message for all who see the same."""
        seen = self._inspector.look()
        if self._shown is None or self._shown[0] is not seen:
            self._shown = (seen, messages.inspection(seen, draining=self.draining))
        return self._shown[1]

    async def _drained(self) -> None:
        await self._drain_begun.wait()
        await self._idle.wait()

    # --- one request

    async def _generate_traced(self, request: pb.GenerateRequest, request_id: str, context: Context) -> None:
        assert self._tracing is not None
        with self._tracing.request(request_id, context.invocation_metadata()) as span:
            await self._generate(request, request_id, context, span)

    async def _generate(
        self, request: pb.GenerateRequest, request_id: str, context: Context, span: RequestSpan | None = None
    ) -> None:
        arrived = time.monotonic()
        if self.draining:
            raise Draining
        identity = read_identity(request)
        with self._registered(identity.tenant, request_id) as running:
            submission, tokenizer = await self._submission(request, request_id)
            if span is not None:
                submission = replace(submission, traceparent=span.traceparent)
                span.accepted()
            running.ticket = ticket = self._engine.submit(submission)
            log = self._log.bind(request_id=request_id, tenant=identity.tenant)
            outputs = _outputs(request, submission, tokenizer)
            stream = RequestStream(
                self._engine, ticket, submission, outputs, tokenizer.pieces, self._metrics, log,
                arrived=arrived, stall_timeout=self._stall_timeout,
                on_stall=lambda: self._give_up(identity.tenant, request_id, running), pace=self._pace,
            )  # fmt: skip
            try:
                if running.aborted:  # while it was tokenized
                    self._engine.abort(ticket)
                await _send(context, messages.started(request_id, submission))
                await stream.run(lambda message: _send(context, message))
            finally:
                self._engine.abort(ticket)
                self._summarize(log, submission, outputs, time.monotonic() - arrived, span)

    async def _submission(self, request: pb.GenerateRequest, request_id: str) -> tuple[Submission, Tokenizer]:
        """For the model that is served when this returns, with its tokenizer. Raises InvalidArgument or NoExecutor."""
        check_stop_strings(request)
        while True:
            model, tokenizer = await self._model()
            match request.WhichOneof("prompt"):
                case "token_ids":
                    prompt = list(request.token_ids.ids)
                case None:
                    raise InvalidArgument("prompt", None, "text, token_ids or chat must be set")
                case _:
                    prompt = await self._tokenize(model, tokenizer, request)
            current = self._engine.model
            if current is not None and current.fingerprint == model.fingerprint:
                break  # else another one came while the text was tokenized
        seed = secrets.randbits(64)
        submission = read_submission(
            request, prompt, current, seed=seed, queue_timeout=self._queue_timeout, request_id=request_id,
            share_prefixes=self._share_prefixes,
        )  # fmt: skip
        return submission, tokenizer

    @contextlib.contextmanager
    def _registered(self, tenant: str, request_id: str) -> Iterator[_InFlight[TicketT]]:
        """The request's place among those in flight. Raises RequestExists or TenantFull."""
        key = (tenant, request_id)
        if key in self._in_flight:
            raise RequestExists(tenant, request_id)
        limit = self._max_tenant_requests
        if limit is not None and self._num_in_flight[tenant] >= limit:
            raise TenantFull(tenant, limit)
        running = self._in_flight[key] = _InFlight[TicketT]()
        self._num_in_flight[tenant] += 1
        self._idle.clear()
        try:
            yield running
        finally:
            self._release(key, running)

    def _give_up(self, tenant: str, request_id: str, running: _InFlight[TicketT]) -> None:
        """The call may hang for as long as its client does; neither its id nor a drain waits for that."""
        self._abort(running)
        self._release((tenant, request_id), running)

    def _release(self, key: tuple[str, str], running: _InFlight[TicketT]) -> None:
        if self._in_flight.get(key) is running:
            del self._in_flight[key]
            self._num_in_flight -= Counter((key[0],))
            if not self._in_flight:
                self._idle.set()

    def _abort(self, running: _InFlight[TicketT]) -> None:
        running.aborted = True
        if running.ticket is not None:
            self._engine.abort(running.ticket)

    async def _model(self) -> tuple[ModelInfo, Tokenizer]:
        """What is served now. Raises NoExecutor."""
        model = self._engine.model
        if model is None:
            raise NoExecutor("none has joined yet")
        if self._tokenizer is None or self._tokenizer[0] != model.fingerprint:
            try:
                tokenizer = await asyncio.to_thread(Tokenizer, dict(self._engine.tokenizer_files))
            except (TokenizerError, UnknownDecoder) as error:
                raise NoExecutor(str(error)) from error
            self._tokenizer = (model.fingerprint, tokenizer)
        return model, self._tokenizer[1]

    def _summarize(
        self, log: Log, submission: Submission, outputs: list[Output], seconds: float, span: RequestSpan | None
    ) -> None:
        """To the log, the metrics and the trace, when the call is over."""
        ends = [output.end.finish for output in outputs if output.end is not None]
        reasons = [output.end.reason.value if output.end else EndReason.CANCELLED.value for output in outputs]
        first = ends[0] if ends else None
        self._count(submission, outputs, reasons, ends, seconds)
        values = {
            "reasons": reasons,
            "errors": [finish.error for finish in ends if finish.error] or None,
            "num_prompt_tokens": len(submission.prompt_token_ids),
            "num_output_tokens": sum(output.num_tokens for output in outputs),
            "num_cached_tokens": first.num_cached_tokens if first else None,
            "executors": list(first.executors) if first else None,
            "num_preemptions": sum(finish.num_preemptions for finish in ends),
            "seconds": round(seconds, 6),
            "queue_seconds": round(first.queue_seconds, 6) if first else None,
            "prefill_seconds": round(first.prefill_seconds, 6) if first else None,
            "decode_seconds": round(first.decode_seconds, 6) if first else None,
        }
        log.info("request", **values)
        if span is not None:
            span.summarize({"tenant": submission.tenant, **values})

    def _count(
        self,
        submission: Submission,
        outputs: list[Output],
        reasons: list[str],
        ends: list[OutputFinish],
        seconds: float,
    ) -> None:
        metrics = self._metrics
        metrics.request_latency.observe(seconds)
        metrics.prompt_tokens.inc(len(submission.prompt_token_ids))
        metrics.request_prompt_tokens.observe(len(submission.prompt_token_ids))
        for output, reason in zip(outputs, reasons, strict=True):
            metrics.requests.labels(reason).inc()
            metrics.output_tokens.inc(output.num_tokens)
            metrics.request_output_tokens.observe(output.num_tokens)
        if ends:
            metrics.cached_tokens.inc(ends[0].num_cached_tokens)
            if ends[0].prefill_seconds:  # a first token came
                metrics.prefill_time.observe(ends[0].prefill_seconds)
        for finish in ends:
            if finish.decode_seconds:  # and another one
                metrics.decode_time.observe(finish.decode_seconds)

    # --- text

    async def _tokenize(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer,
        request: pb.GenerateRequest | pb.TokenizeRequest,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Ids of a request's text or chat. What is too long for any prompt is refused before time is spent on it."""
        encode: Callable[[], list[int]]
        field = request.WhichOneof("prompt") or "prompt"
        if field == "text":
            effort = size = len(request.text.encode())

            def encode() -> list[int]:
                return tokenizer.encode(request.text, add_special_tokens=add_special_tokens)
        else:
            conversation = read_messages(request.chat, model.max_model_len)
            size = sum(len(message.content.encode()) for message in conversation)
            # A template may leave roles out, so they prove nothing of the length; but each turn must be rendered.
            effort = size + sum(len(message.role) + TURN_SIZE for message in conversation)
            prompt = request.chat.add_generation_prompt or not request.chat.HasField("add_generation_prompt")

            def encode() -> list[int]:
                return tokenizer.encode_chat(conversation, add_generation_prompt=prompt)

        most = tokenizer.max_text_bytes(model.max_model_len)
        if size > most:
            raise InvalidArgument(
                field, f"{size} bytes", f"no text of more than {most} bytes fits max_model_len {model.max_model_len}"
            )
        try:
            return await self._beside_the_loop(effort, encode)
        except ChatTemplateError as error:
            raise InvalidArgument("chat", f"{len(request.chat.messages)} messages", str(error)) from error

    async def _beside_the_loop(self, size: int, work: Callable[[], ResponseT]) -> ResponseT:
        """In a thread, unless it is so little that the way there costs more. The threads are few and the service's
        own; what waits for one is dropped when its call is over."""
        if size <= MAX_INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- errors

    async def _answer(self, context: Context, request_id: str, answer: Awaitable[ResponseT]) -> ResponseT:
        """The answer, or its error as a status."""
        try:
            return await answer
        except _ClientGone:
            raise
        except Exception as error:
            await self._refuse(context, request_id, error)

    async def _refuse(self, context: Context, request_id: str, error: Exception) -> NoReturn:
        status = status_of(error, request_id)
        self._metrics.refused.labels(status.code.name).inc()
        if is_ours(error):
            self._log.error("internal_error", request_id=request_id, exc_info=error)
        else:
            self._log.info("refused", request_id=request_id, code=status.code.name, why=status.message)
        await context.abort(status.code, status.message, status.trailing_metadata())


async def _send(context: Context, message: Message) -> None:
    """A call that is over fails its writes, sometimes before its cancellation arrives. Raises _ClientGone."""
    try:
        await context.write(message)
    except grpc.aio.BaseError as error:
        raise _ClientGone from error


def _outputs(request: pb.GenerateRequest, submission: Submission, tokenizer: Tokenizer) -> list[Output]:
    prefix = prompt_text(tokenizer.pieces, submission.prompt_token_ids) if request.echo else ""
    stop_strings = StopStrings(request.stop) if request.stop else None
    return [
        Output(i, submission, tokenizer.pieces, stop_strings, include_stop=request.include_stop, prefix=prefix)
        for i in range(submission.n)
    ]
