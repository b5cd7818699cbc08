"""Runs one plan: apply it, build the batch, copy blocks, forward, sample, answer.

Owns the sequences of the session. Synchronous and single-threaded: step_thread.py calls it, one plan after another, in
order. Knows the model only as a `Decoder`. A sequence that fails is left out of later plans until one removes or
replaces it; only a plan that is wrong, or a model that raises, fails the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from executor.backends.base import AttentionMetadata
from executor.batch import Batch, build_batch, check_rows
from executor.draws import sampling_batch
from executor.plan import BatchPlan, Fork, InvalidPlan, Limits, PromptLogprobs, StepResult, StepTimings
from executor.sampler import NON_FINITE, Ints, SamplerOutput, SamplingBatch, prompt_logprobs
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
        """token_ids [num_tokens] int64, logits_indices [n] int64 (n may be 0) -> logits [n, vocab] float32."""


class Cache(Protocol):
    """What the runner needs of a backend."""

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None: ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput: ...


class Runner:
    """The executor's step."""

    def __init__(self, decoder: Decoder, cache: Cache, limits: Limits) -> None:
        self.limits = limits
        self.sequences = Sequences(limits)
        self.progress = 0  # layers computed since the start of the process; other threads may read it
        self._decoder = decoder
        self._cache = cache

    def reset(self) -> None:
        """Forgets every sequence, for a session to begin."""
        self.sequences.clear()

    @torch.inference_mode()
    def run(self, plan: BatchPlan, queued_ns: int = 0) -> StepResult:
        """Raises InvalidPlan; what the model raises goes through."""
        started = time.monotonic_ns()
        plan.check(self.limits, self.sequences)
        errors = self.sequences.apply(plan)
        slots, row_tokens = self._rows(plan, errors)
        if plan.copy_sources:
            self._cache.copy_blocks(plan.copy_sources, plan.copy_destinations)
        if not slots.size:
            self._fork(plan.forks, slots, errors)
            return StepResult(plan.step_id, errors=errors, timings=StepTimings(queued_ns=queued_ns))
        batch = build_batch(self.sequences, slots, row_tokens, self.limits.block_size)
        prepared = time.monotonic_ns()
        logits = self._decoder.forward(batch.token_ids, batch.metadata, batch.logits_indices, self._advance)
        forwarded = time.monotonic_ns()
        self.sequences.num_computed_tokens[slots] = batch.ends
        prompts = self._prompt_logprobs(batch, logits, errors)
        draws, logits_rows = self._fork(plan.forks, batch.sampling_slots, errors)
        sampled = sampling_batch(self.sequences, draws, logits_rows)
        output = self._cache.sample(logits[: len(batch.sampling_slots)], sampled)
        well, token_ids = self._take_tokens(draws, output, errors)
        ids = self.sequences.ids[draws].tolist()
        return StepResult(
            step_id=plan.step_id,
            sequence_ids=self.sequences.ids[well].tolist(),
            token_ids=token_ids.tolist(),
            logprobs={ids[draw]: found for draw, found in output.logprobs.items() if ids[draw] not in errors},
            candidates={ids[draw]: best for draw, best in output.candidates.items() if ids[draw] not in errors},
            prompt_logprobs=prompts,
            errors=errors,
            timings=StepTimings(queued_ns, prepared - started, forwarded - prepared, time.monotonic_ns() - forwarded),
        )

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

    def _take_tokens(self, draws: Slots, output: SamplerOutput, errors: dict[int, str]) -> tuple[Slots, Ints]:
        """Each token drawn becomes its sequence's next input. Returns the slots that drew, and their tokens."""
        for draw, message in output.errors.items():
            self._fail(int(draws[draw]), message, errors)
        drew = ~self.sequences.failed[draws]
        drew[list(output.candidates)] = False
        token_ids = output.token_ids
        if not drew.all():
            draws, token_ids = draws[drew], token_ids[drew]
        self.sequences.append(draws, token_ids)
        return draws, token_ids
