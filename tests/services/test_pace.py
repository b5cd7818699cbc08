"""Streams pause between messages while the event loop is behind, and only then."""

from __future__ import annotations

import asyncio
import time

from scheduler.pace import LATE, LEAST, MOST, Pace


def test_a_loop_in_time_makes_no_pause() -> None:
    pace = Pace()
    for _ in range(10):
        pace.note(LATE / 2)
    assert pace.pause == 0


def test_the_later_the_longer_up_to_a_bound_and_back_to_none() -> None:
    pace = Pace()
    pauses = []
    for _ in range(100):
        pace.note(2 * LATE)
        pauses.append(pace.pause)
    assert pauses[0] == LEAST
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST
    for _ in range(1000):
        pace.note(0.0)
    assert pace.pause == 0


async def test_it_watches_the_loop() -> None:
    pace = Pace()
    watching = asyncio.create_task(pace.run())
    await asyncio.sleep(0)
    time.sleep(5 * LATE)  # noqa: ASYNC251 (somebody holds the loop)
    async with asyncio.timeout(5):
        while not pace.pause:  # noqa: ASYNC110
            await asyncio.sleep(0)
    watching.cancel()
