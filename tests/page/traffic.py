"""A server with simulated executors, and requests that share beginnings: something to look at."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from octavo.client import AsyncClient

BLOCKS = 480
NUM_CLIENTS = 26
SYSTEM_PROMPTS = (144, 80, 208)  # tokens that many requests begin with
VOCAB = 250  # of the simulated model's 258


@dataclass(frozen=True)
class Served:
    address: str
    url: str
    num_blocks: int  # usable


@contextlib.asynccontextmanager
async def served(
    step_ms: float = 60, num_clients: int = NUM_CLIENTS, num_blocks: int = BLOCKS
) -> AsyncIterator[Served]:
    """With traffic that goes on until the end of the block."""
    port, http_port = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.cli", "serve", f"--simulate-step-ms={step_ms}", f"--num-blocks={num_blocks + 1}",
        f"--max-num-seqs={max(1, num_clients - 4)}", "--max-num-batched-tokens=256", "--max-model-len=2048",
        f"--port={port}", f"--http-port={http_port}", "--log-level=error", "--grace-period=0",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            assert b"ready" in await process.stdout.readline()
        here = Served(f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}/", num_blocks)
        async with AsyncClient(here.address) as client, asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(ask(client, random.Random(seed))) for seed in range(num_clients)]
            try:
                yield here
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        process.terminate()
        await process.wait()


async def ask(client: AsyncClient, draw: random.Random) -> None:
    """One client: request after request, with a pause for thought."""
    while True:
        await asyncio.sleep(draw.uniform(0.0, 4.0))
        which = draw.randrange(len(SYSTEM_PROMPTS))
        prompt = [(which * 100 + i) % VOCAB for i in range(SYSTEM_PROMPTS[which])]
        prompt += [draw.randrange(VOCAB) for _ in range(draw.randrange(10, 120))]
        n = 3 if draw.random() < 0.2 else 1
        await client.complete(
            token_ids=prompt, n=n, max_tokens=draw.randrange(40, 240), ignore_eos=True,
            tenant=f"team-{which}", priority=int(draw.random() < 0.2),
        )  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
