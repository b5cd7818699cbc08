"""An executor without a model: it keeps count of tokens, and every sequence that is due draws the same one.

What remains of a step is the scheduler's own work. Beams and prompt log probabilities are not its business.
"""

from __future__ import annotations

from scheduler.core.plan import BatchPlan, StepResult

TOKEN = 1


class NullExecutor:
    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        self._num_computed: dict[int, int] = {}

    def run(self, plan: BatchPlan) -> StepResult:
        """The answer to a plan; plans come in order."""
        for sequence_id in (*plan.finished, *plan.preempted):
            del self._num_tokens[sequence_id], self._num_computed[sequence_id]
        for new in plan.new:
            self._num_tokens[new.sequence_id] = len(new.token_ids)
            self._num_computed[new.sequence_id] = new.num_computed_tokens
        tokens: list[tuple[int, int]] = []
        for sequence_id, count in zip(plan.row_sequences, plan.row_tokens, strict=True):
            self._num_computed[sequence_id] += count
            if self._num_computed[sequence_id] == self._num_tokens[sequence_id]:
                tokens.append((sequence_id, TOKEN))
        for fork in plan.forks:
            self._num_tokens[fork.child] = self._num_tokens[fork.parent]
            self._num_computed[fork.child] = self._num_computed[fork.parent]
            tokens.append((fork.child, TOKEN))
        for sequence_id, _ in tokens:
            self._num_tokens[sequence_id] += 1
        return StepResult(plan.step_id, tokens)
