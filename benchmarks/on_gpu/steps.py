"""The executor's own step, timed: plans as a scheduler of pipeline depth 2 would send them, each launched before the
one ahead of it is collected, as the step thread does.

Everything that a step costs the executor is in it: applying the plan, the copy to the device, the forward, sampling,
the tokens back on the host. What gRPC and the scheduler add is not. Works over any runner, so it is tested on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from executor.launched import Launched
from executor.plan import BatchPlan, NewSequence, Sampling
from executor.runner import Runner

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens over seconds, of `num_steps` steps."""

    num_tokens: int
    num_steps: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def milliseconds_per_step(self) -> float:
        return self.seconds * 1e3 / self.num_steps


class Session:
    """Gives plans their numbers and sequences their blocks."""

    def __init__(self, runner: Runner, clock: Clock = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self._step = 0
        self._next_block = 1
        self._running: Launched | None = None  # the step that is not collected
        runner.reset()

    def decode(self, batch: int, context: int, num_steps: int, warm_steps: int = 3) -> Measured:
        """`batch` sequences that already have `context` tokens in cache; each step adds one to all of them."""
        length = context + warm_steps + num_steps + 1
        new = [self._new(number, context + 1, length, computed=context) for number in range(batch)]
        ones = [1] * batch
        ids = list(range(batch))
        self._run(BatchPlan(self._number(), new=new, row_sequences=ids, row_tokens=ones))
        for _ in range(warm_steps):
            self._run(BatchPlan(self._number(), row_sequences=ids, row_tokens=ones))
        began = self._begin()
        for _ in range(num_steps):
            self._run(BatchPlan(self._number(), row_sequences=ids, row_tokens=ones))
        return Measured(batch * num_steps, num_steps, self._end() - began)

    def prefill(self, prompts: Sequence[int], budget: int) -> Measured:
        """Prompts of so many tokens, in chunks of at most `budget` tokens a step, none waiting for another's decode."""
        steps = 0
        began = self._begin()
        for number, length in enumerate(prompts):
            new = [self._new(number, length, length + 1)]
            done = 0
            while done < length:
                chunk = min(budget, length - done)
                self._run(BatchPlan(self._number(), new=new, row_sequences=[number], row_tokens=[chunk]))
                new, done, steps = [], done + chunk, steps + 1
        return Measured(sum(prompts), steps, self._end() - began)

    def mixed(self, batch: int, context: int, chunk: int, num_steps: int) -> Measured:
        """Decode rows beside one prompt that comes in chunks: every step computes batch + chunk tokens."""
        rows = [self._new(number, context + 1, context + num_steps + 2, computed=context) for number in range(batch)]
        prompt = self._new(batch, chunk * num_steps, chunk * num_steps + 1)
        ids, tokens = list(range(batch + 1)), [1] * batch + [chunk]
        began = self._begin()
        for step in range(num_steps):
            new = [*rows, prompt] if step == 0 else []
            self._run(BatchPlan(self._number(), new=new, row_sequences=ids, row_tokens=tokens))
        return Measured((batch + chunk) * num_steps, num_steps, self._end() - began)

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int, budget: int) -> Measured:
        """What a peer is given whole: prompts computed in chunks of `budget` tokens a step, then `new_tokens` tokens
        for each. Counts the tokens that come out."""
        steps = 0
        began = self._begin()
        waiting = [
            self._new(number, len(prompt), len(prompt) + new_tokens, tokens=prompt)
            for number, prompt in enumerate(prompts)
        ]
        left = {new.sequence_id: len(new.token_ids) for new in waiting}
        fresh = {new.sequence_id: new for new in waiting}
        while left:
            rows: dict[int, int] = {}
            room = budget
            for number, tokens in left.items():
                if room == 0:
                    break
                rows[number] = min(tokens, room)
                room -= rows[number]
            new_ones = [fresh.pop(number) for number in rows if number in fresh]
            self._run(BatchPlan(self._number(), new=new_ones, row_sequences=list(rows), row_tokens=list(rows.values())))
            left = {
                number: tokens - rows.get(number, 0) for number, tokens in left.items() if tokens > rows.get(number, 0)
            }
            steps += 1
        ids = list(range(len(prompts)))
        for _ in range(new_tokens - 1):
            self._run(BatchPlan(self._number(), row_sequences=ids, row_tokens=[1] * len(ids)))
            steps += 1
        return Measured(len(prompts) * new_tokens, steps, self._end() - began)

    def _new(
        self, number: int, num_tokens: int, longest: int, computed: int = 0, tokens: Sequence[int] | None = None
    ) -> NewSequence:
        limits = self._runner.limits
        blocks = -(-longest // limits.block_size)
        assert self._next_block + blocks <= limits.num_blocks, "the cache is too small for this run"
        first, self._next_block = self._next_block, self._next_block + blocks
        return NewSequence(
            sequence_id=number,
            token_ids=tokens or [(7 * number + 13 * place) % limits.vocab_size for place in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            num_computed_tokens=computed,
            block_ids=list(range(first, first + blocks)),
            sample_index=0,
            sampling=Sampling(),
        )

    def _number(self) -> int:
        self._step += 1
        return self._step

    def _begin(self) -> float:
        self._collect()
        return self._clock()

    def _end(self) -> float:
        """Once nothing runs any more."""
        self._collect()
        return self._clock()

    def _run(self, plan: BatchPlan) -> None:
        if not self._runner.can_follow(plan):
            self._collect()
        launched = self._runner.launch(plan)
        self._collect()
        self._running = launched

    def _collect(self) -> None:
        if self._running is not None:
            result = self._running.collect()
            assert not result.errors, result.errors
            self._running = None
