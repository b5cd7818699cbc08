"""A scheduler is killed and another one started: executors free everything and serve it, with no restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.chaos import streams
from tests.chaos.processes import PATIENCE, Farm, running_farm, wait_serving
from tests.chaos.simulated import complaints_of, create_simulated_farm, describe, expected_answers

LEASE_SECONDS = 10.0


async def all_begun(farm: Farm, count: int) -> None:
    """Until the executors hold so many sequences."""
    async with asyncio.timeout(PATIENCE):
        while True:
            held = [(await describe(place.address)).debug.num_sequences for place in farm.places]
            if sum(held) >= count:
                return
            await asyncio.sleep(0.02)


async def test_executors_outlive_their_scheduler(tmp_path: Path) -> None:
    farm = create_simulated_farm(tmp_path, 2)
    async with running_farm(farm) as client:
        expected = await expected_answers(client, 12)
        lifetimes = [await describe(place.address) for place in farm.places]
        assert all(executor.owner for executor in lifetimes)
        cut_off = [asyncio.create_task(streams.run(client, wanted.options)) for wanted in expected]
        await all_begun(farm, len(expected))

        await farm.stop_scheduler()
        died = time.monotonic()
        for place in farm.places:
            while (found := await describe(place.address)).owner or found.debug.num_sequences:
                assert time.monotonic() - died < LEASE_SECONDS
                await asyncio.sleep(0.02)
        assert all(stream.complaints for stream in await asyncio.gather(*cut_off))  # a client is told, not left waiting

        await farm.start_scheduler()
        await wait_serving(client, 2)
        assert await complaints_of(client, expected) == []
        again = [await describe(place.address) for place in farm.places]
        assert [e.incarnation for e in again] == [e.incarnation for e in lifetimes]
        assert [e.debug.num_pending_plans for e in again] == [0, 0]
