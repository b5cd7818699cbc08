"""Bytes that are no message of their method: INVALID_ARGUMENT, where gRPC's own answer would be UNKNOWN.

An interceptor that keeps the error of a request's deserializer until the handler is called, which has a context to
answer with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError

from scheduler.service import Context
from scheduler.statuses import InvalidArgument, status_of

Behavior = Callable[[object, Context], Awaitable[object]]


class _Handler(Protocol):
    """What is used of a grpc.RpcMethodHandler, a named tuple."""

    request_streaming: bool
    response_streaming: bool
    request_deserializer: Callable[[bytes], object] | None
    unary_unary: Behavior
    unary_stream: Behavior

    def _replace(self, **fields: object) -> _Handler: ...


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """For methods that take one message and answer it in a coroutine; others are left alone."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or handler.request_streaming or not method.startswith("/octavo.v1."):
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behavior = cast(Behavior, getattr(handler, kind))
        deserialize = handler.request_deserializer
        assert deserialize is not None, "generated code names one"

        def deserialize_or_keep_error(data: bytes) -> object:
            try:
                return deserialize(data)
            except DecodeError as error:
                return error

        async def call(request: object, context: Context) -> object:
            if isinstance(request, DecodeError):
                status = status_of(InvalidArgument("message", method, str(request)))
                await context.abort(status.code, status.message, status.trailing_metadata())
            return await behavior(request, context)

        return handler._replace(request_deserializer=deserialize_or_keep_error, **{kind: call})
