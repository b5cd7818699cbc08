"""Only the scheduler may call: an interceptor that compares the name in the caller's certificate.

TLS has verified the certificate by then; here it is asked whose it is. Health is open to whoever may connect.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
import structlog

_OPEN_SERVICES = ("/grpc.health.v1.",)
_NAMES = ("x509_subject_alternative_name", "x509_common_name")


class _Handler(Protocol):
    """What is used of a grpc.RpcMethodHandler, a named tuple."""

    request_streaming: bool
    response_streaming: bool

    def _replace(self, **fields: object) -> _Handler: ...


class Context(Protocol):
    """What is used of grpc.aio's ServicerContext."""

    def auth_context(self) -> Mapping[str, list[bytes]]: ...

    def peer(self) -> str: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> None: ...


class OnlyFrom(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call but health's from anybody else than `name`, with PERMISSION_DENIED."""

    def __init__(self, name: str) -> None:
        """`name`: a subject alternative name (DNS, URI) or the common name of the scheduler's certificate."""
        self._name = name
        self._log = structlog.get_logger("executor")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(_OPEN_SERVICES):
            return handler
        requests = "stream" if handler.request_streaming else "unary"
        kind = f"{requests}_{'stream' if handler.response_streaming else 'unary'}"
        behavior: Callable[[object, Context], Any] = getattr(handler, kind)

        async def answer(request: object, context: Context) -> object:
            await self._check(context)
            return await behavior(request, context)

        async def stream(request: object, context: Context) -> AsyncIterator[object]:
            await self._check(context)
            async for message in behavior(request, context):
                yield message

        return handler._replace(**{kind: stream if inspect.isasyncgenfunction(behavior) else answer})

    async def _check(self, context: Context) -> None:
        names = names_of(context.auth_context())
        if self._name not in names:
            self._log.warning("foreign caller refused", peer=context.peer(), names=names)
            callers = ", ".join(map(repr, names)) or "no name"
            sentence = f"this executor takes calls from {self._name!r} alone, not from {callers}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, sentence)


def names_of(auth_context: Mapping[str, list[bytes]]) -> list[str]:
    """What a verified certificate says of its owner."""
    return [value.decode(errors="replace") for key in _NAMES for value in auth_context.get(key, ())]
