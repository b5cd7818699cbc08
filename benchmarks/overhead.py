"""What Octavo adds to the model: `python -m benchmarks.overhead [--model smollm2] [--json]`.

Starts an executor and a scheduler as processes, as `octavo serve` does, and prints two ratios of one run:

- first delta: from a request sent (512-token prompt, client connected) to its first delta received, against the model's
  own forward time for that prompt, which the executor measures;
- overhead: from a plan sent to its result received, less the model's forward, at 32 sequences and pipeline depth 1,
  in milliseconds. This engine runs in this process, over the same gRPC stream to the executor's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.client import AsyncClient

from scheduler.core.plan import BatchPlan, StepResult
from scheduler.core.request import SamplingParams
from scheduler.engine import Engine, EngineConfig
from scheduler.executor_client import ExecutorSession
from scheduler.outputs import Submission

PROMPT_TOKENS = 512
NUM_SEQUENCES = 32
NUM_STEPS = 100
REPEATS = 9


@contextmanager
def process(module: str, *arguments: str) -> Iterator[str]:
    """Starts a process of Octavo's and yields its address once it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0", "--exit-with-parent", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if " ready address=" in line:
                yield line.split("address=")[1].strip()
                return
        raise SystemExit(f"{module} ended before it was ready")
    finally:
        child.terminate()
        child.wait()


class Stopwatch:
    """Times each step of a session from plan to result."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float]] = []  # (rows, round trip, forward), seconds
        self._sent: dict[int, tuple[int, float]] = {}

    def watch(self, engine: Engine) -> None:
        executor = engine._executor
        assert executor is not None
        session: ExecutorSession = executor.session
        send, take = session.send, engine._take

        def timed_send(plan: BatchPlan) -> None:
            self._sent[plan.step_id] = (len(plan.row_sequences), time.perf_counter())
            send(plan)

        def timed_take(result: StepResult) -> None:
            rows, sent = self._sent.pop(result.step_id)
            assert result.timings is not None
            self.steps.append((rows, time.perf_counter() - sent, result.timings.forward_ns / 1e9))
            take(result)

        session.send = timed_send  # type: ignore[method-assign]
        engine._take = timed_take  # type: ignore[method-assign]


async def measure_overhead(executor: str) -> dict[str, float]:
    engine = Engine(EngineConfig(executor, pipeline_depth=1))
    running = asyncio.create_task(engine.run())
    while not engine.ready:
        await asyncio.sleep(0.05)
    watch = Stopwatch()
    watch.watch(engine)
    r = random.Random(0)

    async def generate() -> None:
        prompt = tuple(r.randrange(100, 10_000) for _ in range(32))
        async for _ in engine.submit(
            Submission(prompt, 1, None, NUM_STEPS, SamplingParams(temperature=0.0), 0, "", 60.0, "default")
        ):
            pass

    await asyncio.gather(*(generate() for _ in range(NUM_SEQUENCES)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    full = [(trip, forward) for rows, trip, forward in watch.steps if rows == NUM_SEQUENCES]
    overheads = sorted((trip - forward) * 1e3 for trip, forward in full)
    return {
        "steps": len(full),
        "forward_p50_ms": statistics.median(forward for _, forward in full) * 1e3,
        "overhead_p50_ms": statistics.median(overheads),
        "overhead_p99_ms": overheads[int(len(overheads) * 0.99)],
    }


async def measure_prefill(executor: str) -> float:
    """Seconds of forward for the prompt, median of REPEATS."""
    engine = Engine(EngineConfig(executor, pipeline_depth=1, prefix_caching=False))
    running = asyncio.create_task(engine.run())
    while not engine.ready:
        await asyncio.sleep(0.05)
    watch = Stopwatch()
    watch.watch(engine)
    r = random.Random(1)
    times = []
    for _ in range(REPEATS):
        watch.steps.clear()
        prompt = tuple(r.randrange(100, 10_000) for _ in range(PROMPT_TOKENS))
        async for _ in engine.submit(
            Submission(prompt, 1, None, 1, SamplingParams(temperature=0.0), 0, "", 60.0, "default")
        ):
            pass
        times.append(sum(forward for _, _, forward in watch.steps))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return statistics.median(times)


async def measure_first_delta(address: str) -> float:
    """Seconds to the first delta, median of REPEATS."""
    r = random.Random(2)
    times = []
    async with AsyncClient(address) as client:
        for _ in range(REPEATS + 1):
            prompt = [r.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)]
            start = time.perf_counter()
            async for event in client.generate(token_ids=prompt, max_tokens=2, temperature=0, ignore_eos=True):
                if type(event).__name__ == "Delta":
                    times.append(time.perf_counter() - start)
                    break
    return statistics.median(times[1:])  # the first one connects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    with process(
        "executor", "--model", arguments.model, "--dtype", arguments.dtype, "--max-num-batched-tokens", "1024"
    ) as executor:
        figures = asyncio.run(measure_overhead(executor))
        figures["prefill_ms"] = asyncio.run(measure_prefill(executor)) * 1e3
        with process("scheduler", "--executor", executor, "--no-prefix-caching") as scheduler:
            figures["first_delta_ms"] = asyncio.run(measure_first_delta(scheduler)) * 1e3
    figures["first_delta_ratio"] = figures["first_delta_ms"] / figures["prefill_ms"]
    if arguments.json:
        print(json.dumps(figures))
        return
    print(
        f"first delta of a {PROMPT_TOKENS}-token prompt: {figures['first_delta_ms']:.1f} ms, "
        f"{figures['first_delta_ratio']:.2f} x the model's own prefill of {figures['prefill_ms']:.1f} ms"
    )
    print(
        f"plan to result, less forward, {NUM_SEQUENCES} sequences, depth 1: p50 {figures['overhead_p50_ms']:.2f} ms, "
        f"p99 {figures['overhead_p99_ms']:.2f} ms over {figures['steps']} steps (forward p50 "
        f"{figures['forward_p50_ms']:.1f} ms)"
    )


if __name__ == "__main__":
    main()
