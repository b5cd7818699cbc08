"""Where requests go: the router against round robin, least loaded and random, over 1 to 64 simulated executors.

    python -m benchmarks.router [--executors 1,4,16] [--requests N] [--seed N] [--json]

The cores and the router are the real ones; the executors are a clock: a step takes a fixed time and so much for each
token. Requests come at random times, each with one of several system prompts, some far more popular than others, and a
tail of its own; no executor's cache holds them all. Rates and prompts grow with the number of executors, so that each
has as much to do. Every policy hears of the same requests, gives none to an executor that cannot admit it, and shares
the queue before them. One seed gives one table.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.null_executor import NullExecutor
from benchmarks.workloads import TOKEN_IDS
from scheduler.core.block_hash import hash_chain
from scheduler.core.config import CoreConfig
from scheduler.core.plan import StepResult
from scheduler.core.request import Request, SamplingParams
from scheduler.core.scheduler import Scheduler
from scheduler.router import choose, seen_by

EXECUTORS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_SIZE = 16
STEP_MS = 10.0  # of a step, whatever it computes
TOKEN_MS = 0.1  # of each token in it


@dataclass(frozen=True, slots=True)
class Load:
    """What comes, for each executor."""

    requests: int = 60
    per_second: float = 6.0
    prefixes: int = 8
    prefix_blocks: tuple[int, int] = (32, 64)
    tail_tokens: tuple[int, int] = (16, 128)
    output_tokens: tuple[int, int] = (16, 64)
    num_blocks: int = 320  # of the pool: half of the prefixes, or so, and what runs


class Row(NamedTuple):
    executors: int
    policy: str
    hit_rate: float  # of prompt tokens
    balance: float  # tokens computed by the busiest executor, over the mean
    ttft_p50_ms: float
    ttft_p99_ms: float
    makespan_s: float


class Arrival(NamedTuple):
    ms: float
    request: Request


# Which of the cores takes a request now; None: it waits.
Policy = Callable[[Request, Sequence[Scheduler]], int | None]


def routed(request: Request, cores: Sequence[Scheduler]) -> int | None:
    choice = choose(len(request.prompt_token_ids), [seen_by(request, core) for core in cores])
    return None if choice is None else choice.candidate


def _open(request: Request, cores: Sequence[Scheduler]) -> list[int]:
    return [index for index, core in enumerate(cores) if core.obstacle(request) is None]


def round_robin() -> Policy:
    turn = 0

    def choose_next(request: Request, cores: Sequence[Scheduler]) -> int | None:
        nonlocal turn
        free = _open(request, cores)
        if not free:
            return None
        chosen = min(free, key=lambda index: (index - turn) % len(cores))
        turn = chosen + 1
        return chosen

    return choose_next


def least_loaded(request: Request, cores: Sequence[Scheduler]) -> int | None:
    """The fewest requests; among equals, the most free blocks."""

    def load(index: int) -> tuple[int, int, int]:
        core = cores[index]
        return core.num_running + core.num_waiting, -core.num_free_blocks, index

    return min(_open(request, cores), key=load, default=None)


def at_random(seed: int) -> Policy:
    r = random.Random(seed)

    def choose_any(request: Request, cores: Sequence[Scheduler]) -> int | None:
        free = _open(request, cores)
        return r.choice(free) if free else None

    return choose_any


def policies(seed: int) -> dict[str, Policy]:
    return {"router": routed, "round robin": round_robin(), "least loaded": least_loaded, "random": at_random(seed)}


def arrivals(num_executors: int, load: Load, seed: int) -> list[Arrival]:
    r = random.Random(f"{seed}/{num_executors}")
    prefixes = [_tokens(r, BLOCK_SIZE * r.randint(*load.prefix_blocks)) for _ in range(load.prefixes * num_executors)]
    popularity = [1 / (rank + 1) for rank in range(len(prefixes))]
    sampling = SamplingParams(stop_token_ids=frozenset([0]))
    ms, found = 0.0, []
    for number in range(1, load.requests * num_executors + 1):
        ms += r.expovariate(load.per_second * num_executors / 1000)
        prompt = r.choices(prefixes, popularity)[0] + _tokens(r, r.randint(*load.tail_tokens))
        request = Request(
            (number,),
            prompt,
            max_tokens=r.randint(*load.output_tokens),
            sampling=sampling,
            arrival=number,
            prompt_hashes=hash_chain(prompt, BLOCK_SIZE),
        )
        found.append(Arrival(ms, request))
    return found


def _tokens(r: random.Random, count: int) -> tuple[int, ...]:
    return tuple(r.choices(TOKEN_IDS, k=count))


class Simulation:
    """A queue, a policy, and executors that compute in simulated time."""

    def __init__(self, num_executors: int, load: Load, policy: Policy) -> None:
        config = CoreConfig(
            num_blocks=load.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=2048,
            pipeline_depth=1,
        )
        ids = itertools.count(1_000_000_000)
        self.cores = [Scheduler(config, ids.__next__) for _ in range(num_executors)]
        self._executors = [NullExecutor() for _ in range(num_executors)]
        self._policy = policy
        self._queue: deque[Request] = deque()
        self._steps: list[tuple[float, int, StepResult]] = []  # heap: when it ends, whose it is, what it gives
        self._busy: set[int] = set()
        self.first_token_ms: dict[int, float] = {}  # by sequence id

    def run(self, coming: Iterable[Arrival]) -> float:
        """To the end of all requests; returns when that is."""
        now = 0.0
        for arrival in coming:
            while self._steps and self._steps[0][0] <= arrival.ms:
                now = self._end_step()
            now = arrival.ms
            self._queue.append(arrival.request)
            self._hand_over(range(len(self.cores)), now)
        while self._steps:
            now = self._end_step()
        assert not self._queue
        return now

    def _end_step(self) -> float:
        now, index, result = heapq.heappop(self._steps)
        self._busy.remove(index)
        for event in self.cores[index].update(result):
            if event.token_ids:
                self.first_token_ms.setdefault(event.sequence_id, now)
        self._hand_over([index], now)
        self._begin_step(index, now)
        return now

    def _hand_over(self, indices: Sequence[int], now: float) -> None:
        """As the engine does: the head of the queue, as long as one of these can admit it."""
        cores = [self.cores[index] for index in indices]
        while self._queue and (chosen := self._policy(self._queue[0], cores)) is not None:
            cores[chosen].add(self._queue.popleft())
            self._begin_step(indices[chosen], now)

    def _begin_step(self, index: int, now: float) -> None:
        if index in self._busy or (plan := self.cores[index].schedule()) is None:
            return
        self._busy.add(index)
        took = STEP_MS + TOKEN_MS * plan.num_tokens if plan.num_tokens else 0.0
        heapq.heappush(self._steps, (now + took, index, self._executors[index].run(plan)))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(num_executors: int, name: str, policy: Policy, coming: Sequence[Arrival], load: Load) -> Row:
    simulation = Simulation(num_executors, load, policy)
    end = simulation.run(coming)
    counters = [core.counters for core in simulation.cores]
    computed = [c.computed_tokens for c in counters]
    waits = [simulation.first_token_ms[a.request.sequence_ids[0]] - a.ms for a in coming]
    return Row(
        num_executors,
        name,
        round(sum(c.prefix_hits for c in counters) / sum(c.prefix_queries for c in counters), 3),
        round(max(computed) * num_executors / sum(computed), 2),
        round(percentile(waits, 0.5), 1),
        round(percentile(waits, 0.99), 1),
        round(end / 1000, 1),
    )


def compare(num_executors: int, load: Load, seed: int) -> list[Row]:
    """A row for each policy, on the same requests."""
    coming = arrivals(num_executors, load, seed)
    return [measure(num_executors, name, policy, coming, load) for name, policy in policies(seed).items()]


def main() -> None:
    usual = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON with all rows")
    parser.add_argument("--executors", default=",".join(map(str, EXECUTORS)), help="numbers of executors, with commas")
    parser.add_argument("--requests", type=int, default=usual.requests, help="for each executor (default %(default)s)")
    parser.add_argument("--rate", type=float, default=usual.per_second, help="of them, a second (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = replace(usual, requests=options.requests, per_second=options.rate)
    rows: list[Row] = []
    form = "{:>9}  {:<12}  {:>8}  {:>7}  {:>11}  {:>11}  {:>10}"
    if not options.json:
        print(form.format(*Row._fields))
    for number in map(int, options.executors.split(",")):
        for row in compare(number, load, options.seed):
            rows.append(row)
            if not options.json:
                print(form.format(*row), flush=True)
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
