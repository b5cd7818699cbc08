"""Octavo's processes as a chaos run holds them: started, broken by signals, started again.

An executor has a place with two ports, and comes back on the other one, so that the scheduler must find it anew. Logs
go to files. What a process says on stdout tells that it is ready; the scheduler's log, in JSON, is read while it runs,
for it alone tells when it found an executor lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from octavo.client import AsyncClient, ExecutorState

PATIENCE = 60.0  # seconds for a process to start or to end


def free_ports(count: int) -> list[int]:
    """All different; held open together, lest one be given twice."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class LogLine(NamedTuple):
    at: float  # seconds of the monotonic clock when it was read
    entry: dict[str, object]


class Child:
    """One process. `lines` grows while it runs, if its log is read."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[LogLine] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, module: str, *flags: str, log: Path | None, ready: Callable[[str], bool] | None) -> Child:
        """`log` takes what it writes on stderr; None: it is read as JSON. Returns when it said on stdout what is
        `ready`; None: at once."""
        with contextlib.ExitStack() as stack:
            stderr = asyncio.subprocess.PIPE if log is None else stack.enter_context(log.open("ab"))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *flags,
                "--exit-with-parent",
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=1 << 20,
            )
        child = cls(process)
        if log is None:
            child._tasks.append(asyncio.create_task(child._read_log()))
        if ready is not None:
            async with asyncio.timeout(PATIENCE):
                assert process.stdout is not None
                while not ready(line := (await process.stdout.readline()).decode()):
                    assert line, f"{module} ended with {await process.wait()} before it was ready; its log: {log}"
        child._tasks.append(asyncio.create_task(child._discard()))
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def wait(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def wait_forever(self) -> int:
        return await self.process.wait()

    async def kill(self) -> None:
        """Ends it however it is, and all that reads of it."""
        self.signal(signal.SIGKILL)
        await self.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _discard(self) -> None:
        assert self.process.stdout is not None
        while await self.process.stdout.readline():
            pass

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            at = time.monotonic()
            try:
                self.lines.append(LogLine(at, json.loads(line)))
            except ValueError:
                self.lines.append(LogLine(at, {"event": line.decode(errors="replace").rstrip()}))


@dataclass(slots=True, eq=False)
class Place:
    """Where an executor lives: two ports that it uses in turn."""

    name: str
    ports: tuple[int, int]
    lifetimes: int = 0
    child: Child | None = None
    broken: bool = False  # under a fault, or coming back

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[self.lifetimes % 2]}"


@dataclass(slots=True)
class Farm:
    """A scheduler, and the places of its executors."""

    directory: Path  # for logs
    executor_flags: Sequence[str]
    places: list[Place]
    port: int  # the scheduler's
    scheduler_flags: Sequence[str] = ()
    executor_module: str = "executor"
    scheduler: Child | None = None
    earlier_lines: list[LogLine] = field(default_factory=list)  # of schedulers that are gone

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> list[LogLine]:
        """Of the scheduler, whichever lived when."""
        return [*self.earlier_lines, *(self.scheduler.lines if self.scheduler else ())]

    async def start_scheduler(self) -> None:
        targets = ",".join(f"127.0.0.1:{port}" for place in self.places for port in place.ports)
        self.scheduler = await Child.start(
            "scheduler",
            f"--executors={targets}",
            f"--port={self.port}",
            "--log-format=json",
            *self.scheduler_flags,
            log=None,
            ready=None,
        )

    async def stop_scheduler(self) -> None:
        """kill -9."""
        assert self.scheduler is not None
        await self.scheduler.kill()
        self.earlier_lines.extend(self.scheduler.lines)
        self.scheduler = None

    async def start_executor(self, place: Place) -> None:
        """On its other port, if it lived before."""
        place.lifetimes += 1
        port = place.address.rpartition(":")[2]
        place.child = await Child.start(
            self.executor_module,
            f"--port={port}",
            *self.executor_flags,
            log=self.directory / f"{place.name}.log",
            ready=lambda line: line.startswith("octavo executor ready"),
        )
        place.broken = False

    async def stop(self) -> None:
        children = [place.child for place in self.places] + [self.scheduler]
        await asyncio.gather(*(child.kill() for child in children if child is not None))


def create_farm(
    directory: Path,
    executor_flags: Sequence[str],
    num_executors: int,
    *,
    scheduler_flags: Sequence[str] = (),
    executor_module: str = "executor",
) -> Farm:
    """Nothing runs yet."""
    ports = free_ports(2 * num_executors + 1)
    places = [Place(f"executor-{i}", (ports[2 * i], ports[2 * i + 1])) for i in range(num_executors)]
    return Farm(directory, executor_flags, places, ports[-1], scheduler_flags, executor_module)


@contextlib.asynccontextmanager
async def running_farm(farm: Farm, num_executors: int | None = None) -> AsyncIterator[AsyncClient]:
    """All of it, or the first so many executors, serving; and a client."""
    places = farm.places[:num_executors]
    try:
        await farm.start_scheduler()
        await asyncio.gather(*(farm.start_executor(place) for place in places))
        async with AsyncClient(farm.address) as client:
            await wait_serving(client, len(places))
            yield client
    finally:
        await farm.stop()


async def serving(client: AsyncClient) -> set[str]:
    """Addresses of the executors that take requests, as the scheduler sees it."""
    load = await client.load(timeout=PATIENCE)
    return {executor.target for executor in load.executors if executor.state is ExecutorState.READY}


async def wait_serving(client: AsyncClient, count: int) -> None:
    """Until so many take requests, and the scheduler does."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(Exception):  # the scheduler may not listen yet
                if len(await serving(client)) >= count and await client.health(timeout=5):
                    return
            await asyncio.sleep(0.1)
