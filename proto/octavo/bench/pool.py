"""What a server's KV cache did during a run, from the loads that it told of.

Counters are differences to the load before the run, for each executor by its incarnation; one that joins later began
at nothing. Other clients' requests count too: the server does not say whose a block is. What paging wastes is known
only at moments when everything that runs is ours and decodes, and only if nothing was shared; the client then holds
tokens that the server may have not yet, or the other way round, by a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.results import ExecutorState, Load


@dataclass(frozen=True, slots=True)
class Own:
    """Our requests at one moment."""

    num_decoding: int  # that have a token and have not ended
    num_tokens: int  # of those, prompt and output


@dataclass(frozen=True, slots=True)
class Sample:
    """One load, all executors together."""

    time: float  # seconds
    used: float  # share of the blocks that sequences hold
    num_running: int
    num_waiting: int  # on executors and in the queue


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Shares in [0, 1]; None where it cannot be known."""

    mean_used: float | None
    peak_used: float | None
    hit_rate: float | None  # of the prompt tokens that were looked up
    waste: float | None  # of the slots of the blocks that sequences hold; an upper bound
    num_preemptions: int


class PoolWatch:
    """Takes loads in the order in which they came; the first is that before the run."""

    def __init__(self, before: Load, block_size: int) -> None:
        self.samples: list[Sample] = []
        self._block_size = block_size
        self._first = _counters(before)
        self._last = dict(self._first)
        self._wastes: list[float] = []

    def add(self, load: Load, own: Own, time: float) -> None:
        """A load during the run, and what we had under way when it came."""
        self.count(load)
        ready = [e for e in load.executors if e.state is ExecutorState.READY]
        total = sum(e.num_blocks for e in ready)
        if not total:
            return
        used = total - sum(e.num_free_blocks for e in ready)
        running = sum(e.num_running for e in ready)
        waiting = load.queue_length + sum(e.num_waiting for e in ready)
        self.samples.append(Sample(time, used / total, running, waiting))
        if used and not waiting and running == own.num_decoding:
            self._wastes.append(max(0.0, 1 - own.num_tokens / (used * self._block_size)))

    def count(self, load: Load) -> None:
        """A load after the run: its counters are of interest, its blocks are not."""
        self._last.update(_counters(load))

    def use(self) -> PoolUse:
        queries, hits, preemptions = (self._gained(index) for index in range(3))
        shares = [sample.used for sample in self.samples]
        return PoolUse(
            mean_used=sum(shares) / len(shares) if shares else None,
            peak_used=max(shares, default=None),
            hit_rate=hits / queries if queries else None,
            waste=sum(self._wastes) / len(self._wastes) if self._wastes and not hits else None,
            num_preemptions=preemptions,
        )

    def _gained(self, index: int) -> int:
        nothing = (0, 0, 0)
        return sum(last[index] - self._first.get(name, nothing)[index] for name, last in self._last.items())


def _counters(load: Load) -> dict[str, tuple[int, int, int]]:
    return {e.incarnation: (e.prefix_queries, e.prefix_hits, e.num_preemptions) for e in load.executors}
