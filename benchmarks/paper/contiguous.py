"""Systems that keep a request's K/V in one piece, reserved when it begins: the paper's baselines (section 6.1).

Max reserves the longest sequence that the model allows, Pow2 at most twice the output that will come, Oracle exactly
what will come (which nobody can know). Where the piece lies is found first fit, or by a buddy allocator, which rounds a
piece up to a power of two: the paper supposes the latter of Orca. Both are written for clearness, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from benchmarks.paper.lengths import MAX_MODEL_LEN, Lengths

Rule = Callable[[Lengths], int]  # slots to reserve


def reserve_max(lengths: Lengths) -> int:
    return MAX_MODEL_LEN


def reserve_pow2(lengths: Lengths) -> int:
    return min(MAX_MODEL_LEN, lengths.prompt + _power_of_two(lengths.output))


def reserve_oracle(lengths: Lengths) -> int:
    return lengths.prompt + lengths.output


RULES: dict[str, Rule] = {"Orca (Max)": reserve_max, "Orca (Pow2)": reserve_pow2, "Orca (Oracle)": reserve_oracle}


class Allocator(Protocol):
    def allocate(self, size: int) -> int | None:
        """Where a piece of so many slots begins; None: there is no room for it."""

    def free(self, start: int) -> None:
        """Gives the piece that begins there back."""


class FirstFit:
    """The first hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._pieces: list[tuple[int, int]] = []  # (start, end), ascending

    def allocate(self, size: int) -> int | None:
        start = 0
        for index, (begin, end) in enumerate([*self._pieces, (self._num_slots, self._num_slots)]):
            if begin - start >= size:
                self._pieces.insert(index, (start, start + size))
                return start
            start = end
        return None

    def free(self, start: int) -> None:
        self._pieces = [piece for piece in self._pieces if piece[0] != start]


class Buddy:
    """Powers of two; a piece is split in halves until it is just large enough, and halves are joined again."""

    def __init__(self, num_slots: int) -> None:
        self._holes: dict[int, set[int]] = {}  # size -> where
        self._sizes: dict[int, int] = {}  # of what is given out
        start, size = 0, 1 << (num_slots.bit_length() - 1)
        while size:  # the memory as powers of two, the largest first, so that each is aligned to its size
            if num_slots & size:
                self._holes.setdefault(size, set()).add(start)
                start += size
            size >>= 1

    def allocate(self, size: int) -> int | None:
        wanted = _power_of_two(size)
        found = min((have for have, holes in self._holes.items() if holes and have >= wanted), default=None)
        if found is None:
            return None
        start = min(self._holes[found])
        self._holes[found].remove(start)
        while found > wanted:
            found //= 2
            self._holes.setdefault(found, set()).add(start + found)
        self._sizes[start] = wanted
        return start

    def free(self, start: int) -> None:
        size = self._sizes.pop(start)
        while (buddy := start ^ size) in self._holes.get(size, ()):
            self._holes[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        self._holes.setdefault(size, set()).add(start)


class Use(NamedTuple):
    """Means over the steps of a run, as shares of all slots, but for the number of requests."""

    requests: float
    useful: float  # slots that hold K/V
    coming: float  # reserved, and filled before the request ends
    never: float  # reserved, and never filled
    outside: float  # in no reservation: holes, and what rounding takes


class _Running(NamedTuple):
    lengths: Lengths
    start: int
    reserved: int
    since: int  # step


def run(
    num_slots: int,
    rule: Rule,
    allocator: Callable[[int], Allocator],
    coming: Iterator[Lengths],
    num_steps: int,
    warm_steps: int,
) -> Use:
    """A queue that is never empty, served in order: the head is admitted as soon as there is a piece for it. Each step
    gives every running request one token. The first steps, while memory fills, do not count."""
    memory = allocator(num_slots)
    running: list[_Running] = []
    head = next(coming)
    requests = useful = ahead = never = 0
    for step in range(num_steps + warm_steps):
        while (start := memory.allocate(rule(head))) is not None:
            running.append(_Running(head, start, rule(head), step))
            head = next(coming)
        if step >= warm_steps:
            requests += len(running)
            for lengths, _, reserved, since in running:
                filled = lengths.prompt + step - since
                useful += filled
                ahead += sum(lengths) - filled
                never += reserved - sum(lengths)
        going_on = []
        for one in running:
            if step + 1 - one.since < one.lengths.output:
                going_on.append(one)
            else:
                memory.free(one.start)
        running = going_on
    total = num_slots * num_steps
    outside = 1 - (useful + ahead + never) / total
    return Use(requests / num_steps, useful / total, ahead / total, never / total, outside)


def _power_of_two(size: int) -> int:
    """The smallest that is not less."""
    return 1 << (size - 1).bit_length()
