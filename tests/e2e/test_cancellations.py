"""Many streams, cancelled at random: nothing of them stays anywhere."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc.aio
from octavo.client import AsyncClient, Finished
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from tests.e2e.cluster import Cluster, load_weights, running
from tests.executor.model.factories import create_tiny_model

NUM_STREAMS = 64


async def stream(client: AsyncClient, r: random.Random) -> str:
    """One request, left at a random point or read to its end; returns how it ended."""
    prompt = [r.randrange(3, 128) for _ in range(r.randint(1, 80))]
    leave_after = r.choice([None, 0, 1, r.randint(2, 40)])
    n = r.choice([1, 1, 3])
    events = client.generate(
        token_ids=prompt, n=n, max_tokens=r.randint(1, 60), ignore_eos=True, temperature=r.choice([0.0, 1.0]), seed=7
    )
    finished, deltas = set(), 0
    async for event in events:
        if isinstance(event, Finished):
            assert event.index not in finished
            finished.add(event.index)
        elif deltas == leave_after:
            await events.aclose()  # type: ignore[attr-defined]
            return "left"
        deltas += 1
    assert finished == set(range(n))
    return "finished"


async def executor_state(cluster: Cluster) -> tuple[int, int]:
    """(sequences, plans pending) as Describe tells."""
    (member,) = cluster.engine.members.values()
    async with grpc.aio.insecure_channel(member.address) as channel:
        described = await pb_grpc.ExecutorStub(channel).Describe(pb.DescribeRequest())
    return described.debug.num_sequences, described.debug.num_pending_plans


async def test_sixty_four_streams_with_random_cancellations_leave_nothing_behind(tmp_path: Path) -> None:
    create_tiny_model(tmp_path)
    weights = load_weights(tmp_path)
    async with (
        running(weights, num_blocks=40, max_num_batched_tokens=64) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        for seed in range(2):
            r = random.Random(seed)
            ends = await asyncio.gather(*(stream(client, r) for _ in range(NUM_STREAMS)))
            assert ends.count("left") > 10
            assert ends.count("finished") > 10
            await cluster.idle()
            assert cluster.core.num_free_blocks == cluster.core.num_blocks == 39
            assert cluster.engine.load().queue_length == 0
            assert await executor_state(cluster) == (0, 0)
