"""What takes part in a comparison: given a task, it answers, and tells when which tokens came.

Systems take turns, so that what else the machine does falls on each alike, and only the one whose turn it is computes.
The first of a round is another one each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.bench.measures import Record

from benchmarks.workloads import LONG_PROMPT, WORKLOADS, Work

_WARM_UP = 4  # requests


class Task(NamedTuple):
    """The requests of one turn: `now` at once, `late` as soon as each of `now` has its first token."""

    now: list[Work]
    late: list[Work]
    streaming: bool  # it matters when each token comes, not only when all is done

    @property
    def works(self) -> list[Work]:
        return self.now + self.late


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system's answer to a task."""

    seconds: float
    now: list[Record]
    late: list[Record] = field(default_factory=list)


class System(Protocol):
    name: str

    def resume(self) -> None:
        """Its turn begins."""

    def answer(self, task: Task) -> Outcome: ...

    def pause(self) -> None:
        """Until it is resumed, it takes nothing of the machine that matters."""


class Incomplete(Exception):
    """A system that did not answer what it was asked cannot be compared."""


def task_of(workload: str, seed: int, num_requests: int | None = None) -> Task:
    """The workload's own number of requests, unless another is given; `single` is always one."""
    sizes = {} if num_requests is None or workload == "single" else {"n": num_requests}
    works = WORKLOADS[workload](seed=seed, **sizes)
    if workload != "long_and_short":
        return Task(works, [], streaming=workload == "single")
    long = [work for work in works if len(work.prompt_token_ids) >= LONG_PROMPT]
    return Task([work for work in works if work not in long], long, streaming=True)


def play(systems: Sequence[System], tasks: Sequence[Task]) -> dict[str, list[Outcome]]:
    """One round for each task. Every system is warmed up before. Raises Incomplete."""
    warm_up = Task([Work([token_id] * 24, 8) for token_id in range(1, _WARM_UP + 1)], [], streaming=False)
    for system in systems:
        take_turn(system, warm_up)
    outcomes: dict[str, list[Outcome]] = {system.name: [] for system in systems}
    for number, task in enumerate(tasks):
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            outcomes[system.name].append(take_turn(system, task))
    return outcomes


def take_turn(system: System, task: Task) -> Outcome:
    system.resume()
    outcome = system.answer(task)
    system.pause()
    wanted = [work.num_output_tokens for work in task.works]
    found = [record.num_output_tokens for record in (*outcome.now, *outcome.late)]
    if found != wanted:
        raise Incomplete(f"{system.name} gave {sum(found)} tokens of {sum(wanted)} to {len(found)} of {len(wanted)}")
    return outcome


def outcome_of(task: Task, seconds: float, arrivals: Sequence[Sequence[tuple[float, int]]]) -> Outcome:
    """arrivals: of each request, in the task's order, when tokens came, in seconds from the start, and how many."""
    records = [
        Record(0.0, len(work.prompt_token_ids), list(one)) for work, one in zip(task.works, arrivals, strict=True)
    ]
    return Outcome(seconds, records[: len(task.now)], records[len(task.now) :])
