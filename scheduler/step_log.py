"""The latest plans of one executor: what each held, and how long its answer took.

Written in every step, so it only keeps what the plan has anyway; what it means is computed when somebody looks.
Invariant: answers come in the order of plans, so the oldest unanswered entry is the next one answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.core.plan import BatchPlan, StepResult

KEPT = 128


class StepRecord(NamedTuple):
    """One plan."""

    step_id: int
    num_decodes: int  # sequences that compute one token
    num_prefills: int  # sequences that compute several: of a prompt, or again after a preemption
    num_prefill_tokens: int  # of the latter
    num_admitted: int  # sequences that the executor did not have
    num_preempted: int
    num_copies: int  # of blocks, before a shared one is written
    seconds: float | None  # from sending to the answer; None: not answered yet


@dataclass(slots=True)
class _Entry:
    step_id: int
    row_tokens: Sequence[int]
    num_admitted: int
    num_preempted: int
    num_copies: int
    sent_at: float
    seconds: float | None = None


class StepLog:
    def __init__(self) -> None:
        self.num_sampled_tokens = 0  # in all answers
        self._entries: deque[_Entry] = deque(maxlen=KEPT)
        self._unanswered: deque[_Entry] = deque()

    def sent(self, plan: BatchPlan, now: float) -> None:
        entry = _Entry(plan.step_id, plan.row_tokens, len(plan.new), len(plan.preempted), len(plan.copies), now)
        self._unanswered.append(entry)
        if plan.row_tokens:  # one without rows only tells of ends, and is no step
            self._entries.append(entry)

    def answered(self, result: StepResult, now: float) -> None:
        entry = self._unanswered.popleft()
        entry.seconds = now - entry.sent_at
        self.num_sampled_tokens += len(result.tokens) + len(result.candidates)

    def records(self) -> tuple[StepRecord, ...]:
        """Of the latest steps, the oldest first."""
        return tuple(map(_record, self._entries))


def _record(entry: _Entry) -> StepRecord:
    num_decodes = list(entry.row_tokens).count(1)
    return StepRecord(
        step_id=entry.step_id,
        num_decodes=num_decodes,
        num_prefills=len(entry.row_tokens) - num_decodes,
        num_prefill_tokens=sum(entry.row_tokens) - num_decodes,
        num_admitted=entry.num_admitted,
        num_preempted=entry.num_preempted,
        num_copies=entry.num_copies,
        seconds=entry.seconds,
    )
