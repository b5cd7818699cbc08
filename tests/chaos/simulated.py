"""What tests with simulated executors share: they load in a blink, so whole processes can come and go in a test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
from octavo.client import AsyncClient
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from tests.chaos import streams
from tests.chaos.processes import PATIENCE, Farm, create_farm
from tests.chaos.streams import Stream
from tests.chaos.workload import create_requests

VOCAB_SIZE = 250  # of the built-in model, a few less than it has


def create_simulated_farm(directory: Path, num_executors: int, *, step_ms: float = 20, **settings: str) -> Farm:
    flags = (f"--simulate-step-ms={step_ms:g}", "--max-model-len=1024", "--num-blocks=2000", "--grace-period=20")
    return create_farm(directory, flags, num_executors, **settings)


async def expected_answers(client: AsyncClient, count: int, max_tokens: int = 120) -> list[Stream]:
    """Of requests that simulated executors can compute, undisturbed."""
    requests = create_requests(count, VOCAB_SIZE, max_tokens=max_tokens, logits=False)
    answers = list(await asyncio.gather(*(streams.run(client, request) for request in requests)))
    assert [complaint for answer in answers for complaint in answer.complaints] == []
    return answers


async def complaints_of(client: AsyncClient, expected: Sequence[Stream]) -> list[str]:
    """The same requests again, all at once."""
    answers = await asyncio.gather(*(streams.run(client, wanted.options) for wanted in expected))
    return [c for answer, wanted in zip(answers, expected, strict=True) for c in streams.compare(answer, wanted)]


async def describe(address: str) -> pb.DescribeResponse:
    """An executor's own word on itself."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        return await stub.Describe(pb.DescribeRequest(), timeout=PATIENCE)
