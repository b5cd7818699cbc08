"""What it costs to look inside: `python -m benchmarks.inspection`.

A core with 10,000 blocks and 256 sequences, whose prompts share a beginning, is drawn, made a frame of the page and a
message of gRPC. Each is the best of many runs, in microseconds of the event loop's thread.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from scheduler import messages
from scheduler.core.config import CoreConfig
from scheduler.core.plan import StepResult
from scheduler.core.request import Request
from scheduler.core.scheduler import Scheduler
from scheduler.frame import frame_of
from scheduler.inspection import ExecutorView, Inspection, Owner
from scheduler.outputs import ExecutorLoad, ExecutorState, Load
from scheduler.step_log import KEPT, StepLog

NUM_BLOCKS = 10_000
NUM_SEQUENCES = 256
SHARED_TOKENS, OWN_TOKENS = 320, 256
RUNS = 200


def main() -> None:
    core, log = running_core(), StepLog()
    for _ in range(KEPT):
        step(core, log)
    block_map = core.block_map()
    load = ExecutorLoad("127.0.0.1:50052", "i", ExecutorState.READY, num_blocks=core.num_blocks)

    def inspect() -> Inspection:
        drawn = core.block_map()
        owners = tuple(Owner(f"request-{h.sequence_id:08d}", "default", 0) for h in drawn.holders)
        view = ExecutorView(load.target, drawn, owners, NUM_SEQUENCES, 8192, log.num_sampled_tokens, log.records())
        return Inspection(time.monotonic(), "model", Load((load,)), (view,))

    seen = inspect()
    hidden = seen.without_names()
    held = sum(count > 0 for count in block_map.ref_cnt)
    print(
        f"{core.num_blocks} blocks, {held} held by {core.num_running} sequences, {log.num_sampled_tokens} tokens drawn"
    )
    print(f"| the core's block map | {best(core.block_map):,.0f} µs |")
    print(f"| the whole inspection | {best(inspect):,.0f} µs |")
    print(f"| a frame of the page, once for all viewers | {best(lambda: frame_of(hidden)):,.0f} µs |")
    print(f"| a message of WatchBlocks, for each watcher | {best(lambda: message(seen)):,.0f} µs |")
    print(f"| for comparison: a decode step's plan and result in the core | {best(lambda: step(core, log)):,.0f} µs |")
    print(f"| a frame | {len(frame_of(hidden)):,} bytes |")
    print(f"| a message | {len(message(seen)):,} bytes |")


def message(seen: Inspection) -> bytes:
    return messages.inspection(seen, draining=False).SerializeToString()


def running_core() -> Scheduler:
    """All sequences run, and their prompts are computed."""
    config = CoreConfig(
        num_blocks=NUM_BLOCKS + 1,
        block_size=16,
        max_num_seqs=NUM_SEQUENCES,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        pipeline_depth=1,
    )
    core, draw = Scheduler(config, itertools.count(10**6).__next__), random.Random(1)
    shared = tuple(draw.randrange(50_000) for _ in range(SHARED_TOKENS))
    for number in range(1, NUM_SEQUENCES + 1):
        own = tuple(draw.randrange(50_000) for _ in range(OWN_TOKENS))
        core.add(Request((number,), shared + own, max_tokens=3000, arrival=number))
    while core.num_waiting or core.num_tokens_to_compute > core.num_running:
        step(core, StepLog())
    return core


def step(core: Scheduler, log: StepLog) -> None:
    plan = core.schedule()
    assert plan is not None
    log.sent(plan, 0.0)
    result = StepResult(plan.step_id, tokens=[(sequence_id, 7) for sequence_id in plan.row_sequences])
    core.update(result)
    log.answered(result, 0.05)


def best(work: Callable[[], object]) -> float:
    """Microseconds."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


if __name__ == "__main__":
    main()
