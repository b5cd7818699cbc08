"""What a request is to the core, before it runs (`Request`) and while it does (`Sequence`).

A request asks for one output or several; each output is one sequence, known to core and wire by an integer that is
never used twice. Clients' ids, texts and clocks stay outside: arrival is a number that only orders.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


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

    @property
    def samples(self) -> tuple[int, ...]:
        return self.sample_indices or tuple(range(len(self.sequence_ids)))


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
