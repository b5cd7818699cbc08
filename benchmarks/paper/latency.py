"""Chunked prefill and prefix caching against latency, in simulated time.

The core is the real one; the executor is a clock: a step takes `STEP_MS`, and `TOKEN_MS` for each token in it. So the
figures show what the scheduling does, and not how fast any machine is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

from octavo.bench.measures import percentile

from benchmarks.paper.executor import MirrorExecutor
from scheduler.core.config import CoreConfig
from scheduler.core.request import Request
from scheduler.core.scheduler import Scheduler

STEP_MS = 10.0
TOKEN_MS = 0.1
LONG, SHORT = 2000, 48  # prompt tokens
PREFIX, TAIL = 1024, 32
_VOCAB = range(100, 49_000)


class Arrival(NamedTuple):
    ms: float
    prompt: tuple[int, ...]
    output: int


class Told(NamedTuple):
    """Of one request: when it came, and when its tokens did, in milliseconds."""

    num_prompt_tokens: int
    ms: float
    tokens_ms: list[float]

    @property
    def ttft(self) -> float:
        return self.tokens_ms[0] - self.ms

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.tokens_ms)]


def simulate(coming: Iterable[Arrival], max_num_batched_tokens: int, prefix_caching: bool) -> list[Told]:
    """To the end of all requests, on one executor with room for them all."""
    config = CoreConfig(
        num_blocks=20_000,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=4096,
        pipeline_depth=1,
        prefix_caching=prefix_caching,
    )
    core, executor = Scheduler(config, itertools.count(1_000_000).__next__), MirrorExecutor()
    told: dict[int, Told] = {}
    waiting = sorted(coming, reverse=True)
    now = 0.0
    while waiting or core.has_work:
        while waiting and (waiting[-1].ms <= now or not core.has_work):
            arrival = waiting.pop()
            now = max(now, arrival.ms)
            number = len(told) + 1
            told[number] = Told(len(arrival.prompt), arrival.ms, [])
            core.add(Request((number,), arrival.prompt, max_tokens=arrival.output, arrival=number))
        plan = core.schedule()
        if plan is None:
            continue
        now += STEP_MS + TOKEN_MS * plan.num_tokens if plan.num_tokens else 0.0
        for event in core.update(executor.run(plan)):
            told[event.sequence_id].tokens_ms.extend([now] * len(event.token_ids))
    return list(told.values())


class Chunking(NamedTuple):
    """Milliseconds."""

    itl_p50: float  # of the short requests
    itl_p99: float
    long_ttft_p50: float


def chunking(max_num_batched_tokens: int, seed: int, num_short: int = 160) -> Chunking:
    """Short chats, and one prompt in eight of 2,000 tokens, 12.5 a second at random times."""
    r, ms, coming = random.Random(seed), 0.0, []
    for index in range(num_short):
        ms += r.expovariate(1 / 80)
        length, output = (LONG, 16) if index % 8 == 7 else (SHORT, 96)
        coming.append(Arrival(ms, tuple(r.choices(_VOCAB, k=length)), output))
    told = simulate(coming, max_num_batched_tokens, prefix_caching=False)
    gaps = sorted(gap for one in told if one.num_prompt_tokens == SHORT for gap in one.gaps)
    firsts = sorted(one.ttft for one in told if one.num_prompt_tokens == LONG)
    return Chunking(percentile(gaps, 0.5), percentile(gaps, 0.99), percentile(firsts, 0.5))


class Caching(NamedTuple):
    """Milliseconds."""

    ttft_p50: float
    ttft_p99: float


def caching(prefix_caching: bool, seed: int, num_requests: int = 160) -> Caching:
    """Eight system prompts of 1,024 tokens, a tail of 32 for each request, five requests a second."""
    r, ms, coming = random.Random(seed), 0.0, []
    heads = [tuple(r.choices(_VOCAB, k=PREFIX)) for _ in range(8)]
    for _ in range(num_requests):
        ms += r.expovariate(1 / 200)
        coming.append(Arrival(ms, r.choice(heads) + tuple(r.choices(_VOCAB, k=TAIL)), 32))
    firsts = sorted(one.ttft for one in simulate(coming, 512, prefix_caching))
    return Caching(percentile(firsts, 0.5), percentile(firsts, 0.99))
