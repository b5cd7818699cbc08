"""The one queue before the cores, bounded in requests and in tokens of KV demand.

Ordered by priority, then arrival. A pure data structure: time comes in as an argument, items are the caller's own and
only hashed. What is refused learns when room is likely, from the rate at which tokens were served lately.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler.outputs import QueueFull

ItemT = TypeVar("ItemT", bound=Hashable)

RATE_WINDOW_SECONDS = 30.0
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[ItemT]):
    item: ItemT
    tokens: int


class AdmissionQueue(Generic[ItemT]):
    """Requests accepted and not yet given to a core."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0  # KV demand of all that wait
        self._entries: dict[ItemT, _Entry[ItemT]] = {}
        # Heaps may name entries that left: an entry counts only while `_entries` holds it, it and no equal one.
        self._order: list[tuple[int, int, _Entry[ItemT]]] = []
        self._deadlines: list[tuple[float, int, _Entry[ItemT]]] = []
        self._rate = _ServiceRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ItemT]:
        """In no particular order."""
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def push(self, item: ItemT, *, tokens: int, priority: int, arrival: int, deadline: float, now: float) -> None:
        """Takes `item` in, with a KV demand of `tokens`, to wait until `deadline`; `arrival` is unique.

        Raises QueueFull. An empty queue takes any single request, however large.
        """
        assert item not in self._entries
        if len(self._entries) >= self.max_requests:
            raise QueueFull(f"{self.max_requests} requests wait", self.retry_after(now))
        if self._entries and self.num_tokens + tokens > self.max_tokens:
            limit = f"{self.num_tokens} tokens wait, {tokens} more exceed {self.max_tokens}"
            raise QueueFull(limit, self.retry_after(now, tokens))
        self.put_back(item, tokens=tokens, priority=priority, arrival=arrival, deadline=deadline)

    def put_back(self, item: ItemT, *, tokens: int, priority: int, arrival: int, deadline: float) -> None:
        """Takes in what was accepted before: the bounds do not apply."""
        entry = _Entry(item, tokens)
        self._entries[item] = entry
        self.num_tokens += tokens
        heapq.heappush(self._order, (priority, arrival, entry))
        heapq.heappush(self._deadlines, (deadline, arrival, entry))

    def peek(self) -> ItemT | None:
        """The next to be served."""
        while self._order and not self._waits(self._order[0][2]):
            heapq.heappop(self._order)
        return self._order[0][2].item if self._order else None

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
        if len(self._order) > 2 * len(self._entries) + 64:
            self._order = [place for place in self._order if self._waits(place[2])]
            heapq.heapify(self._order)
        if len(self._deadlines) > 2 * len(self._entries) + 64:
            self._deadlines = [place for place in self._deadlines if self._waits(place[2])]
            heapq.heapify(self._deadlines)
        return True

    def expire(self, now: float) -> list[ItemT]:
        """Removes and returns those whose deadline has come, the earliest first."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._waits(self._deadlines[0][2])):
            entry = heapq.heappop(self._deadlines)[2]
            if self._waits(entry):
                self.remove(entry.item)
                expired.append(entry.item)
        return expired

    def next_deadline(self) -> float | None:
        while self._deadlines and not self._waits(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def record_served(self, tokens: int, now: float) -> None:
        """So many tokens of demand left the queue for good, or were computed: the caller's choice, but always one."""
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

    def _waits(self, entry: _Entry[ItemT]) -> bool:
        return self._entries.get(entry.item) is entry


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
