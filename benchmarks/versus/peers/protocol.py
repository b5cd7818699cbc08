"""How a peer is driven: a line of JSON in for each task, a line out with what came of it.

Runs in the peer's own environment, so it needs the standard library alone. What the peer itself prints goes to stderr,
where it disturbs no answer. First a line {"name": …} tells that it is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple


class Work(NamedTuple):
    """One request; greedy, and no token ends it."""

    prompt_token_ids: list[int]
    num_output_tokens: int


class Task(NamedTuple):
    """What to answer: `now` at once, `late` as soon as each of `now` has its first token."""

    now: list[Work]
    late: list[Work]
    streaming: bool  # it matters when each token comes


# Of each request, those of `now` first: when something came (perf_counter), and how many tokens.
Arrivals = list[list[tuple[float, int]]]
Answer = Callable[[Task], Arrivals]


def serve(name: str, build: Callable[[], Answer]) -> None:
    """Answers tasks until stdin ends. `build` makes the peer ready."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = build()
    print(json.dumps({"name": name}), file=replies, flush=True)
    for line in sys.stdin:
        task = _task(json.loads(line))
        start = time.perf_counter()
        arrivals = answer(task)
        seconds = time.perf_counter() - start
        relative = [[(moment - start, count) for moment, count in one] for one in arrivals]
        print(json.dumps({"seconds": seconds, "arrivals": relative}), file=replies, flush=True)


def _task(fields: dict[str, object]) -> Task:
    now, late = ([Work(*work) for work in fields[name]] for name in ("now", "late"))  # type: ignore[attr-defined]
    return Task(now, late, bool(fields["streaming"]))
