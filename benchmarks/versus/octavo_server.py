"""Octavo in a comparison: scheduler and executor as `octavo serve` starts them, and a client in this process.

Every token takes the whole way: plan, step, result and stream, over both gRPC connections.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvloop
from octavo.client import AsyncClient, Delta

from benchmarks.versus.system import Outcome, Task, outcome_of
from benchmarks.workloads import Work

_READY = "octavo: ready at "
_PATIENCE = 60.0  # seconds to stop in


class OctavoServer:
    """It is never paused: an executor whose heartbeats cease is lost, and one without work sleeps."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._address = address

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def answer(self, task: Task) -> Outcome:
        return uvloop.run(_answer(self._address, task))


@contextmanager
def octavo_server(name: str, flags: Sequence[str]) -> Iterator[OctavoServer]:
    """Started, ready, and stopped at the end."""
    command = [sys.executable, "-m", "octavo.cli", "serve", "--port=0", "--log-level=warning", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith(_READY)), None)
            if line is None:
                log.seek(0)
                raise SystemExit(f"{name} did not start:\n{log.read()}")
            yield OctavoServer(name, line.removeprefix(_READY).strip())
        finally:
            process.terminate()
            process.wait(_PATIENCE)
            process.stdout.close()


async def _answer(address: str, task: Task) -> Outcome:
    arrivals: list[list[tuple[float, int]]] = [[] for _ in task.works]
    all_begun = asyncio.Event()
    async with AsyncClient(address) as client:
        await client.health()  # the connection is made before the clock runs
        start = time.perf_counter()

        async def send(number: int, work: Work, is_late: bool) -> None:
            if is_late:
                await all_begun.wait()
            async for event in client.generate(
                token_ids=work.prompt_token_ids, max_tokens=work.num_output_tokens, temperature=0, ignore_eos=True
            ):
                if isinstance(event, Delta) and event.token_ids:
                    arrivals[number].append((time.perf_counter() - start, len(event.token_ids)))
                    if all(arrivals[: len(task.now)]):
                        all_begun.set()

        await asyncio.gather(*(send(i, work, i >= len(task.now)) for i, work in enumerate(task.works)))
        seconds = time.perf_counter() - start
    return outcome_of(task, seconds, arrivals)
