"""Executors join and leave under load: nothing is restarted, and no client sees an error."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from octavo.client import AsyncClient

from tests.chaos import streams
from tests.chaos.processes import Farm, running_farm, serving, wait_serving
from tests.chaos.simulated import create_simulated_farm, expected_answers
from tests.chaos.streams import Stream


class Load:
    """Clients that ask for the same again and again, and compare."""

    def __init__(self, client: AsyncClient, expected: list[Stream]) -> None:
        self.num_streams = 0
        self.executors: set[str] = set()
        self.complaints: list[str] = []
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._repeat(client, wanted)) for wanted in expected]

    async def stop(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _repeat(self, client: AsyncClient, wanted: Stream) -> None:
        while not self._over.is_set():
            answer = await streams.run(client, wanted.options)
            self.num_streams += 1
            self.executors |= answer.executors
            self.complaints.extend(streams.compare(answer, wanted))


async def drain(farm: Farm, client: AsyncClient, index: int) -> None:
    """SIGTERM, and until the process has ended well."""
    child = farm.places[index].child
    assert child is not None
    child.signal(signal.SIGTERM)
    assert await child.wait() == 0


async def test_one_executor_becomes_four_and_one_again(tmp_path: Path) -> None:
    farm = create_simulated_farm(tmp_path, 4)
    async with running_farm(farm, num_executors=1) as client:
        expected = await expected_answers(client, 32)
        load = Load(client, expected)
        await asyncio.sleep(1)
        for place in farm.places[1:]:
            await farm.start_executor(place)
        await wait_serving(client, 4)
        await asyncio.sleep(3)
        for index in (0, 1, 2):
            await drain(farm, client, index)
        assert await serving(client) == {farm.places[3].address}
        await asyncio.sleep(1)
        await load.stop()
    assert load.complaints == []
    assert len(load.executors) == 4


async def test_all_executors_are_restarted_one_after_another(tmp_path: Path) -> None:
    farm = create_simulated_farm(tmp_path, 3)
    async with running_farm(farm) as client:
        expected = await expected_answers(client, 24)
        load = Load(client, expected)
        for index, place in enumerate(farm.places):
            await drain(farm, client, index)
            await farm.start_executor(place)
            await wait_serving(client, 3)
        await load.stop()
    assert load.complaints == []
    assert len(load.executors) > 3
