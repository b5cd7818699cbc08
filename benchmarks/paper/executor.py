"""An executor without a model that knows the block tables it is told, so that what sequences share can be counted.

Draws the same token for everyone. For beams it makes up scores: the best token's probability comes from a Beta(2, 1)
distribution (mean two thirds), and each further one has half of what is left.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from scheduler.core.plan import BatchPlan, StepResult

TOKEN = 1


@dataclass(slots=True)
class Held:
    """One sequence."""

    num_tokens: int
    num_computed: int
    table: list[int]
    beam_candidates: int | None


class MirrorExecutor:
    def __init__(self, seed: int = 0) -> None:
        self.sequences: dict[int, Held] = {}
        self.num_copies = 0
        self._random = random.Random(seed)

    def run(self, plan: BatchPlan) -> StepResult:
        """The answer to a plan; plans come in order."""
        for sequence_id in (*plan.finished, *plan.preempted):
            del self.sequences[sequence_id]
        for new in plan.new:
            self.sequences[new.sequence_id] = Held(
                len(new.token_ids), new.num_computed_tokens, list(new.block_ids), new.beam_candidates
            )
        for sequence_id, _ in plan.tokens:
            self.sequences[sequence_id].num_tokens += 1
        for update in plan.tables:
            self.sequences[update.sequence_id].table[update.start :] = update.block_ids
        self.num_copies += len(plan.copies)
        tokens: list[tuple[int, int]] = []
        candidates: dict[int, tuple[tuple[int, float], ...]] = {}
        for sequence_id, count in zip(plan.row_sequences, plan.row_tokens, strict=True):
            held = self.sequences[sequence_id]
            held.num_computed += count
            if held.num_computed < held.num_tokens:
                continue
            if held.beam_candidates is None:
                tokens.append((sequence_id, TOKEN))
            else:
                candidates[sequence_id] = self._scores(held.beam_candidates)
        for fork in plan.forks:
            parent = self.sequences[fork.parent]
            self.sequences[fork.child] = Held(parent.num_tokens, parent.num_computed, list(parent.table), None)
            tokens.append((fork.child, TOKEN))
        for sequence_id, _ in tokens:
            self.sequences[sequence_id].num_tokens += 1
        return StepResult(plan.step_id, tokens, candidates=candidates)

    def count_blocks(self) -> tuple[int, int]:
        """(blocks in all tables, those that differ)."""
        tables = [held.table for held in self.sequences.values()]
        return sum(map(len, tables)), len(set().union(*tables))

    def _scores(self, count: int) -> tuple[tuple[int, float], ...]:
        best = min(self._random.betavariate(2, 1), 1 - 1e-9)
        found = [(TOKEN, math.log(best))]
        found += [(TOKEN + rank, math.log((1 - best) * 0.5**rank)) for rank in range(1, count)]
        return tuple(sorted(found, key=lambda pair: -pair[1]))
