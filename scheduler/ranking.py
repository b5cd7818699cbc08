"""Who comes first, among things that come, go and fall behind.

A heap in which a member's key may rise without notice: it is asked for again when the member reaches the top, so that
a tenant that was served costs nothing until its turn is looked for. Every operation takes O(log n), spread over many.
Invariant: the key that the heap holds of a member is never above the one that it has now.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

MemberT = TypeVar("MemberT")

SLACK = 64  # entries of members that left, beyond as many as there are members, before they are cleared away


class Ranking(Generic[MemberT]):
    """Members, least key first. No two members ever have equal keys."""

    def __init__(self, key: Callable[[MemberT], tuple[Any, ...]]) -> None:
        self._key = key
        self._keys: dict[MemberT, tuple[Any, ...]] = {}  # as the heap holds them
        self._heap: list[tuple[tuple[Any, ...], MemberT]] = []  # an entry counts if its key is the very one in `_keys`

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, member: MemberT) -> None:
        """Takes it in, or learns that its key may have fallen."""
        key = self._key(member)
        if member not in self._keys or key < self._keys[member]:
            self._keys[member] = key
            heapq.heappush(self._heap, (key, member))

    def discard(self, member: MemberT) -> None:
        self._keys.pop(member, None)
        if len(self._heap) > 2 * len(self._keys) + SLACK:
            self._heap = [entry for entry in self._heap if self._keys.get(entry[1]) is entry[0]]
            heapq.heapify(self._heap)

    def first(self) -> MemberT | None:
        while self._heap:
            key, member = self._heap[0]
            if self._keys.get(member) is not key:
                heapq.heappop(self._heap)
                continue
            now = self._key(member)
            if now == key:
                return member
            self._keys[member] = now
            heapq.heapreplace(self._heap, (now, member))
        return None
