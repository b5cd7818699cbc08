"""What an executor is told (`BatchPlan`) and what it answers (`StepResult`), in its own words.

Owns the types and the checks that need nothing but the plan and the executor's limits. Knows neither protobuf (wire.py
converts) nor what sequences exist (sequences.py). Ids of sequences are the scheduler's integers, never used twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class InvalidPlan(Exception):
    """A plan that no correct scheduler sends; the message names what is wrong. It ends the session."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one plan may ask, and where its ids must lie."""

    vocab_size: int
    block_size: int
    num_blocks: int  # the null block (id 0) included
    max_num_seqs: int  # rows of one plan
    max_num_batched_tokens: int  # tokens of one plan
    max_model_len: int  # tokens of one sequence


class Known(Protocol):
    """The ids of the sequences that the executor has."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence_id: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are drawn, all defaults resolved."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0  # [0, 2**64)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives to report for each output token; None reports nothing
    prompt_logprobs: int | None = None
    beam_candidates: int | None = None  # report so many of the best tokens, draw none; None draws

    @property
    def penalizes(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Nothing but temperature, top-k, top-p and min-p: the row needs no work of its own outside the columns."""
        return not (
            self.logit_bias
            or self.allowed_token_ids
            or self.penalizes
            or (self.min_tokens and self.stop_token_ids)
            or self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.beam_candidates is not None
        )


@dataclass(frozen=True, slots=True)
class NewSequence:
    """The whole state of a sequence that is not known yet, or is to be replaced."""

    sequence_id: int
    token_ids: Sequence[int]  # all known: prompt, then outputs
    num_prompt_tokens: int
    num_computed_tokens: int  # K/V of [0, num_computed_tokens) is in its blocks
    block_ids: Sequence[int]
    sample_index: int
    sampling: Sampling
    traceparent: str = ""  # W3C Trace Context of its request; empty: not traced


class TableUpdate(NamedTuple):
    """From index `start` on, the block table of the sequence becomes `block_ids`; nothing follows them."""

    sequence_id: int
    start: int
    block_ids: Sequence[int]


class Fork(NamedTuple):
    """`child` begins as a copy of `parent`, and draws its token from the parent's row of logits."""

    parent: int
    child: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One iteration, applied in this order: finished and preempted, new, tokens, tables, copies, rows with forks."""

    step_id: int
    finished: Sequence[int] = ()
    preempted: Sequence[int] = ()
    new: Sequence[NewSequence] = ()
    tokens: Sequence[tuple[int, int]] = ()  # (sequence_id, token_id) to append
    tables: Sequence[TableUpdate] = ()
    copy_sources: Sequence[int] = ()
    copy_destinations: Sequence[int] = ()
    row_sequences: Sequence[int] = ()  # [num_rows] sequence ids, each at most once
    row_tokens: Sequence[int] = ()  # [num_rows] tokens each computes, at least 1
    forks: Sequence[Fork] = ()

    def check(self, limits: Limits, known: Known) -> None:
        """Raises InvalidPlan unless columns match, blocks exist, and rows and sequences fit the limits. `known` are the
        sequences before the plan."""
        check_counts({name: len(getattr(self, name)) for name in COUNTED}, limits)
        self._check_rows(limits)
        self._check_sequences(limits, known)
        if len(self.copy_sources) != len(self.copy_destinations):
            raise InvalidPlan(
                f"copy_sources has {len(self.copy_sources)} entries, copy_destinations {len(self.copy_destinations)}"
            )
        for name, blocks in (("copy_sources", self.copy_sources), ("copy_destinations", self.copy_destinations)):
            _check_blocks(name, blocks, limits)
        both = set(self.copy_sources) & set(self.copy_destinations)
        if both:
            raise InvalidPlan(f"block {min(both)} is both a source and a destination of a copy")
        if len(set(self.copy_destinations)) != len(self.copy_destinations):
            raise InvalidPlan("a block is the destination of two copies")
        for table in self.tables:
            _check_blocks(f"the block table of sequence {table.sequence_id}", table.block_ids, limits)
        for new in self.new:
            _check_blocks(f"block_ids of new sequence {new.sequence_id}", new.block_ids, limits)

    def _check_sequences(self, limits: Limits, known: Known) -> None:
        """A scheduler gives each of its max_num_seqs seats to one sequence, and what left its seat is forgotten first:
        more would be state that only grows."""
        left = {i for i in (*self.finished, *self.preempted) if i in known}
        arrived = {i for i in (new.sequence_id for new in self.new) if i in left or i not in known}
        arrived.update(fork.child for fork in self.forks)
        total = len(known) - len(left) + len(arrived)
        if total > limits.max_num_seqs:
            raise InvalidPlan(f"{total} sequences to keep exceed max_num_seqs {limits.max_num_seqs}")

    def _check_rows(self, limits: Limits) -> None:
        num_rows = len(self.row_sequences)
        if num_rows != len(self.row_tokens):
            raise InvalidPlan(f"row_sequences has {num_rows} entries, row_tokens {len(self.row_tokens)}")
        if num_rows and min(self.row_tokens) < 1:
            raise InvalidPlan("a row computes no token")
        num_tokens = sum(self.row_tokens)
        if num_tokens > limits.max_num_batched_tokens:
            raise InvalidPlan(f"{num_tokens} tokens exceed max_num_batched_tokens {limits.max_num_batched_tokens}")
        if len(set(self.row_sequences)) != num_rows:
            raise InvalidPlan("a sequence has two rows")


# Columns of a plan that name each sequence at most once, and what an entry is called; a copy is made for one row.
COUNTED = {
    "finished": "finished sequences",
    "preempted": "preempted sequences",
    "new": "new sequences",
    "tokens": "chosen tokens",
    "tables": "table updates",
    "copy_sources": "copies",
    "row_sequences": "rows",
    "forks": "forks",
}


def check_counts(counts: Mapping[str, int], limits: Limits) -> None:
    """Raises InvalidPlan where a column of COUNTED is longer than a plan for max_num_seqs sequences can be: known from
    the lengths alone, so that nobody walks what is too long to be walked."""
    for name, count in counts.items():
        if count > limits.max_num_seqs:
            raise InvalidPlan(f"{count} {COUNTED[name]} exceed max_num_seqs {limits.max_num_seqs}")


def check_contents(num_tokens: int, num_blocks: int, limits: Limits) -> None:
    """Raises InvalidPlan for more tokens in new sequences, or more ids in block tables, than max_num_seqs sequences of
    max_model_len have: a single one that is too long stays an error of its own."""
    most_tokens = limits.max_num_seqs * (limits.max_model_len + 1)
    if num_tokens > most_tokens:
        raise InvalidPlan(f"{num_tokens} tokens of new sequences exceed the {most_tokens} that can be known")
    most_blocks = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size)
    if num_blocks > most_blocks:
        raise InvalidPlan(f"{num_blocks} ids in block tables exceed the {most_blocks} that tables have room for")


def _check_blocks(name: str, blocks: Sequence[int], limits: Limits) -> None:
    """Block 0 is the null block: no table and no copy may name it."""
    if blocks and (min(blocks) < 1 or max(blocks) >= limits.num_blocks):
        wrong = next(block for block in blocks if not 0 < block < limits.num_blocks)
        raise InvalidPlan(f"{name}: block {wrong} is not in [1, {limits.num_blocks})")


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position; `logprob` and `rank` (1 is best) are those of the token that stands there."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token_id, logprob), best first


class PromptLogprobs(NamedTuple):
    """Of the prompt's tokens at [first_position, first_position + len(entries))."""

    first_position: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Nanoseconds. The time that a step launched ahead waits for its turn on the device is in none of them."""

    queued_ns: int = 0  # host: from the plan's receipt until its step was begun
    prepare_ns: int = 0  # host
    forward_ns: int = 0  # by the clock of whoever computes: on a GPU the device's own
    sample_ns: int = 0  # likewise


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one plan."""

    step_id: int
    sequence_ids: Sequence[int] = ()  # [num_draws] in row order, forks after their parent
    token_ids: Sequence[int] = ()  # [num_draws]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by sequence id
    candidates: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # beams; best first
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)  # sequences that failed in this step
    timings: StepTimings = StepTimings()
