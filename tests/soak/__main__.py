"""`python -m tests.soak --seconds 600`: random traffic over two tiny executors; is memory flat?

Every `--every` seconds traffic stops, and when all is idle each process is measured: KV blocks and sequences held, live
Python objects after a collection, resident memory. Prints a line for each time and a verdict, and exits with 1 if a
block or a sequence is held while nothing runs, a request fails, or objects or memory grow: the median of the last third
of the measurements against that of the third before, since an allocator's memory goes up and down by some percent.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from octavo.client import AsyncClient

from tests.chaos.processes import Child, Farm, create_farm, wait_serving
from tests.chaos.simulated import describe
from tests.executor.model.factories import create_tiny_model
from tests.soak.traffic import Traffic

VOCAB_SIZE = 128
EXECUTOR_FLAGS = ("--dtype=float32", "--threads=1", "--num-blocks=600", "--max-num-seqs=16")  # few: preemptions too
OBJECTS_GROWTH = 1.02  # from the middle third to the last
MEMORY_GROWTH = 1.03


@dataclass(frozen=True, slots=True)
class Sample:
    """At one time, with nothing running."""

    seconds: float
    num_tokens: int
    blocks_held: int  # by the scheduler's account
    sequences_held: int  # by the executors' own
    objects: tuple[int, ...]  # of each process
    megabytes: tuple[float, ...]


def counts_in(path: Path) -> list[int]:
    """Whole lines only."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [int(line) for line in lines]


async def count_objects(child: Child, path: Path) -> int:
    before = len(counts_in(path))
    child.signal(signal.SIGUSR1)
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.05)
            if len(counts := counts_in(path)) > before:
                return counts[-1]


def megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def idle(client: AsyncClient) -> int:
    """Until no executor has anything to do; returns the blocks still held."""
    async with asyncio.timeout(30):
        while True:
            load = await client.load()
            if not load.queue_length and all(
                not (e.num_running or e.num_waiting or e.plans_in_flight) for e in load.executors
            ):
                return sum(e.num_blocks - e.num_free_blocks for e in load.executors)
            await asyncio.sleep(0.05)


async def sample(
    farm: Farm, client: AsyncClient, children: Sequence[tuple[Child, Path]], began: float, traffic: Traffic
) -> Sample:
    held = await idle(client)
    await asyncio.sleep(0.5)  # what the last plan told the executors to forget is forgotten
    executors = [await describe(place.address) for place in farm.places]
    return Sample(
        time.monotonic() - began,
        traffic.counts["tokens"],
        held,
        sum(executor.debug.num_sequences + executor.debug.num_pending_plans for executor in executors),
        tuple([await count_objects(child, path) for child, path in children]),
        tuple(megabytes(child.pid) for child, _ in children),
    )


def line(s: Sample) -> str:
    objects = "".join(f"{count:>10}" for count in s.objects)
    memory = "".join(f"{size:>8.1f}" for size in s.megabytes)
    return f"{s.seconds:>6.0f} s{s.num_tokens:>10}{s.blocks_held:>8}{s.sequences_held:>11}{objects}{memory}"


def faults_of(samples: Sequence[Sample], traffic: Traffic) -> list[str]:
    faults = [f"{len(traffic.errors)} requests failed, the first: {traffic.errors[0]}"] if traffic.errors else []
    faults += [f"blocks or sequences held at {s.seconds:.0f} s" for s in samples if s.blocks_held or s.sequences_held]
    third = -(-len(samples) // 3)
    middle, end = samples[-2 * third : -third] or samples[:1], samples[-third:]
    for i, name in enumerate(("scheduler", "executor 1", "executor 2")):
        objects, objects_at_end = (median(s.objects[i] for s in part) for part in (middle, end))
        memory, memory_at_end = (median(s.megabytes[i] for s in part) for part in (middle, end))
        if objects_at_end > OBJECTS_GROWTH * objects:
            faults.append(f"{name}: {objects:.0f} objects became {objects_at_end:.0f}")
        if memory_at_end > MEMORY_GROWTH * memory:
            faults.append(f"{name}: {memory:.1f} MB became {memory_at_end:.1f} MB")
    return faults


async def run(arguments: argparse.Namespace, scratch: Path) -> bool:
    model = create_tiny_model(scratch / "model", max_position_embeddings=1024)
    farm = create_farm(scratch, (), 2)
    children: list[tuple[Child, Path]] = []

    async def start(name: str, module: str, *flags: str) -> None:
        counts = scratch / f"{name}.counts"
        child = await Child.start(
            "tests.soak.counted", str(counts), module, *flags, log=scratch / f"{name}.log", ready=None
        )
        children.append((child, counts))

    try:
        targets = ",".join(place.address for place in farm.places)
        await start("scheduler", "scheduler", f"--executors={targets}", f"--port={farm.port}", "--log-level=warning")
        for place in farm.places:
            port = place.address.rpartition(":")[2]
            await start(place.name, "executor", f"--model={model.directory}", f"--port={port}", *EXECUTOR_FLAGS)
        async with AsyncClient(farm.address) as client:
            await wait_serving(client, 2)
            traffic = Traffic(client, VOCAB_SIZE, arguments.clients, arguments.seed)
            print(
                f"{'time':>8}{'tokens':>10}{'blocks':>8}{'sequences':>11}"
                f"{'objects: scheduler, executors':>30}{'MB: the same':>24}"
            )
            samples, began = [], time.monotonic()
            while not samples or time.monotonic() - began < arguments.seconds:
                await traffic.flow(arguments.every)
                samples.append(await sample(farm, client, children, began, traffic))
                print(line(samples[-1]), flush=True)
    finally:
        await asyncio.gather(*(child.kill() for child, _ in children))
    print("requests:", ", ".join(f"{count} {kind}" for kind, count in sorted(traffic.counts.items())))
    faults = faults_of(samples, traffic)
    print("verdict:", "; ".join(faults) if faults else "flat")
    return not faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds of traffic between two measurements")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if asyncio.run(run(arguments, Path(scratch))) else 1


if __name__ == "__main__":
    sys.exit(main())
