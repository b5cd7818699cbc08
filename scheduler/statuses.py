"""The one table from errors to gRPC statuses, and the errors of a request that is wrong in itself.

Every status carries google.rpc details: ErrorInfo always, BadRequest where a field is to blame, RetryInfo where
waiting helps. What is not in the table is a fault of ours: INTERNAL, with the request's id and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from scheduler.outputs import DoesNotFit, Draining, ExecutorLost, NoExecutor, QueueFull, UnknownExecutor

ERROR_DOMAIN = "octavo"
DETAILS_KEY = "grpc-status-details-bin"  # where gRPC's richer error model puts the Status message
MAX_VALUE_CHARACTERS = 100
TENANT_RETRY_SECONDS = 1.0  # one of its own requests must end first, and nobody knows when
MAX_MESSAGE_CHARACTERS = 1000  # a status travels in headers, which have bounds of their own


class InvalidArgument(Exception):
    """A field of a request has a value that it cannot have."""

    def __init__(self, field: str, value: object, why: str) -> None:
        shown = repr(value)
        if len(shown) > MAX_VALUE_CHARACTERS:
            shown = f"{shown[:MAX_VALUE_CHARACTERS]}…"
        super().__init__(f"{field} = {shown}: {why}")
        self.field = field
        self.value = shown
        self.why = why


class RequestExists(Exception):
    """The tenant has a request of this id in flight."""

    def __init__(self, tenant: str, request_id: str) -> None:
        super().__init__(f"tenant {tenant!r} has a request {request_id!r} in flight")
        self.tenant = tenant
        self.request_id = request_id


class TenantFull(Exception):
    """The tenant has as many requests in flight as it may."""

    def __init__(self, tenant: str, limit: int) -> None:
        super().__init__(f"tenant {tenant!r} has {limit} requests in flight, which is all it may have")


class Unauthenticated(Exception):
    """Nobody knows who calls."""


class NotPermitted(Exception):
    """The caller is known, and may not do this."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """A gRPC status before it is sent."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    details: tuple[Message, ...] = ()

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata)
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in (info, *self.details):
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return ((DETAILS_KEY, status.SerializeToString()),)


def status_of(error: Exception, request_id: str = "") -> ErrorStatus:
    """The status that tells a client of `error`."""
    message = str(error)[:MAX_MESSAGE_CHARACTERS]
    match error:
        case InvalidArgument():
            metadata = {"field": error.field, "value": error.value}
            details = (_field_violation(error.field, message),)
            return ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", message, metadata, details)
        case DoesNotFit():
            details = (_field_violation("prompt", message),)
            return ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, "DOES_NOT_FIT", message, {"field": "prompt"}, details)
        case QueueFull():
            retry = error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_seconds))
            return ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, details=(retry,))
        case TenantFull():
            retry = error_details_pb2.RetryInfo(retry_delay=_duration(TENANT_RETRY_SECONDS))
            return ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_FULL", message, details=(retry,))
        case Unauthenticated():
            return ErrorStatus(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", message)
        case NotPermitted():
            return ErrorStatus(grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED", message)
        case RequestExists():
            metadata = {"tenant": error.tenant, "request_id": error.request_id}
            return ErrorStatus(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_EXISTS", message, metadata)
        case UnknownExecutor():
            return ErrorStatus(grpc.StatusCode.NOT_FOUND, "NO_SUCH_EXECUTOR", message, {"executor": error.name})
        case Draining():
            return ErrorStatus(grpc.StatusCode.UNAVAILABLE, "DRAINING", message)
        case NoExecutor():
            return ErrorStatus(grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR", message)
        case ExecutorLost():
            return ErrorStatus(grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST", message)
        case _:
            message = f"internal error in request {request_id!r}; the scheduler's log has more"
            return ErrorStatus(grpc.StatusCode.INTERNAL, "INTERNAL", message, {"request_id": request_id})


def is_ours(error: Exception) -> bool:
    """Not in the table: a fault to log with its traceback."""
    return status_of(error).code is grpc.StatusCode.INTERNAL


def _field_violation(name: str, description: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=name, description=description)
    return error_details_pb2.BadRequest(field_violations=[violation])


def _duration(seconds: float) -> duration_pb2.Duration:
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
