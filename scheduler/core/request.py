"""What a request is to the core, before it runs (`Request`) and while it does (`Sequence`).

A request asks for one output or several; each output is one sequence, known to core and wire by an integer that is
never used twice. Clients' ids, texts and clocks stay outside: arrival is a number that only orders.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core.beam import BeamSearch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence's tokens are drawn, all defaults resolved. The core passes it on and reads only the stop rules."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the model's end-of-sequence tokens among them, unless ignored
    logprobs: int | None = None  # alternatives to report for each output token; None reports nothing
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the outputs wanted of it.

    `sequence_ids` names the outputs, one id each, chosen by the caller. A request that comes back from another
    executor has one id, and its tokens so far in `output_token_ids`.
    """

    sequence_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]  # at least one
    max_tokens: int  # per output, at least one
    sampling: SamplingParams = SamplingParams()
    output_token_ids: tuple[int, ...] = ()  # fewer than max_tokens
    sample_indices: tuple[int, ...] | None = None  # of sequence_ids; None counts from 0
    beam_width: int | None = None  # at least len(sequence_ids); None draws instead
    priority: int = 0  # smaller is served first
    arrival: int = 0  # orders requests of one priority; unique
    cache_salt: str = ""
    adapter: str = ""
    alone: bool = False  # computed in plans that hold nothing else: it may be what kills executors
    num_prompt_logprobs_told: int = 0  # positions whose log probabilities an earlier executor told
    prompt_hashes: tuple[bytes, ...] | None = None  # of its full blocks; computed where absent
    traceparent: str = ""  # handed on to executors unread

    @property
    def samples(self) -> tuple[int, ...]:
        return self.sample_indices or tuple(range(len(self.sequence_ids)))


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class DoesNotFit(Exception):
    """No state of the pool could ever run this request to its end; the message names both numbers."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One output while it lives. The scheduler owns it; block_table and block_hashes are kv_cache's to write.

    [0, num_computed_tokens)                  K/V is in the blocks, or will be when the plans in flight have run
    [num_computed_tokens, num_tokens)         to compute
    [len(token_ids), num_tokens)              placeholders: drawn by plans in flight, id not told yet
    """

    sequence_id: int
    request: Request
    sample_index: int
    token_ids: list[int]  # the prompt, then the outputs told
    num_prompt_tokens: int
    max_tokens: int  # of outputs
    siblings: tuple[tuple[int, int], ...] = ()  # (sequence_id, sample index) that begin when the prompt is computed
    beam: BeamSearch | None = None
    cumulative_logprob: float = 0.0  # of a beam's outputs

    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_in_flight: int = 0  # unanswered plans that hold it
    generation: int = 0  # preemptions so far
    valid_from: int = 0  # results of plans made in an earlier generation are dropped
    on_executor: bool = False  # the executor was told of it, and not yet to forget it
    admitted: bool = False  # was running at least once
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    high_water: int = 0  # positions below were computed at least once
    next_prompt_logprob: int = 1  # prompt positions below were told
    block_table: list[int] = field(default_factory=list)
    may_share_last_block: bool = False  # it was forked since its last block was found to be its own
    num_adopted_blocks: int = 0  # of the table, from its beginning: computed by others
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks whose ids are all known

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        """Outputs told; placeholders do not count."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of the prompt's log probabilities are still to be told, so every position must be computed."""
        return self.request.sampling.prompt_logprobs is not None and self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller is served first and preempted last."""
        return (self.request.priority, self.request.arrival, self.sequence_id)
