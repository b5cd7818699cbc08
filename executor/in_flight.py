"""A step that was launched and is not collected: who drew in it, and what becomes of the draws once they are known.

Until then each token drawn stands in its sequence's column as `~d`, d its draw: a backend whose draws are not known at
once feeds the next step from where draw d lies. One step may be launched behind this one, before this one is collected;
by then a sequence may have been removed, and its slot may serve another. Of a sequence that fails here nothing more is
told by the step behind, which computed a row for it in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.backends.base import Mark
from executor.plan import BatchPlan, PromptLogprobs, StepResult, StepTimings
from executor.sampler import Draws, SamplingBatch
from executor.sequences import Sequences, Slots


@dataclass(frozen=True, slots=True)
class Clock:
    """When a step was where."""

    queued_ns: int
    prepare_ns: int
    begun: Mark  # the model begins
    forwarded: Mark  # the model has ended
    drawn: Mark  # the draws have ended

    def read(self) -> StepTimings:
        """Once the step is over."""
        return StepTimings(
            self.queued_ns,
            self.prepare_ns,
            self.forwarded.ns_since(self.begun),
            self.drawn.ns_since(self.forwarded),
        )


class StepInFlight:
    """See `executor.launched.Launched`."""

    def __init__(
        self,
        step_id: int,
        sequences: Sequences,
        slots: Slots,
        batch: SamplingBatch,
        draws: Draws,
        prompts: dict[int, PromptLogprobs],
        errors: dict[int, str],
        clock: Clock,
    ) -> None:
        """slots [num_draws]: who draws. Appends the placeholders. `prompts` and `errors`: what the launch found."""
        self.collected = False
        self.followed_by: StepInFlight | None = None
        self._step_id = step_id
        self._sequences = sequences
        self._slots = slots
        self._ids: npt.NDArray[np.uint64] = sequences.ids[slots]
        self._places = sequences.num_tokens[slots]
        self._well = ~sequences.failed[slots]  # of each draw: its sequence has not failed
        self._beams = [draw for draw, _ in batch.candidates]
        self._reports_logits = bool(batch.logprobs or batch.candidates)
        self._draws = draws
        self._prompts = prompts
        self._errors = errors
        self._clock = clock
        kept = np.flatnonzero(self._drawing())
        sequences.append(slots[kept], ~kept)

    def is_ready(self) -> bool:
        return self._draws.is_ready()

    def can_be_followed_by(self, plan: BatchPlan) -> bool:
        """Whether the plan may be launched before this step is collected: if not, its launch needs a token that is not
        known yet, would wait for the device itself, or would overwrite logits that this step has yet to report."""
        sequences = self._sequences
        if self._reports_logits or plan.tokens:
            return False
        if any(new.sequence_id in sequences or new.sampling.prompt_logprobs is not None for new in plan.new):
            return False
        if any(fork.parent in self._ids for fork in plan.forks):
            return False
        return not any(self._is_needed_by(sequence_id) for sequence_id in plan.row_sequences)

    def _is_needed_by(self, sequence_id: int) -> bool:
        sequences = self._sequences
        if sequence_id not in sequences:
            return False  # a new one
        slot = sequences.slot(sequence_id)
        if sequences.is_plain[slot]:
            return False
        sampling = sequences.sampling[slot]
        if sampling.prompt_logprobs is not None and sequences.num_computed_tokens[slot] < self._prompt_end(slot):
            return True
        return sampling.penalizes and sequence_id in self._ids

    def _prompt_end(self, slot: int) -> int:
        return int(self._sequences.num_prompt_tokens[slot])

    def collect(self) -> StepResult:
        output = self._draws.collect()
        self.collected = True
        failed = [draw for draw in output.errors if self._well[draw]]
        for draw in failed:
            self._errors[int(self._ids[draw])] = output.errors[draw]
        if failed:
            self._fail(failed)
        drawing = self._drawing()
        token_ids = output.token_ids if drawing.all() else output.token_ids[drawing]
        ids = self._ids[drawing]
        self._sequences.fill(self._slots[drawing], ids, self._places[drawing], token_ids)
        names = self._ids.tolist()
        return StepResult(
            step_id=self._step_id,
            sequence_ids=ids.tolist(),
            token_ids=token_ids.tolist(),
            logprobs={names[draw]: found for draw, found in output.logprobs.items() if self._well[draw]},
            candidates={names[draw]: best for draw, best in output.candidates.items() if self._well[draw]},
            prompt_logprobs=self._prompts,
            errors=self._errors,
            timings=self._clock.read(),
        )

    def _drawing(self) -> npt.NDArray[np.bool_]:
        """[num_draws] whose token is told and kept."""
        drawing = self._well.copy()
        drawing[self._beams] = False
        return drawing

    def _fail(self, draws: list[int]) -> None:
        self._well[draws] = False
        slots, ids = self._slots[draws], self._ids[draws]
        here = self._sequences.ids[slots] == ids
        self._sequences.failed[slots[here]] = True
        if self.followed_by is not None:
            self.followed_by._lose(ids)

    def _lose(self, ids: npt.NDArray[np.uint64]) -> None:
        """These sequences had failed before this step."""
        self._well[np.isin(self._ids, ids)] = False
        for sequence_id in ids.tolist():
            self._errors.pop(sequence_id, None)
