"""The real scheduler core under a queue that is never empty: who runs, and what of the memory is useful.

Requests are given to the core before it has room for them, so that memory alone decides how many run. It knows nothing
of their lengths. The executor computes nothing: time is counted in steps, in which every running request gets a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.paper.executor import MirrorExecutor
from benchmarks.paper.lengths import MAX_MODEL_LEN, Lengths
from scheduler.core.config import CoreConfig
from scheduler.core.plan import TokenEvent
from scheduler.core.request import Request
from scheduler.core.scheduler import Scheduler

_QUEUE = 8  # requests that wait in the core, at least
_SAMPLE_EVERY = 20  # steps


class PagedUse(NamedTuple):
    """Means over the steps of a run."""

    requests: float
    useful: float  # share of all slots that hold K/V
    useful_of_held: float  # share of the slots in blocks that sequences hold: the rest is what paging wastes
    preemptions: int
    recomputed: float  # share of all computed tokens
    saved: float  # share of the blocks that would be needed without sharing
    copies: int  # blocks copied on write


class Saturated:
    """A core that never lacks work."""

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        coming: Iterator[Lengths],
        *,
        samples: int = 1,
        beam_width: int | None = None,
        seed: int = 0,
        max_num_seqs: int = 1024,
    ) -> None:
        config = CoreConfig(
            num_blocks=num_slots // block_size + 1,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=4096,
            max_model_len=MAX_MODEL_LEN,
            pipeline_depth=1,
            prefix_caching=False,
        )
        self.core = Scheduler(config, itertools.count(1_000_000_000).__next__)
        self.executor = MirrorExecutor(seed)
        self._coming = coming
        self._arrivals = itertools.count()
        self._ids = itertools.count(1)
        self._samples = samples
        self._beam_width = beam_width

    def step(self) -> list[TokenEvent]:
        while self.core.num_waiting < _QUEUE:
            lengths = next(self._coming)
            ids = tuple(itertools.islice(self._ids, self._samples))
            self.core.add(
                Request(
                    ids,
                    (1,) * lengths.prompt,
                    max_tokens=lengths.output,
                    beam_width=self._beam_width,
                    arrival=next(self._arrivals),
                )
            )
        plan = self.core.schedule()
        assert plan is not None, "there is always work"
        return self.core.update(self.executor.run(plan))


def run(system: Saturated, num_steps: int, warm_steps: int) -> PagedUse:
    """The first steps, while memory fills, do not count."""
    for _ in range(warm_steps):
        system.step()
    core = system.core
    num_slots = core.num_blocks * core.config.block_size
    computed, recomputed = core.counters.computed_tokens, core.counters.recomputed_tokens
    preemptions, copies = core.counters.preemptions, system.executor.num_copies
    requests = held = wasted = apart = together = samples = 0
    for step in range(num_steps):
        system.step()
        requests += core.num_running
        if step % _SAMPLE_EVERY == 0:
            allocated, waste = core.slot_usage()
            held, wasted, samples = held + allocated, wasted + waste, samples + 1
            blocks, distinct = system.executor.count_blocks()
            apart, together = apart + blocks, together + distinct
    return PagedUse(
        requests=requests / num_steps,
        useful=(held - wasted) / (samples * num_slots),
        useful_of_held=1 - wasted / held,
        preemptions=core.counters.preemptions - preemptions,
        recomputed=(core.counters.recomputed_tokens - recomputed) / (core.counters.computed_tokens - computed),
        saved=1 - together / apart,
        copies=system.executor.num_copies - copies,
    )
