"""How much of a shared prompt the prefix cache finds, by block size: only whole blocks are shared.

Groups of requests begin with the same system prompt, of a length that is no multiple of anything, and run one after the
other through the real core. What could be found is the prompt's length, for each request but the first of a group.
"""

from __future__ import annotations

import itertools
import random

from benchmarks.paper.executor import MirrorExecutor
from scheduler.core.config import CoreConfig
from scheduler.core.request import Request
from scheduler.core.scheduler import Scheduler

_GROUP = 4  # requests with one system prompt
_TAIL = 40  # tokens of each request's own


def found_share(num_slots: int, block_size: int, lengths: range, num_groups: int, seed: int) -> float:
    """Of the prompt tokens that an earlier request had, those found in the cache."""
    r = random.Random(seed)
    config = CoreConfig(
        num_blocks=num_slots // block_size + 1,
        block_size=block_size,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        pipeline_depth=1,
    )
    core, executor = Scheduler(config, itertools.count(1_000_000).__next__), MirrorExecutor()
    sharable, number = 0, 0
    for _ in range(num_groups):
        head = tuple(r.choices(range(100, 49_000), k=r.choice(lengths)))
        sharable += len(head) * (_GROUP - 1)
        for _ in range(_GROUP):
            number += 1
            prompt = head + tuple(r.choices(range(100, 49_000), k=_TAIL))
            core.add(Request((number,), prompt, max_tokens=2, arrival=number))
            while (plan := core.schedule()) is not None:
                core.update(executor.run(plan))
    return core.counters.prefix_hits / sharable
