"""What Octavo adds to the model: `python -m benchmarks.overhead [--model smollm2] [--json]`.

Starts an executor as a process and runs the scheduler in this one; they talk over the same gRPC stream as ever. Prints,
of one run:

- first delta: from a request sent by a connected client (512-token prompt) to its first delta received, against the
  model's own forward time for that prompt, which the executor measures;
- overhead: from a plan sent to its result received, less the model's forward, at 32 sequences and pipeline depth 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import structlog
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.client import AsyncClient, Delta

from scheduler.config import SchedulerConfig
from scheduler.core.plan import BatchPlan, StepResult, TokenEvent
from scheduler.core.request import SamplingParams
from scheduler.engine import Engine, EngineConfig
from scheduler.executor_client import ExecutorSession
from scheduler.fleet import FleetConfig, Member
from scheduler.outputs import Submission
from scheduler.server import Server

PROMPT_TOKENS = 512
NUM_SEQUENCES = 32
NUM_STEPS = 100
REPEATS = 9


@contextmanager
def process(module: str, *arguments: str) -> Iterator[str]:
    """Starts a process of Octavo's and yields its address once it is ready."""
    port = free_port()
    child = subprocess.Popen(
        [sys.executable, "-m", module, "--port", str(port), "--exit-with-parent", "--log-level", "warning", *arguments],
        stdout=subprocess.DEVNULL,
    )
    address = f"127.0.0.1:{port}"
    try:
        wait_ready(address, child)
        yield address
    finally:
        child.terminate()
        child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(address: str, child: subprocess.Popen[bytes]) -> None:
    """Asks for its health until it serves."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while child.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.1)
    raise SystemExit(f"{child.args[2]} ended before it was ready")  # type: ignore[index]


class Stopwatch:
    """Times each step of a session from plan to result."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float]] = []  # (rows, round trip, forward), seconds
        self._sent: dict[int, tuple[int, float]] = {}

    def watch(self, engine: Engine) -> None:
        (member,) = engine.members.values()
        session: ExecutorSession = member.session
        send, take = session.send, engine.answered

        def timed_send(plan: BatchPlan) -> None:
            self._sent[plan.step_id] = (len(plan.row_sequences), time.perf_counter())
            send(plan)

        def timed_take(member: Member, result: StepResult) -> Sequence[TokenEvent]:
            rows, sent = self._sent.pop(result.step_id)
            assert result.timings is not None
            self.steps.append((rows, time.perf_counter() - sent, result.timings.forward_ns / 1e9))
            return take(member, result)

        session.send = timed_send  # type: ignore[method-assign]
        engine.answered = timed_take  # type: ignore[method-assign]


async def measure_overhead(executor: str) -> dict[str, float]:
    engine = Engine(EngineConfig(FleetConfig((executor,), pipeline_depth=1)))
    running = asyncio.create_task(engine.run())
    while not engine.ready:  # noqa: ASYNC110
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


async def measure_first_delta(executor: str) -> dict[str, float]:
    """Medians over REPEATS requests, each delta paired with the forward time of its own prompt."""
    engine = Engine(EngineConfig(FleetConfig((executor,), prefix_caching=False)))
    server = Server(SchedulerConfig(executors=(executor,), port=0), engine)
    await server.start()
    serving = asyncio.create_task(server.run())
    while not engine.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    watch = Stopwatch()
    watch.watch(engine)
    r = random.Random(2)
    pairs = []
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        for _ in range(REPEATS + 1):
            watch.steps.clear()
            prompt = [r.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)]
            start = time.perf_counter()
            async for event in client.generate(token_ids=prompt, max_tokens=1, temperature=0, ignore_eos=True):
                if isinstance(event, Delta):
                    delta = time.perf_counter() - start
            pairs.append((delta, sum(forward for _, _, forward in watch.steps)))
    server.stop()
    await serving
    pairs = pairs[1:]  # the first one connects
    return {
        "prefill_ms": statistics.median(forward for _, forward in pairs) * 1e3,
        "first_delta_ms": statistics.median(delta for delta, _ in pairs) * 1e3,
        "first_delta_ratio": statistics.median(delta / forward for delta, forward in pairs),
    }


async def measure(executor: str) -> dict[str, float]:
    return await measure_overhead(executor) | await measure_first_delta(executor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with process(
        "executor", "--model", arguments.model, "--dtype", arguments.dtype, "--max-num-batched-tokens", "1024"
    ) as executor:
        figures = uvloop.run(measure(executor))
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
