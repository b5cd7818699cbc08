"""Cores and requests with everything defaulted, and an executor whose memory can be looked through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from scheduler.core.config import CoreConfig
from scheduler.core.plan import BatchPlan, PromptLogprobs, StepResult, TokenEvent, TokenLogprobs
from scheduler.core.request import FinishReason, Request, SamplingParams
from scheduler.core.scheduler import Scheduler

VOCAB = 7
POISON = -1


def create_core(ids: Callable[[], int] | None = None, **overrides: object) -> Scheduler:
    settings: dict[str, object] = {
        "num_blocks": 101,
        "block_size": 4,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "pipeline_depth": 1,
    }
    return Scheduler(CoreConfig(**(settings | overrides)), ids or itertools.count(1_000_000).__next__)  # type: ignore[arg-type]


def create_request(
    sequence_id: int = 1,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    n: int = 1,
    stop: Sequence[int] = (),
    **overrides: object,
) -> Request:
    sampling = overrides.pop("sampling", None) or SamplingParams(stop_token_ids=frozenset(stop))
    settings: dict[str, object] = {
        "sequence_ids": tuple(range(sequence_id, sequence_id + n)),
        "prompt_token_ids": tuple(prompt),
        "max_tokens": 8,
        "sampling": sampling,
        "arrival": sequence_id,
    }
    return Request(**(settings | overrides))  # type: ignore[arg-type]


def content(history: list[int], token_id: int) -> int:
    """What a model would keep as K/V of a token: depends on everything before it."""
    return hash((tuple(history), token_id))


def draw(last: int, sample_index: int) -> int:
    return hash((last, sample_index, 17)) % VOCAB


def rank_candidates(last: int, count: int) -> tuple[tuple[int, float], ...]:
    scores = [(-(hash((last, token_id, 23)) % 1000) / 1000 - 0.001 * token_id, token_id) for token_id in range(VOCAB)]
    return tuple((token_id, score) for score, token_id in sorted(scores, reverse=True)[:count])


def expected_output(request: Request, sample_index: int) -> list[int]:
    """The tokens of an undisturbed run of a request without beams, as long as max_tokens allows."""
    history: list[int] = []
    for token_id in request.prompt_token_ids:
        history.append(content(history, token_id))
    outputs: list[int] = []
    while len(outputs) < request.max_tokens:
        outputs.append(draw(history[-1], sample_index))
        if outputs[-1] in request.sampling.stop_token_ids:
            break
        history.append(content(history, outputs[-1]))
    return outputs


@dataclass
class _Known:
    token_ids: list[int]
    num_computed: int
    table: list[int]
    sample_index: int
    beam_candidates: int | None
    num_prompt: int
    prompt_logprobs: bool
    failed: bool = False


@dataclass
class FakeExecutor:
    """Applies plans as the wire's contract says. The token that a sequence draws depends on what its slots hold, so
    a block freed too early, shared wrongly or found under a wrong hash changes the output."""

    block_size: int
    sequences: dict[int, _Known] = field(default_factory=dict)
    slots: dict[int, list[int]] = field(default_factory=dict)  # block id -> contents
    max_candidates: int | None = None  # of beams: as if masks left no more tokens to choose from

    def run(self, plan: BatchPlan, fail: frozenset[int] = frozenset()) -> StepResult:
        """`fail` names sequences whose computation goes wrong in this step."""
        for sequence_id in (*plan.finished, *plan.preempted):
            del self.sequences[sequence_id]
        for new in plan.new:
            assert new.sequence_id not in self.sequences
            self.sequences[new.sequence_id] = _Known(
                list(new.token_ids),
                new.num_computed_tokens,
                list(new.block_ids),
                new.sample_index,
                new.beam_candidates,
                new.num_prompt_tokens,
                new.sampling.prompt_logprobs is not None,
            )
        for sequence_id, token_id in plan.tokens:
            self.sequences[sequence_id].token_ids.append(token_id)
        for update in plan.tables:
            table = self.sequences[update.sequence_id].table
            assert update.start <= len(table)
            table[update.start :] = update.block_ids
        sources, destinations = {c.source for c in plan.copies}, {c.destination for c in plan.copies}
        assert not sources & destinations
        assert len(destinations) == len(plan.copies)
        for copy in plan.copies:
            # A step that skipped a failed sequence may have left the source unwritten.
            self.slots[copy.destination] = list(self.slots.get(copy.source, [POISON] * self.block_size))
        assert len(set(plan.row_sequences)) == len(plan.row_sequences)
        return self._run_rows(plan, fail)

    def _run_rows(self, plan: BatchPlan, fail: frozenset[int]) -> StepResult:
        tokens: list[tuple[int, int]] = []
        candidates: dict[int, tuple[tuple[int, float], ...]] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        errors: dict[int, str] = {}
        written: set[tuple[int, int]] = set()
        for sequence_id, count in zip(plan.row_sequences, plan.row_tokens, strict=True):
            known = self.sequences[sequence_id]
            children = [f for f in plan.forks if f.parent == sequence_id]
            if known.failed:  # skipped, and its children with it
                for fork in children:
                    self.sequences[fork.child] = replace(known)
                    errors[fork.child] = "its parent failed"
                continue
            start, end = known.num_computed, known.num_computed + count
            assert count > 0
            assert end <= len(known.token_ids)
            known.num_computed = end
            for position in range(start, end):
                slot = (known.table[position // self.block_size], position % self.block_size)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                value = content(self._read(known, position), known.token_ids[position])
                self._write(slot, POISON if sequence_id in fail else value)
            if sequence_id in fail:
                known.failed = True
                for broken in (sequence_id, *(f.child for f in children)):
                    errors[broken] = "non-finite logits"
                for fork in children:
                    self.sequences[fork.child] = replace(known)
                continue
            if known.prompt_logprobs and start < known.num_prompt - 1:
                positions = range(start + 1, min(end, known.num_prompt - 1) + 1)
                prompt_logprobs[sequence_id] = PromptLogprobs(
                    start + 1, tuple(TokenLogprobs(-float(p), 1, ()) for p in positions)
                )
            if end < len(known.token_ids):
                assert not children
                continue
            last = self._read(known, end)[-1]
            if known.beam_candidates is not None:
                candidates[sequence_id] = rank_candidates(last, known.beam_candidates)[: self.max_candidates]
                continue
            for fork in children:
                child = _Known(
                    list(known.token_ids), end, list(known.table), fork.sample_index, None, known.num_prompt, False
                )
                self.sequences[fork.child] = child
            for drawn_id in (sequence_id, *(f.child for f in children)):
                drawn = self.sequences[drawn_id]
                token_id = draw(last, drawn.sample_index)
                drawn.token_ids.append(token_id)
                tokens.append((drawn_id, token_id))
        return StepResult(plan.step_id, tokens, {}, candidates, prompt_logprobs, errors)

    def _read(self, known: _Known, length: int) -> list[int]:
        return [
            self.slots.get(known.table[p // self.block_size], [0] * self.block_size)[p % self.block_size]
            for p in range(length)
        ]

    def _write(self, slot: tuple[int, int], value: int) -> None:
        block = self.slots.setdefault(slot[0], [0] * self.block_size)
        block[slot[1]] = value


@dataclass
class Driver:
    """A core and its executor, stepped by hand, with everything that was told."""

    core: Scheduler
    executor: FakeExecutor
    plans: list[BatchPlan] = field(default_factory=list)  # unanswered
    history: list[BatchPlan] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    events: list[TokenEvent] = field(default_factory=list)

    def plan(self) -> BatchPlan | None:
        plan = self.core.schedule()
        self.core.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.history.append(plan)
        return plan

    def answer(self, fail: frozenset[int] = frozenset()) -> list[TokenEvent]:
        """Runs the oldest unanswered plan."""
        events = self.core.update(self.executor.run(self.plans.pop(0), fail))
        self.core.check_integrity()
        for event in events:
            self._note(event)
        return events

    def _note(self, event: TokenEvent) -> None:
        assert event.sequence_id not in self.finished, "news after the end"
        told = self.outputs.setdefault(event.sequence_id, [])
        assert event.first_position == len(told), "a token was lost or told twice"
        told.extend(event.token_ids)
        self.events.append(event)
        if event.finish_reason is not None:
            self.finished[event.sequence_id] = event.finish_reason

    def step(self) -> bool:
        """Plans as far as allowed, then answers once; False when there was nothing to do."""
        while self.plan() is not None:
            pass
        if not self.plans:
            return False
        self.answer()
        return True

    def run(self, max_steps: int = 2000) -> int:
        """Until everything has ended; returns the number of steps."""
        for count in range(max_steps):
            if not self.step():
                assert not self.core.has_work, "work is left, and nothing is planned"
                return count
        raise AssertionError(f"still at work after {max_steps} steps")


def force_preemption(core: Scheduler, sequence_id: int) -> None:
    """Takes a running sequence's blocks as if the pool had run dry."""
    sequence = core.sequence(sequence_id)
    assert sequence is not None
    core._preempt(sequence)
    core.check_integrity()


def create_driver(**overrides: object) -> Driver:
    core = create_core(**overrides)
    return Driver(core, FakeExecutor(core.config.block_size))
