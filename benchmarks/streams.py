"""Clients that only read, for benchmarks: `python -m benchmarks.streams ADDRESS COUNT MAX_TOKENS`.

One request each, all over one connection; messages are counted and not parsed, so that the clients' own work stays
small beside the scheduler's. Prints a line with the number of messages when all have ended, or is killed before.
"""

from __future__ import annotations

import asyncio
import random
import sys

import grpc.aio
import uvloop
from octavo.v1 import generation_pb2 as pb

METHOD = "/octavo.v1.Generation/Generate"


async def main(address: str, count: int, max_tokens: int) -> None:
    r = random.Random(0)
    async with grpc.aio.insecure_channel(address) as channel:
        generate = channel.unary_stream(METHOD, request_serializer=pb.GenerateRequest.SerializeToString)

        async def read() -> int:
            request = pb.GenerateRequest()
            request.token_ids.ids.extend(r.randrange(250) for _ in range(16))
            request.sampling.temperature = 0
            request.max_tokens = max_tokens
            messages = 0
            async for _ in generate(request):
                messages += 1
            return messages

        print(sum(await asyncio.gather(*(read() for _ in range(count)))))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
