"""Who owns the executor: at most one scheduler, through one session at a time. Pure; its caller does the I/O.

A lease lives exactly as long as its stream. The wire's rule is "stream open and heard from within 10 s": an idle
scheduler sends nothing, so it is HTTP/2 keepalive that hears it. The server pings each open connection every 5 s and
waits 5 s for the answer; a silent peer's stream ends within those 10 s, and the lease with it.
"""

from __future__ import annotations

from dataclasses import dataclass


class LeaseRefused(Exception):
    """The executor belongs to somebody else."""


class OwnedByOther(LeaseRefused):
    """Another scheduler holds the lease; the message names it."""


class StaleSession(LeaseRefused):
    """The same scheduler has a session as high as this one; the message names both."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A scheduler's session."""

    scheduler_id: str
    session: int


class Lease:
    """The lease of one executor."""

    def __init__(self) -> None:
        self._holder: Holder | None = None

    @property
    def holder(self) -> Holder | None:
        return self._holder

    def acquire(self, holder: Holder) -> Holder | None:
        """Grants the lease; returns the session that loses it, if it was taken over. Raises LeaseRefused."""
        current = self._holder
        if current is not None:
            if current.scheduler_id != holder.scheduler_id:
                raise OwnedByOther(f"this executor is owned by scheduler {current.scheduler_id!r}")
            if holder.session <= current.session:
                raise StaleSession(
                    f"session {holder.session} of scheduler {holder.scheduler_id!r} is not higher than session "
                    f"{current.session}, which is open"
                )
        self._holder = holder
        return current

    def release(self, holder: Holder) -> None:
        """Ends the lease, unless another session has taken it over."""
        if self._holder == holder:
            self._holder = None
