# ruff: noqa: ASYNC109 (a timeout here is the call's deadline, which the server must know)
"""Clients of a scheduler: `Client` blocks, `AsyncClient` is for asyncio; they offer the same calls.

    from octavo.client import Client, Delta

    with Client("localhost:50051") as client:
        for event in client.generate(chat="Why is the sky blue?", max_tokens=100):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
        print(client.complete(text="One, two,", temperature=0).text)

Calls raise the classes of `octavo.errors`. A stream that is closed, or left with `break`, cancels its request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.blocks import Inspection, inspection_of
from octavo.errors import (
    AccessDenied,
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    OctavoError,
    QueueFull,
    RequestExists,
    RequestFailed,
    ServerFault,
    ServerUnavailable,
    UnknownExecutor,
    error_of,
)
from octavo.request import Conversation, GenerateOptions, chat_of, request_of, watch_blocks_of, watch_of
from octavo.results import (
    Completion,
    Delta,
    Event,
    ExecutorLoad,
    ExecutorState,
    Finished,
    FinishReason,
    Gathered,
    Load,
    Model,
    Output,
    PromptLogprobs,
    SamplingDefaults,
    Started,
    Timings,
    TokenLogprobs,
    TopLogprob,
    Usage,
    WaitingRequests,
    event_of,
    load_of,
    model_of,
)
from octavo.tls import BadTLSFiles, ClientCredentials, ClientFiles
from octavo.v1 import generation_pb2 as pb
from octavo.v1.generation_pb2_grpc import GenerationStub

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "BadTLSFiles",
    "CallCancelled",
    "Client",
    "ClientFiles",
    "Completion",
    "Conversation",
    "DeadlineExceeded",
    "Delta",
    "Event",
    "ExecutorLoad",
    "ExecutorState",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Inspection",
    "InvalidRequest",
    "Load",
    "MessageTooLarge",
    "Model",
    "OctavoError",
    "Output",
    "PromptLogprobs",
    "QueueFull",
    "RequestExists",
    "RequestFailed",
    "SamplingDefaults",
    "ServerFault",
    "ServerUnavailable",
    "Started",
    "Timings",
    "TokenLogprobs",
    "TopLogprob",
    "UnknownExecutor",
    "Usage",
    "WaitingRequests",
]

DEFAULT_ADDRESS = "localhost:50051"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
READINESS = "octavo.v1.Generation"

# Tried again only while nothing of an answer was received: a request is never run twice.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": READINESS}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

ResponseT = TypeVar("ResponseT")
ResponseT_co = TypeVar("ResponseT_co", covariant=True)


Metadata = tuple[tuple[str, str], ...]


class _Method(Protocol[ResponseT_co]):
    """A unary method of a stub."""

    def __call__(self, request: object, *, timeout: float | None, metadata: Metadata) -> ResponseT_co: ...


def _options(max_message_bytes: int, tls_name: str | None) -> list[tuple[str, int | str]]:
    named = [] if tls_name is None else [("grpc.ssl_target_name_override", tls_name)]
    return [
        *named,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # 60 s by default
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]


class Client:
    """Blocking. One connection, usable from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: ClientFiles | None = None,
        tls_name: str | None = None,
        token: str | None = None,
    ) -> None:
        """Connects at the first call. `timeout` in seconds is that of calls which name none; None waits. `tls`: the
        connection is encrypted, and the server's certificate must hold `tls_name`, or the address. `token` is the
        bearer token that the server asks for. Raises BadTLSFiles."""
        self.address = address
        self.timeout = timeout
        self._token = token
        options = _options(max_message_bytes, tls_name)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, ClientCredentials(tls).current(), options=options)
        self._stub = GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it the calls that still run."""
        self._channel.close()

    def generate(
        self, *, timeout: float | None = None, traceparent: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Event]:
        """Events as they come: Started, then Delta (and PromptLogprobs, if asked for), one Finished for each output.

            for event in client.generate(text="Once upon a time", n=2, seed=7):
                ...

        The request is sent when the first event is asked for, and cancelled when the iterator is closed. `traceparent`
        is the W3C Trace Context of the caller's span, if the server's are to be its children.
        """
        return self._events(request_of(options), self.timeout if timeout is None else timeout, traceparent)

    def complete(
        self, *, timeout: float | None = None, traceparent: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """All of it at once. Raises RequestFailed where an output ended with an error.

        completion = client.complete(chat=[("system", "Be brief."), ("user", "Hi!")])
        print(completion.text, completion.usage.num_output_tokens)
        """
        gathered = Gathered()
        for event in self.generate(timeout=timeout, traceparent=traceparent, **options):
            gathered.add(event)
        return gathered.completion()

    def tokenize(
        self,
        text: str | None = None,
        *,
        chat: Conversation | None = None,
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text or a conversation, exactly as `generate` would feed them."""
        request = _tokenize_request(text, chat, add_special_tokens)
        return list(self._call(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call(self._stub.Detokenize, request, timeout).text)

    def model(self, *, timeout: float | None = None) -> Model:
        """What is served."""
        return model_of(self._call(self._stub.GetModel, pb.GetModelRequest(), timeout))

    def load(self, *, timeout: float | None = None) -> Load:
        """What runs, what waits and why."""
        return load_of(self._call(self._stub.GetLoad, pb.GetLoadRequest(), timeout))

    def watch_load(self, interval: float | None = None, *, timeout: float | None = None) -> Iterator[Load]:
        """The load now, at every change of an executor's state, and every `interval` seconds (None: 1); ends when the
        scheduler stops."""
        timeout = self.timeout if timeout is None else timeout
        call = self._stub.WatchLoad(watch_of(interval), timeout=timeout, metadata=_metadata(self._token))
        try:
            for message in call:
                yield load_of(message)
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None
        finally:
            call.cancel()

    def watch_blocks(self, interval: float | None = None, *, timeout: float | None = None) -> Iterator[Inspection]:
        """Who holds which KV block, and what the latest steps held: now, and about every `interval` seconds (None: 1);
        ends when the scheduler stops."""
        timeout = self.timeout if timeout is None else timeout
        call = self._stub.WatchBlocks(watch_blocks_of(interval), timeout=timeout, metadata=_metadata(self._token))
        try:
            for message in call:
                yield inspection_of(message)
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None
        finally:
            call.cancel()

    def drain(self, executor: str | None = None, *, timeout: float | None = None) -> str | None:
        """Lets an executor, named by incarnation or target, finish what it runs and stop; returns its incarnation.
        None: the scheduler itself, as at SIGTERM. Raises UnknownExecutor."""
        response = self._call(self._stub.Drain, pb.DrainRequest(executor=executor), timeout)
        return response.incarnation if response.HasField("incarnation") else None

    def abort(self, request_id: str, *, tenant: str | None = None, timeout: float | None = None) -> bool:
        """Ends a request; its outputs finish with CANCELLED. False: no such request is in flight."""
        request = pb.AbortRequest(request_id=request_id, tenant=tenant)
        return bool(self._call(self._stub.Abort, request, timeout).found)

    def health(self, service: str = READINESS, *, timeout: float | None = None) -> bool:
        """The service is SERVING; by default: requests would run now."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._call(self._health.Check, request, timeout)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _call(self, method: _Method[ResponseT], request: object, timeout: float | None) -> ResponseT:
        timeout = self.timeout if timeout is None else timeout
        try:
            return method(request, timeout=timeout, metadata=_metadata(self._token))
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None

    def _events(self, request: pb.GenerateRequest, timeout: float | None, traceparent: str | None) -> Iterator[Event]:
        call = self._stub.Generate(request, timeout=timeout, metadata=_metadata(self._token, traceparent))
        try:
            for message in call:
                if (event := event_of(message)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None
        finally:
            call.cancel()


class AsyncClient:
    """The same for asyncio; belongs to the event loop in which it was made.

    async with AsyncClient("localhost:50051") as client:
        async for event in client.generate(chat="Hello!"):
            ...
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: ClientFiles | None = None,
        tls_name: str | None = None,
        token: str | None = None,
    ) -> None:
        """Connects at the first call. `timeout` in seconds is that of calls which name none; None waits. `tls`: the
        connection is encrypted, and the server's certificate must hold `tls_name`, or the address. `token` is the
        bearer token that the server asks for. Raises BadTLSFiles."""
        self.address = address
        self.timeout = timeout
        self._token = token
        options = _options(max_message_bytes, tls_name)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, ClientCredentials(tls).current(), options=options)
        self._stub = GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it the calls that still run."""
        await self._channel.close()

    def generate(
        self, *, timeout: float | None = None, traceparent: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Event]:
        """As `Client.generate`. After a `break`, the request is cancelled once the iterator is closed: `aclosing`
        from contextlib does that at once."""
        return self._events(request_of(options), self.timeout if timeout is None else timeout, traceparent)

    async def complete(
        self, *, timeout: float | None = None, traceparent: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """As `Client.complete`."""
        gathered = Gathered()
        async for event in self.generate(timeout=timeout, traceparent=traceparent, **options):
            gathered.add(event)
        return gathered.completion()

    async def tokenize(
        self,
        text: str | None = None,
        *,
        chat: Conversation | None = None,
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> list[int]:
        """As `Client.tokenize`."""
        request = _tokenize_request(text, chat, add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request, timeout)).text)

    async def model(self, *, timeout: float | None = None) -> Model:
        """What is served."""
        return model_of(await self._call(self._stub.GetModel, pb.GetModelRequest(), timeout))

    async def load(self, *, timeout: float | None = None) -> Load:
        """What runs, what waits and why."""
        return load_of(await self._call(self._stub.GetLoad, pb.GetLoadRequest(), timeout))

    async def watch_load(self, interval: float | None = None, *, timeout: float | None = None) -> AsyncIterator[Load]:
        """As `Client.watch_load`."""
        timeout = self.timeout if timeout is None else timeout
        call = self._stub.WatchLoad(watch_of(interval), timeout=timeout, metadata=_metadata(self._token))
        try:
            async for message in call:
                yield load_of(message)
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None
        finally:
            call.cancel()

    async def watch_blocks(
        self, interval: float | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[Inspection]:
        """As `Client.watch_blocks`."""
        timeout = self.timeout if timeout is None else timeout
        call = self._stub.WatchBlocks(watch_blocks_of(interval), timeout=timeout, metadata=_metadata(self._token))
        try:
            async for message in call:
                yield inspection_of(message)
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None
        finally:
            call.cancel()

    async def drain(self, executor: str | None = None, *, timeout: float | None = None) -> str | None:
        """As `Client.drain`."""
        response = await self._call(self._stub.Drain, pb.DrainRequest(executor=executor), timeout)
        return response.incarnation if response.HasField("incarnation") else None

    async def abort(self, request_id: str, *, tenant: str | None = None, timeout: float | None = None) -> bool:
        """As `Client.abort`."""
        request = pb.AbortRequest(request_id=request_id, tenant=tenant)
        return bool((await self._call(self._stub.Abort, request, timeout)).found)

    async def health(self, service: str = READINESS, *, timeout: float | None = None) -> bool:
        """As `Client.health`."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._call(self._health.Check, request, timeout)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, method: _Method[Awaitable[ResponseT]], request: object, timeout: float | None) -> ResponseT:
        timeout = self.timeout if timeout is None else timeout
        try:
            return await method(request, timeout=timeout, metadata=_metadata(self._token))
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None

    async def _events(
        self, request: pb.GenerateRequest, timeout: float | None, traceparent: str | None
    ) -> AsyncIterator[Event]:
        call = self._stub.Generate(request, timeout=timeout, metadata=_metadata(self._token, traceparent))
        try:
            async for message in call:
                if (event := event_of(message)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout) from None
        finally:
            call.cancel()


def _metadata(token: str | None, traceparent: str | None = None) -> Metadata:
    given = {"authorization": token and f"Bearer {token}", "traceparent": traceparent}
    return tuple((key, value) for key, value in given.items() if value is not None)


def _tokenize_request(text: str | None, chat: Conversation | None, add_special_tokens: bool) -> pb.TokenizeRequest:
    if (text is None) == (chat is None):
        raise ValueError("exactly one of text and chat= is needed")
    if chat is not None:
        return pb.TokenizeRequest(chat=chat_of(chat))
    return pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
