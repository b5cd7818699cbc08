"""What one step costs the core: `schedule()` and `update()` in a steady decode, against sequences and against blocks.

    python -m benchmarks.core [--json] [--steps N] [--profile]

Every sequence decodes one token a step at pipeline depth 2, as it does in service; a sixteenth of them begin a block in
any one step. The executor is none at all, so the time is the scheduler's alone. Microseconds, of both calls together.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import sys
import time
from collections import deque
from typing import NamedTuple

from benchmarks.null_executor import NullExecutor
from scheduler.core.config import CoreConfig
from scheduler.core.plan import BatchPlan
from scheduler.core.request import Request, SamplingParams
from scheduler.core.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT = 32  # tokens, and up to one block more, so that blocks do not fill all at once
SEQUENCES = (16, 64, 256, 1024)
BLOCKS = (10_000, 1_000_000)


class Row(NamedTuple):
    """Microseconds of schedule() and update() together, for one step."""

    sequences: int
    blocks: int
    p50_us: float
    p99_us: float
    schedule_p50_us: float
    update_p50_us: float


class Steady:
    """A core whose sequences all decode, one plan always in flight."""

    def __init__(self, num_seqs: int, num_blocks: int, num_steps: int) -> None:
        config = CoreConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(2048, num_seqs),
            max_model_len=PROMPT + 2 * BLOCK_SIZE + 2 * num_steps,
        )
        self.core = Scheduler(config, itertools.count(1_000_000).__next__)
        self.executor = NullExecutor()
        self.plans: deque[BatchPlan] = deque()
        for i in range(1, num_seqs + 1):
            prompt = (i, *range(1, PROMPT + i % BLOCK_SIZE))
            sampling = SamplingParams(stop_token_ids=frozenset([0]))
            self.core.add(Request((i,), prompt, max_tokens=2 * num_steps, sampling=sampling, arrival=i))
        while self.core.num_waiting:
            self.step()
        for _ in range(20):
            self.step()

    def step(self) -> tuple[int, int]:
        """Nanoseconds of schedule() and of update()."""
        began = time.perf_counter_ns()
        plan = self.core.schedule()
        scheduled = time.perf_counter_ns() - began
        if plan is not None:
            self.plans.append(plan)
        if len(self.plans) < 2:
            return scheduled, 0
        result = self.executor.run(self.plans.popleft())
        began = time.perf_counter_ns()
        self.core.update(result)
        return scheduled, time.perf_counter_ns() - began


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(num_seqs: int, num_blocks: int, num_steps: int) -> Row:
    steady = Steady(num_seqs, num_blocks, num_steps + 50)
    times = [steady.step() for _ in range(num_steps)]
    schedule, update = ([t[i] / 1000 for t in times] for i in (0, 1))
    both = [a + b for a, b in zip(schedule, update, strict=True)]
    return Row(
        num_seqs,
        num_blocks,
        round(percentile(both, 0.5), 1),
        round(percentile(both, 0.99), 1),
        round(percentile(schedule, 0.5), 1),
        round(percentile(update, 0.5), 1),
    )


def profile(num_seqs: int, num_steps: int) -> None:
    steady = Steady(num_seqs, 10_000, num_steps + 50)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        steady.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(20)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON with all rows")
    parser.add_argument("--steps", type=int, default=300, help="steps measured for each row (default 300)")
    parser.add_argument("--profile", action="store_true", help="show where 256 sequences spend their time, and stop")
    options = parser.parse_args()
    if options.profile:
        profile(256, options.steps)
        return
    rows = []
    for num_seqs, num_blocks in itertools.product(SEQUENCES, BLOCKS):
        room = num_blocks * BLOCK_SIZE // num_seqs - PROMPT - 4 * BLOCK_SIZE  # so that nobody is preempted
        rows.append(measure(num_seqs, num_blocks, min(options.steps, room)))
        if not options.json:
            if len(rows) == 1:
                print(("{:>12}" * len(Row._fields)).format(*Row._fields))
            print(("{:>12}" * len(Row._fields)).format(*rows[-1]), flush=True)
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
