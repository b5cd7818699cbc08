"""What a call to a scheduler can fail with: one class for each kind, each with a sentence and its values.

Made from gRPC statuses and their google.rpc details; nothing of gRPC is needed to handle them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from octavo.results import Completion


class OctavoError(Exception):
    """Any failure of a call."""


class ServerUnavailable(OctavoError):
    """No server answers at the address, it drains, or it has no executor yet. Worth another try later."""


class InvalidRequest(OctavoError):
    """A field of the request cannot have its value. `field` and `value` are None where the server named none."""

    def __init__(self, message: str, field: str | None = None, value: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class QueueFull(OctavoError):
    """Too much waits already; room is likely after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class MessageTooLarge(OctavoError):
    """Request or answer exceed the bound on messages, here or on the server."""


class RequestExists(OctavoError):
    """The tenant has a request of this id in flight."""


class UnknownExecutor(OctavoError):
    """No executor of this name has joined."""


class DeadlineExceeded(OctavoError):
    """The call took longer than its timeout; the server has aborted it."""


class CallCancelled(OctavoError):
    """The call was cancelled on its way."""


class AccessDenied(OctavoError):
    """The server wants a token, does not know the one it was shown, or does not let its owner do this."""


class ServerFault(OctavoError):
    """The server failed; its log says why."""


class RequestFailed(OctavoError):
    """An output of a completion ended with ERROR or TIMEOUT; `completion` holds what there is."""

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message)
        self.completion = completion


def error_of(error: grpc.RpcError, address: str, timeout: float | None) -> OctavoError:
    """The failure that a status tells of."""
    code, message = error.code(), error.details() or ""
    info, bad, retry = _details(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailable(message if info else f"no server can be reached at {address}: {message}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = bad.field_violations[0].field if bad else None
        return InvalidRequest(message, field, info.metadata.get("value") if info else None)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if retry is None:
            return MessageTooLarge(message)
        return QueueFull(message, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    if code is grpc.StatusCode.ALREADY_EXISTS:
        return RequestExists(message)
    if code is grpc.StatusCode.NOT_FOUND and info:
        return UnknownExecutor(message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the deadline passed" if timeout is None else f"not done within {timeout:g} s")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessDenied(message)
    if code is grpc.StatusCode.CANCELLED:
        return CallCancelled(message or "the call was cancelled")
    return ServerFault(f"{code.name}: {message}")


def _details(
    error: grpc.RpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.BadRequest | None, error_details_pb2.RetryInfo | None]:
    """Of the kinds that a scheduler sends, those that are there."""
    info = bad = retry = None
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
                if detail.Is(kind.DESCRIPTOR):
                    message = kind.FromString(detail.value)
                    info = message if isinstance(message, error_details_pb2.ErrorInfo) else info
                    bad = message if isinstance(message, error_details_pb2.BadRequest) else bad
                    retry = message if isinstance(message, error_details_pb2.RetryInfo) else retry
    return info, bad, retry
