"""Clients that send the same requests again and again, and compare each answer with the undisturbed one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from octavo.client import AsyncClient

from tests.chaos import streams
from tests.chaos.streams import Stream


@dataclass(slots=True)
class Tally:
    """Of the streams that ended in some time."""

    num_streams: int = 0
    num_tokens: int = 0
    num_moved: int = 0  # more than one executor computed them
    executors: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)

    def take(self, stream: Stream, expected: Stream) -> None:
        self.num_streams += 1
        self.num_tokens += sum(len(answer.token_ids) for answer in stream.answers.values())
        self.num_moved += len(stream.executors) > 1
        self.executors |= stream.executors
        self.complaints.extend(streams.compare(stream, expected))

    @property
    def num_lost(self) -> int:
        return sum(complaint.startswith(("lost", "error")) for complaint in self.complaints)

    @property
    def num_differing(self) -> int:
        return len(self.complaints) - self.num_lost


class Load:
    """One client for each request, from the block's start to its end; streams that run then still end."""

    def __init__(self, client: AsyncClient, expected: Sequence[Stream]) -> None:
        self._client = client
        self._expected = expected
        self._tally = Tally()
        self._ended = [0] * len(expected)  # streams of each client
        self._progress = asyncio.Event()
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._repeat(i)) for i in range(len(self._expected))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    async def rounds(self, count: int) -> None:
        """Until each client has seen so many more answers to their end."""
        wanted = [ended + count for ended in self._ended]
        while any(ended < least for ended, least in zip(self._ended, wanted, strict=True)):
            self._progress.clear()
            await self._progress.wait()

    def take(self) -> Tally:
        """Since the last time."""
        taken, self._tally = self._tally, Tally()
        return taken

    async def _repeat(self, i: int) -> None:
        while not self._over:
            wanted = self._expected[i]
            self._tally.take(await streams.run(self._client, wanted.options), wanted)
            self._ended[i] += 1
            self._progress.set()
