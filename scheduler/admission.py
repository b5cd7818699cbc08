"""The one queue before the cores, bounded in requests and in tokens of KV demand.

Ordered by priority; then come those that had their turn before and lost their executor; then by what the tenant was
served for its weight; then by arrival. A pure data structure: time comes in as an argument, items are the caller's own
and only hashed. What is refused learns when room is likely, from the rate at which demand was served lately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from scheduler.fair_share import FairShare, Tenant
from scheduler.outputs import QueueFull
from scheduler.ranking import Ranking

ItemT = TypeVar("ItemT", bound=Hashable)

RATE_WINDOW_SECONDS = 30.0
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[ItemT]):
    item: ItemT
    tokens: int
    place: tuple[int, int]  # arrival; then the order of coming in, for outputs of one request that come back singly
    deadline: float
    line: _Line[ItemT]


class _Line(Generic[ItemT]):
    """Requests of one tenant and one priority, in order of arrival. Never empty between calls."""

    def __init__(self, priority: int, tenant: Tenant, returned: bool) -> None:
        self.priority = priority
        self.tenant = tenant
        self.returned = returned  # they had their turn before
        self.entries: Ranking[_Entry[ItemT]] = Ranking(lambda entry: entry.place)

    @property
    def head(self) -> _Entry[ItemT]:
        first = self.entries.first()
        assert first is not None
        return first

    def rank(self) -> tuple[int, bool, float, tuple[int, int]]:
        return (self.priority, not self.returned, self.tenant.served, self.head.place)


class WaitingClass(NamedTuple, Generic[ItemT]):
    """Requests that wait for the same reason: that of their head."""

    tenant: str
    priority: int
    num_requests: int
    head: ItemT


class AdmissionQueue(Generic[ItemT]):
    """Requests accepted and not yet given to a core."""

    def __init__(self, max_requests: int, max_tokens: int, weights: Mapping[str, float] | None = None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0  # KV demand of all that wait
        self._entries: dict[ItemT, _Entry[ItemT]] = {}
        self._lines: dict[tuple[str, int, bool], _Line[ItemT]] = {}  # by tenant, priority, and whether they returned
        self._order: Ranking[_Line[ItemT]] = Ranking(_Line.rank)
        self._deadlines: Ranking[_Entry[ItemT]] = Ranking(lambda entry: (entry.deadline, entry.place))
        self._serials = itertools.count()
        self._shares = FairShare(weights or {})
        self._rate = _ServiceRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ItemT]:
        """In no particular order."""
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def push(
        self,
        item: ItemT,
        *,
        tokens: int,
        priority: int,
        arrival: int,
        deadline: float,
        now: float,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Takes `item` in, with a KV demand of `tokens`, to wait until `deadline`.

        Raises QueueFull. An empty queue takes any single request, however large.
        """
        if len(self._entries) >= self.max_requests:
            raise QueueFull(f"{self.max_requests} requests wait", self.retry_after(now))
        if self._entries and self.num_tokens + tokens > self.max_tokens:
            limit = f"{self.num_tokens} tokens wait, {tokens} more exceed {self.max_tokens}"
            raise QueueFull(limit, self.retry_after(now, tokens))
        self._take(item, tokens, priority, arrival, deadline, tenant, returned=False)

    def put_back(
        self,
        item: ItemT,
        *,
        tokens: int,
        priority: int,
        arrival: int,
        deadline: float,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Takes in what had its turn before: the bounds do not apply."""
        self._take(item, tokens, priority, arrival, deadline, tenant, returned=True)

    def _take(
        self, item: ItemT, tokens: int, priority: int, arrival: int, deadline: float, tenant: str, *, returned: bool
    ) -> None:
        assert item not in self._entries
        account = self._shares.enter(tenant)
        line = self._lines.get((tenant, priority, returned))
        if line is None:
            line = self._lines[tenant, priority, returned] = _Line(priority, account, returned)
        entry = self._entries[item] = _Entry(item, tokens, (arrival, next(self._serials)), deadline, line)
        self.num_tokens += tokens
        line.entries.put(entry)
        self._order.put(line)
        self._deadlines.put(entry)

    def peek(self) -> ItemT | None:
        """The next to be served."""
        line = self._order.first()
        return None if line is None else line.head.item

    def pop(self) -> ItemT:
        item = self.peek()
        if item is None:
            raise IndexError("the queue is empty")
        self.remove(item)
        return item

    def remove(self, item: ItemT) -> bool:
        """False: it does not wait."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        self.num_tokens -= entry.tokens
        line = entry.line
        line.entries.discard(entry)
        self._deadlines.discard(entry)
        if not line.entries:
            self._order.discard(line)
            del self._lines[line.tenant.name, line.priority, line.returned]
        self._shares.leave(line.tenant)
        return True

    def expire(self, now: float) -> list[ItemT]:
        """Removes and returns those whose deadline has come, the earliest first."""
        expired = []
        while (entry := self._deadlines.first()) is not None and entry.deadline <= now:
            self.remove(entry.item)
            expired.append(entry.item)
        return expired

    def classes(self) -> list[WaitingClass[ItemT]]:
        """All that wait, by tenant and priority, in the order in which their heads would be served."""
        lines = sorted(self._lines.values(), key=_Line.rank)
        return [WaitingClass(line.tenant.name, line.priority, len(line.entries), line.head.item) for line in lines]

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were computed for this tenant: its requests fall back behind those of others."""
        self._shares.charge(tenant, tokens)

    def record_served(self, tokens: int, now: float) -> None:
        """A demand of so many tokens, in the measure of `push`, is over: what held room for it can take another."""
        self._rate.record(tokens, now)

    def retry_after(self, now: float, tokens: int = 0) -> float:
        """Seconds until a request of so many tokens likely finds room."""
        rate = self._rate.tokens_per_second(now)
        if rate is None:
            return MIN_RETRY_SECONDS
        average = self.num_tokens / max(1, len(self._entries))
        excess = max(self.num_tokens + tokens - self.max_tokens, average)
        if rate * MAX_RETRY_SECONDS <= excess:
            return MAX_RETRY_SECONDS
        return max(MIN_RETRY_SECONDS, excess / rate)


class _ServiceRate:
    """Tokens per second over about the last RATE_WINDOW_SECONDS, older ones counting exponentially less."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last: float | None = None

    def record(self, tokens: int, now: float) -> None:
        self._decay(now)
        self._tokens += tokens

    def tokens_per_second(self, now: float) -> float | None:
        """None before there is something to measure."""
        if self._last is None:
            return None
        self._decay(now)
        return self._tokens / self._seconds if self._seconds > 0 else None

    def _decay(self, now: float) -> None:
        if self._last is not None:
            kept = math.exp(-max(0.0, now - self._last) / RATE_WINDOW_SECONDS)
            self._tokens *= kept
            self._seconds = self._seconds * kept + RATE_WINDOW_SECONDS * (1 - kept)
        self._last = now
