"""Which executor a request goes to: one pure function.

The scheduler owns every hash and every token, so it knows exactly what each executor has cached and how much each has
to do. Both are counted in one unit, tokens to compute: a cached prefix is worth as much as it saves, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.core.request import Request
from scheduler.core.scheduler import Scheduler

DECODE_TOKENS = 16  # a running sequence delays a newcomer as much as so many tokens of a prompt; docs/routing.md


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor as one request sees it."""

    obstacle: str | None  # why it cannot admit the request now
    cached_tokens: int  # of the request, in its prefix cache
    queued_tokens: int  # of sequences it has admitted, still to compute
    num_running: int
    num_free_blocks: int


class Choice(NamedTuple):
    candidate: int  # its index
    reason: str


def seen_by(request: Request, core: Scheduler) -> Candidate:
    """The executor of `core`, as the request sees it."""
    obstacle = core.obstacle(request)
    return Candidate(
        obstacle=obstacle,
        cached_tokens=core.num_cached_tokens(request) if obstacle is None else 0,
        queued_tokens=core.num_tokens_to_compute,
        num_running=core.num_running,
        num_free_blocks=core.num_free_blocks,
    )


def choose(num_tokens: int, candidates: Sequence[Candidate]) -> Choice | None:
    """The candidate on which a request of `num_tokens` known tokens is computed soonest; None if all have an obstacle.

    Among equals, the one with more free blocks, then the first.
    """
    best: tuple[int, int, int] | None = None
    for index, candidate in enumerate(candidates):
        if candidate.obstacle is None:
            ranked = (cost(num_tokens, candidate), -candidate.num_free_blocks, index)
            best = ranked if best is None else min(best, ranked)
    if best is None:
        return None
    chosen = candidates[best[2]]
    return Choice(
        best[2],
        f"{num_tokens - chosen.cached_tokens} of {num_tokens} tokens to compute, {chosen.queued_tokens} queued and "
        f"{chosen.num_running} sequences running before them: cost {best[0]}",
    )


def cost(num_tokens: int, candidate: Candidate) -> int:
    """Tokens to compute before the request's first token, as far as they can be known."""
    return num_tokens - candidate.cached_tokens + candidate.queued_tokens + DECODE_TOKENS * candidate.num_running
