"""More requests at once than the queue takes: each is served, or told why not and when to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from octavo.client import AsyncClient, QueueFull

from tests.chaos.processes import running_farm
from tests.chaos.simulated import create_simulated_farm

COUNT = 1500
QUEUE = 20


async def outcome(client: AsyncClient, number: int) -> str:
    try:
        await client.complete(token_ids=[number % 250, number // 250], max_tokens=1, temperature=0)
    except QueueFull as refusal:
        return "refused" if refusal.retry_after else "refused without a time"
    return "served"


async def test_a_burst_is_queued_or_refused_with_a_reason(tmp_path: Path) -> None:
    farm = create_simulated_farm(tmp_path, 1, step_ms=1000, scheduler_flags=(f"--max-queue-requests={QUEUE}",))
    async with running_farm(farm) as client:
        outcomes = Counter(await asyncio.gather(*(outcome(client, number) for number in range(COUNT))))
    assert outcomes.keys() == {"served", "refused"}
    assert outcomes["served"] >= QUEUE
