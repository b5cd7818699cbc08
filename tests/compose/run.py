"""The life of a stack, step by step, under load: each row of the report is one step, with what became of the streams.

Nothing here asserts: a step that does not come about is a failure in the report, and so is each stream that was lost or
whose tokens are others than those of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from octavo.client import AsyncClient, ExecutorState, OctavoError

from tests.chaos import streams
from tests.chaos.run import undisturbed
from tests.chaos.streams import Stream
from tests.chaos.workload import create_requests
from tests.compose import stack as engine
from tests.compose.load import Load, Tally
from tests.compose.stack import CommandFailed, Stack

BUILD_LIMIT = 1800.0  # seconds
UP_LIMIT = 600.0  # fetches and converts the model
STOP_LIMIT = 180.0
READY_LIMIT = 300.0  # for an executor to join
ROUNDS_LIMIT = 600.0  # two answers for each client
NUM_STREAMS = 8
VOCABULARY = 49152  # of the demo model
QUESTION = "What is gravity?"


@dataclass(slots=True)
class Row:
    name: str
    seconds: float = 0.0
    executors: int | None = None  # ready at its end
    tally: Tally = field(default_factory=Tally)
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.tally.complaints


@dataclass(slots=True)
class Report:
    images: dict[str, int] = field(default_factory=dict)  # bytes
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)


class Scenario:
    """One stack from build to down. `report` grows meanwhile."""

    def __init__(self, stack: Stack, progress: Callable[[str], None]) -> None:
        self.report = Report()
        self._stack = stack
        self._progress = progress

    async def run(self, *, build: bool = True) -> None:
        """To its end, or to the first step that does not come about; nothing is left running."""
        try:
            await self._live(build)
        except (CommandFailed, OctavoError, OSError, AssertionError):
            with contextlib.suppress(CommandFailed):
                self._progress(await self._stack.logs())
        finally:
            with contextlib.suppress(CommandFailed):
                await self._stack.down(STOP_LIMIT)

    async def _live(self, build: bool) -> None:
        stack = self._stack
        if build:
            async with self._step("build"):
                await stack.compose("build", limit=BUILD_LIMIT)
        for image in (engine.BASE_IMAGE, *engine.IMAGES):
            self.report.images[image] = await engine.image_bytes(image)
        async with self._step("up, 1 executor") as row:
            await stack.up(1, UP_LIMIT)
            row.executors = 1
        async with self._step("generate"):
            words = ("generate", QUESTION, "--max-tokens=16", "--temperature=0")
            answer = await stack.compose("--profile", "client", "run", "--rm", "-T", "client", *words, limit=120)
            assert "gravity" in answer.lower(), f"the answer is {answer!r}"
        async with self._step("metrics"):
            found = await asyncio.to_thread(read, f"http://127.0.0.1:{stack.http_port}/metrics")
            assert 'octavo_num_executors{state="ready"} 1.0' in found, found
        async with AsyncClient(f"127.0.0.1:{stack.port}") as client:
            async with self._step("undisturbed") as row:
                expected = await undisturbed(client, create_requests(NUM_STREAMS, VOCABULARY, max_tokens=64))
                for stream in expected:
                    row.tally.take(stream, stream)
                row.executors = await ready(client)
            async with Load(client, expected) as load:
                await load.rounds(1)
                load.take()
                await self._under_load(client, load)
            await self._down(client, expected)

    async def _under_load(self, client: AsyncClient, load: Load) -> None:
        stack = self._stack
        async with self._step("scale 1 to 3", client, load):
            await stack.up(3, UP_LIMIT)
            await until_ready(client, 3)
        async with self._step("kill -9 of one", client, load):
            before = await incarnations(client)
            victim = await self._busy_executor(client)
            await engine.kill_processes(victim)
            await until_ready(client, 3, without=before)
        async with self._step("rolling restart", client, load):
            for container in await stack.containers("executor"):
                before = await incarnations(client)
                await engine.restart(container, STOP_LIMIT)
                await until_ready(client, 3, without=before)
        async with self._step("scale 3 to 2", client, load):
            await stack.up(2, UP_LIMIT)
            await until_ready(client, 2)

    async def _down(self, client: AsyncClient, expected: Sequence[Stream]) -> None:
        """While every client is in the middle of an answer."""
        async with self._step("down") as row:
            running = [Stream(wanted.options) for wanted in expected]
            tasks = [asyncio.create_task(streams.run(client, stream.options, stream)) for stream in running]
            while not all(stream.answers for stream in running):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            stopping = asyncio.create_task(self._stack.down(STOP_LIMIT))
            await asyncio.gather(*tasks)
            for stream, wanted in zip(running, expected, strict=True):
                row.tally.take(stream, wanted)
            await stopping
            left = await self._stack.everything()
            assert not left, f"containers are left: {left}"
            row.executors = 0

    async def _busy_executor(self, client: AsyncClient) -> str:
        """The container of one that computes for a client."""
        containers = await self._stack.containers("executor")
        by_address = {address: c for c in containers for address in await engine.addresses(c)}
        async with asyncio.timeout(60):
            while True:
                for executor in (await client.load(timeout=10)).executors:
                    if executor.num_running:
                        return by_address[executor.target.rpartition(":")[0]]
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _step(self, name: str, client: AsyncClient | None = None, load: Load | None = None) -> AsyncIterator[Row]:
        """A row of the report; under load, it ends once every client has had two more answers, so that one of them
        began after the step's work."""
        row = Row(name)
        self.report.rows.append(row)
        began = time.monotonic()
        try:
            yield row
            row.seconds = time.monotonic() - began
            if load is not None and client is not None:
                await asyncio.wait_for(load.rounds(2), ROUNDS_LIMIT)
                row.executors = await ready(client)
        except (CommandFailed, OctavoError, OSError, AssertionError) as error:
            row.failure = str(error) or type(error).__name__
            raise
        finally:
            row.seconds = row.seconds or time.monotonic() - began
            if load is not None:
                row.tally = load.take()
            self._progress(line(row))


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


async def incarnations(client: AsyncClient) -> set[str]:
    """Of the executors that take requests."""
    load = await client.load(timeout=30)
    return {e.incarnation for e in load.executors if e.state is ExecutorState.READY and e.incarnation}


async def ready(client: AsyncClient) -> int:
    return len(await incarnations(client))


async def until_ready(client: AsyncClient, count: int, *, without: set[str] | None = None) -> None:
    """So many executors take requests, at least one of them not among those in `without`."""
    async with asyncio.timeout(READY_LIMIT):
        while True:
            found = await incarnations(client)
            if len(found) == count and (without is None or found - without):
                return
            await asyncio.sleep(0.05)


HEADINGS = ("step", "seconds", "executors", "streams ended", "tokens", "moved", "lost", "differing")


def cells(row: Row) -> tuple[str, ...]:
    tally = row.tally
    counts = (tally.num_streams, tally.num_tokens, tally.num_moved, tally.num_lost, tally.num_differing)
    told = tuple(f"{count:,}" for count in counts) if tally.num_streams else ("",) * len(counts)
    return (row.name, f"{row.seconds:.1f}", "" if row.executors is None else str(row.executors), *told)


def line(row: Row) -> str:
    tally = row.tally
    text = f"{row.name}: {row.seconds:.1f} s, {tally.num_streams} streams ended, {len(tally.complaints)} complaints"
    return text if row.failure is None else f"{text}; FAILED: {row.failure}"


def print_report(report: Report) -> None:
    print("| image | MB |\n|---|---|")
    for image, size in report.images.items():
        print(f"| {image} | {size / 1e6:,.0f} |")
    print(f"\n| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for row in report.rows:
        print(f"| {' | '.join(cells(row))} |")
    for row in report.rows:
        for complaint in row.tally.complaints:
            print(f"{row.name}: {complaint}")
        if row.failure:
            print(f"{row.name}: {row.failure}")
    print("\nverdict:", "no stream lost, every token as in the undisturbed run" if report.ok else "FAILED")
