"""A request that kills whoever runs it fails alone, after two deaths that nothing else can explain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from octavo.client import FinishReason, RequestFailed

from tests.chaos import streams
from tests.chaos.processes import Farm, Place, running_farm, wait_serving
from tests.chaos.serve_poisoned import POISON
from tests.chaos.simulated import complaints_of, create_simulated_farm, expected_answers


async def keep_alive(farm: Farm, place: Place, deaths: list[str]) -> None:
    """What a supervisor does."""
    while True:
        assert place.child is not None
        await place.child.wait_forever()
        deaths.append(place.name)
        await place.child.kill()
        await farm.start_executor(place)


async def test_poison_ends_in_an_error_and_takes_no_other_stream_along(tmp_path: Path) -> None:
    farm = create_simulated_farm(tmp_path, 3, executor_module="tests.chaos.serve_poisoned")
    async with running_farm(farm) as client:
        expected = await expected_answers(client, 12, max_tokens=200)
        deaths: list[str] = []
        supervisors = [asyncio.create_task(keep_alive(farm, place, deaths)) for place in farm.places]
        others = [asyncio.create_task(streams.run(client, wanted.options)) for wanted in expected]
        await asyncio.sleep(0.5)
        with pytest.raises(RequestFailed, match="2 executors died while they ran this request alone") as failed:
            await client.complete(token_ids=[1, 2, POISON], max_tokens=5, temperature=0)
        assert failed.value.completion.finish_reason is FinishReason.ERROR
        answers = await asyncio.gather(*others)
        assert [c for a, wanted in zip(answers, expected, strict=True) for c in streams.compare(a, wanted)] == []
        assert 3 <= len(deaths) <= 4  # suspected twice, one of them perhaps alone already; then alone twice
        await wait_serving(client, 3)
        assert await complaints_of(client, expected) == []
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
