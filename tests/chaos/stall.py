"""One fault with room on the other executors: how long its streams stand still.

The bound is the time until the scheduler found the executor lost, by its own log, plus twice a prefill of the tokens so
far. That prefill is measured on the survivors in the same run: as many new requests as an executor had streams, with
the tokens that streams had when the fault struck as prompts (and salts of their own, so nothing is cached), sent at
once while the moved streams go on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.client import AsyncClient, GenerateOptions

from tests.chaos import streams
from tests.chaos.faults import Fault, Injector
from tests.chaos.processes import PATIENCE, Farm, wait_serving
from tests.chaos.streams import Stream

NUM_STREAMS = 12
BEGUN = 40  # tokens that each stream has when the fault strikes
LENGTH = 500


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds; of one fault."""

    fault: Fault
    detection: float
    prefills: Sequence[float]  # of the mirrored requests
    stalls: Sequence[float]  # of the moved streams

    @property
    def bound(self) -> float:
        return self.detection + 2 * p99(self.prefills)

    @property
    def held(self) -> bool:
        return p99(self.stalls) <= self.bound


async def measure_stall(farm: Farm, client: AsyncClient, fault: Fault, vocab_size: int, seed: int) -> Stall:
    await wait_serving(client, len(farm.places))
    begun = _streams(vocab_size, seed)
    tasks = [asyncio.create_task(streams.run(client, stream.options, stream)) for stream in begun]
    await _until(lambda: all(stream.answers and len(stream.answers[0].token_ids) >= BEGUN for stream in begun))
    place = farm.places[seed % len(farm.places)]
    incarnation = next(e.incarnation for e in (await client.load()).executors if e.target == place.address)
    injector = Injector(farm, client)
    so_far = [[*stream.options["token_ids"], *stream.answers[0].token_ids] for stream in begun]
    struck = time.monotonic()
    injector.strike(fault, place)
    lost = await _found_lost(farm, place.address, struck)
    await _until(lambda: all(s.answers[0].finished is not None or s.answers[0].times[-1] > lost for s in begun))
    mirrored = await asyncio.gather(*(_prefill(client, tokens) for tokens in so_far[: NUM_STREAMS // len(farm.places)]))
    await asyncio.gather(*tasks)
    await injector.settled()
    moved = [stream for stream in begun if incarnation in stream.executors and len(stream.executors) > 1]
    return Stall(fault, lost - struck, mirrored, [stream.longest_gap(struck, lost) for stream in moved])


def p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] if ordered else 0.0


def print_stalls(stalls: Sequence[Stall]) -> None:
    print(f"{'one fault':<24}{'moved':>6}{'detection':>11}{'prefill p99':>13}{'bound':>9}{'stall p99':>11}")
    for stall in stalls:
        print(
            f"{stall.fault.value:<24}{len(stall.stalls):>6}{stall.detection:>9.3f} s{p99(stall.prefills):>11.3f} s"
            f"{stall.bound:>7.3f} s{p99(stall.stalls):>9.3f} s  {'held' if stall.held else 'NOT HELD'}"
        )


def _streams(vocab_size: int, seed: int) -> list[Stream]:
    r = random.Random(seed)
    prompts = [[r.randrange(3, vocab_size) for _ in range(r.randrange(100, 300))] for _ in range(NUM_STREAMS)]
    return [
        Stream(GenerateOptions(token_ids=prompt, max_tokens=LENGTH, temperature=0, ignore_eos=True))
        for prompt in prompts
    ]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


async def _found_lost(farm: Farm, address: str, since: float) -> float:
    """When the scheduler's log said so."""

    def times() -> list[float]:
        return [
            at
            for at, entry in farm.log
            if at >= since and entry.get("event") == "executor lost" and entry.get("address") == address
        ]

    await _until(lambda: bool(times()))
    return times()[0]


async def _prefill(client: AsyncClient, tokens: Sequence[int]) -> float:
    """Seconds to the first token."""
    options = GenerateOptions(token_ids=tokens, max_tokens=1, temperature=0, cache_salt="mirror", ignore_eos=True)
    return (await streams.run(client, options)).first_token_seconds
