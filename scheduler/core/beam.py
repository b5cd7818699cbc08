"""Beam search over the candidates that an executor reports: which hypotheses go on, end, or are dropped.

It owns scores and finished hypotheses; live ones are sequences, forked and extended by the scheduler as `advance` says.
A hypothesis' score is the sum of its log probabilities divided by its number of output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.core.plan import TokenEvent
from scheduler.core.request import FinishReason, Request, Sequence

Candidates = tuple[tuple[int, float], ...]  # (token_id, logprob), best first


class Continuation(NamedTuple):
    """A live hypothesis takes one more token."""

    parent: Sequence
    token_id: int
    cumulative_logprob: float


class Hypothesis(NamedTuple):
    """A finished output."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    reason: FinishReason

    @property
    def score(self) -> float:
        return self.cumulative_logprob / len(self.token_ids)


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One request with a beam width."""

    request: Request
    max_tokens: int
    live: list[Sequence] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)  # best first, at most `width`
    candidates: dict[int, Candidates] = field(default_factory=dict)  # by sequence_id, of this step

    @property
    def width(self) -> int:
        assert self.request.beam_width is not None
        return self.request.beam_width

    @property
    def num_candidates(self) -> int:
        """Enough that `width` hypotheses can go on even if `width` candidates end."""
        return 2 * self.width

    @property
    def complete(self) -> bool:
        """All live hypotheses have reported."""
        return len(self.candidates) == len(self.live)

    def advance(self) -> list[Continuation]:
        """Consumes the candidates of a complete step. Returns the hypotheses that live on, best first; none when the
        search is over and `outputs` tells its end."""
        ranked = sorted(
            (
                Continuation(sequence, token_id, sequence.cumulative_logprob + logprob)
                for sequence in self.live
                for token_id, logprob in self.candidates[sequence.sequence_id]
            ),
            key=lambda c: -c.cumulative_logprob,
        )[: self.num_candidates]
        self.candidates = {}
        going_on: list[Continuation] = []
        for rank, candidate in enumerate(ranked):
            stops = candidate.token_id in self.request.sampling.stop_token_ids
            if stops and rank < self.width:
                self._finish(candidate, FinishReason.STOP)
            elif not stops and len(going_on) < self.width:
                going_on.append(candidate)
        if going_on and going_on[0].parent.num_output_tokens + 1 >= self.max_tokens:
            for candidate in going_on:
                self._finish(candidate, FinishReason.LENGTH)
            return []
        return [] if self._is_over(going_on) else going_on

    def outputs(self) -> list[TokenEvent]:
        """The end of each output asked, best first. Where masks leave few tokens to choose from, there may be fewer
        hypotheses than outputs."""
        events = [
            TokenEvent(
                sequence_id, 0, best.token_ids, finish_reason=best.reason, cumulative_logprob=best.cumulative_logprob
            )
            for sequence_id, best in zip(self.request.sequence_ids, self.finished, strict=False)
        ]
        error = f"the search found only {len(self.finished)} hypotheses"
        for sequence_id in self.request.sequence_ids[len(events) :]:
            events.append(TokenEvent(sequence_id, 0, finish_reason=FinishReason.ERROR, error=error))
        return events

    def _finish(self, candidate: Continuation, reason: FinishReason) -> None:
        outputs = candidate.parent.token_ids[candidate.parent.num_prompt_tokens :]
        self.finished.append(Hypothesis((*outputs, candidate.token_id), candidate.cumulative_logprob, reason))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]

    def _is_over(self, going_on: list[Continuation]) -> bool:
        if not going_on:
            return True
        if len(self.finished) < self.width:
            return False
        length = going_on[0].parent.num_output_tokens + 1
        return going_on[0].cumulative_logprob / length <= self.finished[-1].score
