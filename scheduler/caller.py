"""Who calls, as far as it was asked: the tenant of a call's token, kept beside the task that answers the call."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from scheduler.statuses import NotPermitted

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a token stands for."""

    tenant: str
    is_admin: bool


# Of the call that the current task answers; None where no tokens are asked for.
current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)


def tenant_of(named: str | None) -> str:
    """The tenant of a request that names one, or none. Raises NotPermitted where it is not the caller's own."""
    caller = current_caller.get()
    if caller is None:
        return named or DEFAULT_TENANT
    if named in (None, caller.tenant):
        return caller.tenant
    if caller.is_admin:
        return str(named)
    raise NotPermitted(f"the token is of tenant {caller.tenant!r}, and the request names {named!r}")
