"""Runs one plan: apply it, build the batch, copy blocks, forward, sample; then, once the draws are known, answer.

Owns the sequences of the session. Single-threaded: step_thread.py calls it, one plan after another, in order. What is
launched on a device need not have run when the next plan comes: in_flight.py has what then remains to be done. Knows
the model only as a `Decoder`. A sequence that fails is left out of later plans until one removes or replaces it; only a
plan that is wrong, or a model that raises, fails the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from executor.backends.base import AttentionMetadata, Mark
from executor.batch import Batch, build_batch, check_rows
from executor.draws import sampling_batch
from executor.in_flight import Clock, StepInFlight
from executor.launched import Finished, Launched
from executor.plan import BatchPlan, Fork, InvalidPlan, Limits, PromptLogprobs, StepResult, StepTimings
from executor.sampler import NON_FINITE, Draws, Ints, SamplingBatch, prompt_logprobs
from executor.sequences import Sequences, Slots


class Decoder(Protocol):
    """The model."""

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        """token_ids [num_tokens] int64, logits_indices [n] int64 (n may be 0) -> logits [n, vocab] float32.

        A token id below 0 is one that the step before has drawn and nobody has collected: ~d for its draw d. Only a
        backend whose draws are not known at once meets any."""


class Cache(Protocol):
    """What the runner needs of a backend."""

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None: ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Draws: ...

    def mark(self) -> Mark: ...


class Runner:
    """The executor's step."""

    def __init__(self, decoder: Decoder, cache: Cache, limits: Limits) -> None:
        self.limits = limits
        self.sequences = Sequences(limits)
        self.progress = 0  # layers computed since the start of the process; other threads may read it
        self._decoder = decoder
        self._cache = cache
        self._last: StepInFlight | None = None

    def reset(self) -> None:
        """Forgets every sequence, for a session to begin; a step that is not collected is never to be."""
        self.sequences.clear()
        self._last = None

    def run(self, plan: BatchPlan, queued_ns: int = 0) -> StepResult:
        """The whole step: `launch`, then waiting for it."""
        return self.launch(plan, queued_ns).collect()

    def can_follow(self, plan: BatchPlan) -> bool:
        """Whether `launch` may come before the step that was launched last is collected."""
        before = self._last
        return before is None or before.collected or before.can_be_followed_by(plan)

    @torch.inference_mode()
    def launch(self, plan: BatchPlan, queued_ns: int = 0) -> Launched:
        """Does everything of a step that needs none of its draws. Raises InvalidPlan; what the model raises goes
        through. At most one step is not collected when another is launched, and `can_follow` has allowed it."""
        before = self._last if self._last is not None and not self._last.collected else None
        assert before is None or before.followed_by is None, "two steps are not collected"
        started = time.monotonic_ns()
        plan.check(self.limits, self.sequences)
        errors = self.sequences.apply(plan)
        slots, row_tokens = self._rows(plan, errors)
        if plan.copy_sources:
            self._cache.copy_blocks(plan.copy_sources, plan.copy_destinations)
        if not slots.size:
            self._fork(plan.forks, slots, errors)
            return Finished(StepResult(plan.step_id, errors=errors, timings=StepTimings(queued_ns=queued_ns)))
        batch = build_batch(self.sequences, slots, row_tokens, self.limits.block_size)
        prepared = time.monotonic_ns()
        begun = self._cache.mark()
        logits = self._decoder.forward(batch.token_ids, batch.metadata, batch.logits_indices, self._advance)
        forwarded = self._cache.mark()
        self.sequences.num_computed_tokens[slots] = batch.ends
        prompts = self._prompt_logprobs(batch, logits, errors)
        drawing, logits_rows = self._fork(plan.forks, batch.sampling_slots, errors)
        sampled = sampling_batch(self.sequences, drawing, logits_rows)
        draws = self._cache.sample(logits[: len(batch.sampling_slots)], sampled)
        clock = Clock(queued_ns, prepared - started, begun, forwarded, self._cache.mark())
        step = StepInFlight(plan.step_id, self.sequences, drawing, sampled, draws, prompts, errors, clock)
        if before is not None:
            before.followed_by = step
        self._last = step
        return step

    def _advance(self) -> None:
        self.progress += 1

    def _rows(self, plan: BatchPlan, errors: dict[int, str]) -> tuple[Slots, Ints]:
        """Slots [num_rows] and tokens [num_rows] of the rows whose sequences are well."""
        sequences = self.sequences
        slots = sequences.slots(plan.row_sequences)
        row_tokens = np.array(plan.row_tokens, np.int64)
        ends = sequences.num_computed_tokens[slots] + row_tokens
        too_long = (ends > self.limits.max_model_len) & ~sequences.failed[slots]
        for slot, end in zip(slots[too_long], ends[too_long], strict=True):
            self._fail(int(slot), f"position {end - 1} is past max_model_len {self.limits.max_model_len}", errors)
        well = ~sequences.failed[slots]
        if not well.all():
            slots, row_tokens = slots[well], row_tokens[well]
        check_rows(sequences, slots, row_tokens, self.limits.block_size)
        return slots, row_tokens

    def _fail(self, slot: int, message: str, errors: dict[int, str]) -> None:
        self.sequences.failed[slot] = True
        errors[int(self.sequences.ids[slot])] = message

    def _prompt_logprobs(self, batch: Batch, logits: torch.Tensor, errors: dict[int, str]) -> dict[int, PromptLogprobs]:
        found: dict[int, PromptLogprobs] = {}
        for prompt in batch.prompt_ranges:
            num_top = self.sequences.sampling[prompt.slot].prompt_logprobs
            assert num_top is not None
            rows = logits[prompt.logits_start : prompt.logits_end].cpu()
            tokens = self.sequences.tokens(prompt.slot)[prompt.first_position :][: len(rows)]
            entries = prompt_logprobs(rows, tokens, prompt.first_position, num_top)
            if entries is None:
                self._fail(prompt.slot, NON_FINITE, errors)
            else:
                found[int(self.sequences.ids[prompt.slot])] = entries
        return found

    def _fork(self, forks: Sequence[Fork], sampling_slots: Slots, errors: dict[int, str]) -> tuple[Slots, Ints | None]:
        """Makes the children. Returns the slots that draw [num_draws], each parent before its children, and the rows
        of logits they draw from; None where draw i is row i. A child of a failed parent has failed too."""
        if not forks:
            return sampling_slots, None
        sequences = self.sequences
        children: dict[int, list[int]] = {slot: [] for slot in sampling_slots.tolist()}
        for fork in forks:
            parent, child = sequences.slot(fork.parent), sequences.fork(fork)
            if sequences.failed[parent]:
                self._fail(child, f"sequence {fork.parent}, of which it is a fork, failed", errors)
            elif parent not in children:
                raise InvalidPlan(f"fork: sequence {fork.parent} samples nothing in this step")
            elif sequences.sampling[parent].beam_candidates is None:
                children[parent].append(child)
        draws = [slot for parent, forked in children.items() for slot in (parent, *forked)]
        rows = [row for row, forked in enumerate(children.values()) for _ in range(1 + len(forked))]
        return np.array(draws, np.int64), np.array(rows, np.int64)
