"""What the core hands to its driver (`BatchPlan`), takes from it (`StepResult`), and tells of it (`TokenEvent`).

A plan is the difference to what the executor knows already, in columns, so that a steady decode step costs little to
encode. It is applied in this order: finished and preempted, new, tokens, tables, copies; then the rows are run.
Positions, slots and padded block tables follow from it on the executor and are never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.core.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """The whole state of a sequence that the executor does not hold, or must replace."""

    sequence_id: int
    token_ids: tuple[int, ...]  # all known: prompt, then outputs
    num_prompt_tokens: int
    num_computed_tokens: int  # K/V of [0, num_computed_tokens) is in its blocks
    block_ids: tuple[int, ...]
    sample_index: int
    sampling: SamplingParams
    beam_candidates: int | None = None  # report so many of the best tokens and draw none
    traceparent: str = ""  # of the request


class TableUpdate(NamedTuple):
    """From index `start` on, the block table of the sequence becomes `block_ids`."""

    sequence_id: int
    start: int
    block_ids: tuple[int, ...]


class Copy(NamedTuple):
    """Block contents to copy in all layers, before the step's K/V is written."""

    source: int
    destination: int


class Fork(NamedTuple):
    """`child` begins as a copy of `parent`, and draws its token from the parent's row of logits."""

    parent: int
    child: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One iteration of one executor."""

    step_id: int
    finished: Sequence[int] = ()
    preempted: Sequence[int] = ()
    new: Sequence[NewSequence] = ()
    tokens: Sequence[tuple[int, int]] = ()  # (sequence_id, token_id) that the scheduler chose itself: beams
    tables: Sequence[TableUpdate] = ()
    copies: Sequence[Copy] = ()
    row_sequences: Sequence[int] = ()  # [num_rows] sequence ids, each at most once
    row_tokens: Sequence[int] = ()  # [num_rows] tokens each computes in this step, at least 1
    forks: Sequence[Fork] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.row_tokens)


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position; `logprob` and `rank` are those of the token that stands there."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token_id, logprob), best first


class PromptLogprobs(NamedTuple):
    """Of the prompt's tokens at [first_position, first_position + len(entries))."""

    first_position: int
    entries: tuple[TokenLogprobs, ...]


class StepTimings(NamedTuple):
    """Where the executor's time went, in nanoseconds of its monotonic clock."""

    queued_ns: int  # from the plan's receipt to the start of its step
    prepare_ns: int
    forward_ns: int
    sample_ns: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one plan. A sequence that sampled is in `tokens`, or in `candidates` (beams), or in `errors`."""

    step_id: int
    tokens: Sequence[tuple[int, int]] = ()  # (sequence_id, token_id), in row order, forks after their parent
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by sequence_id
    candidates: dict[int, tuple[tuple[int, float], ...]] = field(
        default_factory=dict
    )  # (token_id, logprob), best first
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    timings: StepTimings | None = None


class TokenEvent(NamedTuple):
    """News of one output: made once a token, so a tuple.

    `token_ids` are new, from output position `first_position` on, and final. With `finish_reason` set nothing follows.
    """

    sequence_id: int
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, where asked for
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    cumulative_logprob: float | None = None  # beams
