"""How many executors one scheduler keeps busy: `python -m benchmarks.scale [--step-ms 20 50 100 200] [--json]`.

Simulated executors share one process, clients another, and the scheduler has its own; all on this machine. Each
executor runs 64 sequences, each of them the stream of a client. For each step time the number of executors grows until
the median interval between an executor's steps exceeds 1.1 x the step time. Printed for each number: that interval,
steps per second, the scheduler's CPU time for each step, and how busy the three processes were: the one near 100 % of
a core, or all of them together near the machine's cores, is what saturates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.client import AsyncClient, ExecutorState, Load

from benchmarks.overhead import free_port

NUM_SEQUENCES = 64  # of one executor
MEASURED = 8.0  # seconds
TOLERANCE = 1.1
STEP_TIMES = (20.0, 50.0, 100.0, 200.0)
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128)
PATIENCE = 90.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one number of executors at one step time. CPU in shares of one core."""

    step_ms: float
    executors: int
    interval_ms: float  # median over the steps of all executors
    interval_p99_ms: float
    steps_per_second: float
    scheduler_us_per_step: float
    scheduler: float
    executor_process: float
    clients: float

    @property
    def keeps_pace(self) -> bool:
        return self.interval_ms <= TOLERANCE * self.step_ms


@contextlib.contextmanager
def child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def intervals(executors: subprocess.Popen[str]) -> list[float]:
    """Of all steps since this was last asked, in seconds."""
    assert executors.stdin is not None
    assert executors.stdout is not None
    executors.stdin.write("\n")
    executors.stdin.flush()
    found: list[float] = json.loads(executors.stdout.readline())
    return found


async def wait_load(client: AsyncClient, count: int, sequences: int) -> None:
    """Until so many executors are ready, and each runs so many sequences."""

    def reached(load: Load) -> bool:
        ready = [e for e in load.executors if e.state is ExecutorState.READY]
        return len(ready) == count and all(e.num_running >= sequences for e in ready)

    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(Exception):  # it may not listen yet
                if reached(await client.load(timeout=10)) and await client.health(timeout=10):
                    return
            await asyncio.sleep(0.2)


async def measure(step_ms: float, count: int) -> Figures:
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        executors = stack.enter_context(child("benchmarks.simulated_fleet", str(count), f"{step_ms:g}"))
        assert executors.stdout is not None
        addresses = ",".join(json.loads(executors.stdout.readline()))
        scheduler = stack.enter_context(
            child(
                "scheduler",
                f"--executors={addresses}",
                f"--port={port}",
                "--log-level=error",
                "--max-queue-requests=9999",
                "--max-queue-tokens=99999999",
            )
        )
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            await wait_load(client, count, 0)
            length = str(min(4000, int(60_000 / step_ms) + 500))
            clients = stack.enter_context(
                child("benchmarks.streams", f"127.0.0.1:{port}", str(NUM_SEQUENCES * count), length)
            )
            await wait_load(client, count, NUM_SEQUENCES)
        await asyncio.sleep(1 + 4 * step_ms / 1e3)
        processes = (scheduler, executors, clients)
        intervals(executors)
        before, began = [cpu_seconds(process) for process in processes], time.monotonic()
        await asyncio.sleep(MEASURED)
        found = sorted(intervals(executors))
        seconds = time.monotonic() - began
        used = [cpu_seconds(process) - cpu for process, cpu in zip(processes, before, strict=True)]
    return Figures(
        step_ms=step_ms,
        executors=count,
        interval_ms=statistics.median(found) * 1e3,
        interval_p99_ms=found[int(len(found) * 0.99)] * 1e3,
        steps_per_second=len(found) / seconds,
        scheduler_us_per_step=used[0] / len(found) * 1e6,
        scheduler=used[0] / seconds,
        executor_process=used[1] / seconds,
        clients=used[2] / seconds,
    )


def climb(step_ms: float, ladder: Sequence[int]) -> Iterator[Figures]:
    """Up to the first number that does not keep pace."""
    for count in ladder:
        figures = asyncio.run(measure(step_ms, count))
        yield figures
        if not figures.keeps_pace:
            return


def line(f: Figures) -> str:
    return (
        f"{f.step_ms:>5.0f} ms{f.executors:>11}{f.interval_ms:>9.1f} ms{f.interval_p99_ms:>9.1f} ms"
        f"{f.steps_per_second:>10.0f}"
        f"{f.steps_per_second * NUM_SEQUENCES:>11.0f}{f.scheduler_us_per_step:>11.0f} us{f.scheduler:>11.0%}"
        f"{f.executor_process:>11.0%}{f.clients:>9.0%}  {'yes' if f.keeps_pace else 'no'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=STEP_TIMES)
    parser.add_argument("--from", type=int, default=1, dest="first", help="executors to begin with")
    parser.add_argument("--most", type=int, default=64, help="executors to end with")
    parser.add_argument("--json", action="store_true", help="one JSON object for each line of the table")
    arguments = parser.parse_args()
    ladder = [count for count in LADDER if arguments.first <= count <= arguments.most]
    if not arguments.json:
        print(
            f"{'step':>8}{'executors':>11}{'median':>12}{'p99':>12}{'steps/s':>10}{'tokens/s':>11}{'CPU/step':>14}"
            f"{'scheduler':>11}{'executors':>11}{'clients':>9}  keeps pace"
        )
    best: dict[float, int] = {}
    for step_ms in arguments.step_ms:
        for figures in climb(step_ms, ladder):
            print(json.dumps(asdict(figures)) if arguments.json else line(figures), flush=True)
            if figures.keeps_pace:
                best[step_ms] = figures.executors
    if not arguments.json:
        told = ", ".join(f"{best.get(step_ms, 0)} at {step_ms:g} ms" for step_ms in arguments.step_ms)
        print(f"most executors x {NUM_SEQUENCES} sequences within {TOLERANCE} x the step time: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
