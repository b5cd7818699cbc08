"""Sends a workload to a server and records what comes back when.

Closed loop: so many requests are always under way, the next one leaves when one ends. Open loop: requests leave at
random times of a Poisson process, however the server fares, and their time counts from when they were due. A run ends
when all is answered, when its time is up, or when it is told to stop; what is then under way is cancelled, and stays in
the records as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from octavo.bench.measures import Record
from octavo.bench.pool import Own, PoolWatch
from octavo.bench.workloads import Work, fixed
from octavo.client import AsyncClient
from octavo.errors import OctavoError, QueueFull
from octavo.request import GenerateOptions
from octavo.results import Delta, Finished, FinishReason, Started

_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.CANCELLED)
_PAUSE = 0.1  # seconds after an error, so that a server in trouble is not hammered
_WARM_UP_TOKENS = (32, 8)  # prompt and output of a warm-up request
_LOAD_INTERVAL = 0.2  # seconds between two loads


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests leave; of concurrency and rate one is set. At least one bound ends the run."""

    concurrency: int | None = None
    rate: float | None = None  # requests a second
    num_requests: int | None = None
    seconds: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Traffic:
    """One run. `records` may be read while it goes on."""

    client: AsyncClient
    works: Iterator[Work]
    pace: Pace
    ignore_eos: bool = True
    timeout: float | None = None  # seconds, of each request
    records: list[Record] = field(default_factory=list)
    began: float = 0.0
    seconds: float = 0.0  # that the run lasted, or has so far
    _num_taken: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        """To the end, or until `stop` is set."""
        self.began = time.perf_counter()
        sending = asyncio.create_task(self._send_all())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, timeout=self.pace.seconds, return_when=asyncio.FIRST_COMPLETED)
            self.seconds = time.perf_counter() - self.began
        finally:
            stopping.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    def own(self) -> Own:
        """What is under way and has begun to answer."""
        decoding = [record for record in self.records if record.end is None and record.arrivals]
        return Own(len(decoding), sum(r.num_prompt_tokens + r.num_output_tokens for r in decoding))

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self.pace.rate is None:
                for _ in range(self.pace.concurrency or 1):
                    group.create_task(self._send_in_turn())
            else:
                async for work, due in self._arrivals(self.pace.rate):
                    group.create_task(self._send(work, due))

    async def _send_in_turn(self) -> None:
        while (work := self._take()) is not None:
            error = await self._send(work, time.perf_counter())
            if error is not None:
                await asyncio.sleep(error.retry_after if isinstance(error, QueueFull) else _PAUSE)

    async def _arrivals(self, rate: float) -> AsyncIterator[tuple[Work, float]]:
        r, due = random.Random(self.pace.seed), self.began
        while (work := self._take()) is not None:
            due += r.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            yield work, due

    def _take(self) -> Work | None:
        if self.pace.num_requests is not None and self._num_taken >= self.pace.num_requests:
            return None
        self._num_taken += 1
        return next(self.works, None)

    async def _send(self, work: Work, due: float) -> OctavoError | None:
        """Runs one request to its end; returns why its call failed."""
        record = Record(due, work.num_prompt_tokens or 0)
        self.records.append(record)
        try:
            async for event in self.client.generate(timeout=self.timeout, **_request(work, self.ignore_eos)):
                match event:
                    case Started():
                        record.num_prompt_tokens = event.num_prompt_tokens
                    case Delta() if event.token_ids:
                        record.arrivals.append((time.perf_counter(), len(event.token_ids)))
                    case Finished():
                        record.num_cached_tokens = event.usage.num_cached_tokens
                        record.num_preemptions = event.num_preemptions
                        if event.reason in _FAILED:
                            record.error = event.error or f"ended with {event.reason.name}"
            record.end = time.perf_counter()
        except OctavoError as error:
            record.error, record.end = str(error), time.perf_counter()
            return error
        return None


async def warm_up(client: AsyncClient, ids: range, num_requests: int) -> None:
    """A few short requests at once, of prompts that no workload has. Raises OctavoError where one fails."""
    works = fixed(ids, -1, *_WARM_UP_TOKENS)
    await asyncio.gather(*(client.complete(**_request(next(works), True)) for _ in range(num_requests)))


async def watch_pool(traffic: Traffic, pool: PoolWatch) -> None:
    """Until cancelled. A server that no longer answers is the requests' affair, not ours."""
    with contextlib.suppress(OctavoError):
        async for load in traffic.client.watch_load(_LOAD_INTERVAL):
            pool.add(load, traffic.own(), time.perf_counter() - traffic.began)


def _request(work: Work, ignore_eos: bool) -> GenerateOptions:
    return {**work.prompt, "max_tokens": work.num_output_tokens, "temperature": 0, "ignore_eos": ignore_eos}
