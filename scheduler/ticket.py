"""One submission in flight: what the engine tells of it, and what its reader has not read yet.

The engine writes, one reader iterates. What comes between two reads is merged to one event for each output, so a slow
reader holds no more than the tokens themselves. Knows nothing of executors, blocks or text.
Invariant: each output gets exactly one event with `finish`, and it is the output's last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from scheduler.core.plan import PromptLogprobs, TokenEvent
from scheduler.outputs import EndReason, OutputEvent, OutputFinish, Submission


@dataclass(slots=True, eq=False)
class Output:
    """One of the submission's outputs while it lives. Times are seconds of the engine's monotonic clock."""

    ticket: Ticket
    index: int
    sequence_id: int = 0  # that computes it now
    num_tokens: int = 0  # told
    num_preemptions: int = 0
    suspicions: int = 0  # executors that died with it in flight, since its last token
    deaths_alone: int = 0  # of those, with nothing else in flight, one after another at the same place
    died_at: range = range(0)  # positions in flight at the last of these
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended: bool = False


class Ticket:
    """See the module. Made by `Engine.submit`."""

    def __init__(self, submission: Submission, submitted_at: float) -> None:
        self.submission = submission
        self.submitted_at = submitted_at
        self.first_step_at: float | None = None
        self.num_cached_tokens = 0
        self.executors: list[str] = []  # incarnations that computed it
        self.outputs = [Output(self, index) for index in range(submission.n)]
        self._unread: list[OutputEvent] = []
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return all(output.ended for output in self.outputs)

    @property
    def begun(self) -> bool:
        """Something was told already."""
        return any(output.num_tokens for output in self.outputs)

    def tell(self, output: Output, event: TokenEvent, now: float) -> None:
        """News from the core, the end too."""
        if event.token_ids:
            output.num_tokens += len(event.token_ids)
            output.last_token_at = now
            if output.first_token_at is None:
                output.first_token_at = now
        finish = None
        if event.finish_reason is not None:
            reason = EndReason(event.finish_reason.value)
            finish = self._finish(output, reason, now, event.error, output.num_tokens, event.cumulative_logprob)
        self._add(
            OutputEvent(
                output.index, event.first_position, event.token_ids, event.logprobs, event.prompt_logprobs, finish
            )
        )

    def end(
        self,
        output: Output,
        reason: EndReason,
        now: float,
        error: str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """The output ends for a reason outside the core, after so many of the tokens told; None: all."""
        told = output.num_tokens if num_output_tokens is None else num_output_tokens
        finish = self._finish(output, reason, now, error, told)
        self._add(OutputEvent(output.index, output.num_tokens, finish=finish))

    def _finish(
        self,
        output: Output,
        reason: EndReason,
        now: float,
        error: str | None,
        num_output_tokens: int,
        cumulative_logprob: float | None = None,
    ) -> OutputFinish:
        assert not output.ended
        output.ended = True
        started, first, last = self.first_step_at, output.first_token_at, output.last_token_at
        return OutputFinish(
            reason=reason,
            error=error,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=output.num_preemptions,
            executors=tuple(self.executors),
            queue_seconds=(now if started is None else started) - self.submitted_at,
            prefill_seconds=first - started if first is not None and started is not None else 0.0,
            decode_seconds=last - first if last is not None and first is not None else 0.0,
            cumulative_logprob=cumulative_logprob,
        )

    def _add(self, event: OutputEvent) -> None:
        self._unread.append(event)
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[OutputEvent]]:
        while True:
            await self._news.wait()
            self._news.clear()
            unread, self._unread = self._unread, []
            yield unread if len(unread) == 1 else _merged(unread)
            if self.ended and not self._unread:
                return


def _merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """One event for each output that has news, outputs in the order in which they first spoke."""
    by_index: dict[int, list[OutputEvent]] = {}
    for event in events:
        by_index.setdefault(event.index, []).append(event)
    return [_merge(group) for group in by_index.values()]


def _merge(group: list[OutputEvent]) -> OutputEvent:
    if len(group) == 1:
        return group[0]
    prompts = [event.prompt_logprobs for event in group if event.prompt_logprobs is not None]
    prompt = None
    if prompts:
        prompt = PromptLogprobs(prompts[0].first_position, tuple(entry for p in prompts for entry in p.entries))
    return OutputEvent(
        index=group[0].index,
        first_position=group[0].first_position,
        token_ids=tuple(token_id for event in group for token_id in event.token_ids),
        logprobs=tuple(entry for event in group for entry in event.logprobs),
        prompt_logprobs=prompt,
        finish=group[-1].finish,
    )
