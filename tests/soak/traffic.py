"""Random requests of every kind, some of them cut short: what a soak feeds a server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing

from octavo.client import AsyncClient, Delta, GenerateOptions, OctavoError

FIRST_TOKEN = 3
NUM_PREFIXES = 8


class Traffic:
    """Clients that never rest until told to."""

    def __init__(self, client: AsyncClient, vocab_size: int, num_clients: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._client = client
        self._vocab_size = vocab_size
        self._num_clients = num_clients
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(self._random.randrange(16, 200)) for _ in range(NUM_PREFIXES)]

    async def flow(self, seconds: float) -> None:
        """Requests for so long; returns when the last one has ended."""
        over = asyncio.Event()
        clients = [asyncio.create_task(self._repeat(over)) for _ in range(self._num_clients)]
        await asyncio.sleep(seconds)
        over.set()
        await asyncio.gather(*clients)

    async def _repeat(self, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                await self._one()
            except OctavoError as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    async def _one(self) -> None:
        r = self._random
        options, kind = self._options()
        cut_after = r.randrange(1, 30) if r.random() < 0.2 else None
        self.counts[kind] += 1
        tokens = 0
        async with aclosing(self._client.generate(**options)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    tokens += len(event.token_ids)
                    if cut_after is not None and tokens >= cut_after:
                        self.counts["cancelled"] += 1
                        break
        self.counts["tokens"] += tokens

    def _options(self) -> tuple[GenerateOptions, str]:
        r = self._random
        prompt = self._tokens(r.randrange(1, 250))
        if r.random() < 0.4:
            prompt = [*r.choice(self._prefixes), *prompt]
        options = GenerateOptions(token_ids=prompt, max_tokens=r.randrange(1, 80), temperature=r.choice([0.0, 1.0]))
        match r.choice(["plain", "plain", "plain", "n", "beams", "logprobs", "stop", "salt"]):
            case "n":
                return options | GenerateOptions(n=r.randrange(2, 5), temperature=1.0), "several outputs"
            case "beams":
                return options | GenerateOptions(beam_width=r.randrange(2, 4), temperature=0.0), "beams"
            case "logprobs":
                return options | GenerateOptions(logprobs=2, prompt_logprobs=1), "log probabilities"
            case "stop":
                stop = [str(r.randrange(FIRST_TOKEN, self._vocab_size)) for _ in range(3)]
                return options | GenerateOptions(stop=stop, stop_token_ids=self._tokens(3)), "stops"
            case "salt":
                return options | GenerateOptions(cache_salt=str(r.random()), priority=r.randrange(3)), "salts"
        return options, "plain"

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self._vocab_size) for _ in range(count)]
