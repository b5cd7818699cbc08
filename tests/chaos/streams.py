"""One request as its client sees it: the answer, when each part of it came, and how it differs from what was expected.

A delta that begins before the end of what was received is a doubled token, one behind it a lost one.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field

from octavo.client import (
    AsyncClient,
    Delta,
    Finished,
    FinishReason,
    GenerateOptions,
    OctavoError,
    PromptLogprobs,
    Started,
    TokenLogprobs,
)


@dataclass(slots=True)
class Answer:
    """One output. Times are seconds of the monotonic clock."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of its deltas
    finished: Finished | None = None


@dataclass(slots=True)
class Stream:
    """All of one request."""

    options: GenerateOptions
    sent: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float:
        return min(answer.times[0] for answer in self.answers.values()) - self.sent

    @property
    def executors(self) -> set[str]:
        return {e for answer in self.answers.values() if answer.finished for e in answer.finished.executors}

    def longest_gap(self, since: float = 0.0, until: float = float("inf")) -> float:
        """The longest wait for a delta that was on at some time of [since, until]."""
        gaps = [
            after - before
            for answer in self.answers.values()
            for before, after in zip(answer.times, answer.times[1:], strict=False)
            if before <= until and after >= since
        ]
        return max(gaps, default=0.0)


async def run(client: AsyncClient, options: GenerateOptions, stream: Stream | None = None) -> Stream:
    """To its end; an error status is a complaint. `stream` may be watched meanwhile."""
    stream = stream or Stream(options)
    stream.sent = time.monotonic()
    try:
        async with aclosing(client.generate(**options)) as events:  # type: ignore[type-var]
            async for event in events:
                _take(stream, event)
    except OctavoError as error:
        stream.complaints.append(f"error: {type(error).__name__}: {error}")
    for index in range(options.get("n", 1)):
        if index not in stream.answers or stream.answers[index].finished is None:
            stream.complaints.append(f"lost: output {index} has no end")
    return stream


def _take(stream: Stream, event: Started | PromptLogprobs | Delta | Finished) -> None:
    if isinstance(event, PromptLogprobs):
        if event.first_position != 1 + len(stream.prompt_logprobs):
            stream.complaints.append(f"prompt log probabilities at {event.first_position}")
        stream.prompt_logprobs.extend(event.logprobs)
    elif isinstance(event, Delta):
        answer = stream.answers.setdefault(event.index, Answer())
        if event.first_position != len(answer.token_ids):
            kind = "lost" if event.first_position > len(answer.token_ids) else "doubled"
            stream.complaints.append(
                f"{kind}: output {event.index} goes on at {event.first_position} behind {len(answer.token_ids)} tokens"
            )
        if answer.finished is not None:
            stream.complaints.append(f"doubled: output {event.index} goes on behind its end")
        answer.token_ids.extend(event.token_ids)
        answer.text += event.text
        answer.logprobs.extend(event.logprobs)
        answer.times.append(time.monotonic())
    elif isinstance(event, Finished):
        answer = stream.answers.setdefault(event.index, Answer())
        if answer.finished is not None:
            stream.complaints.append(f"doubled: output {event.index} ends twice")
        answer.finished = event
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            stream.complaints.append(f"error: output {event.index} ended with {event.reason.name}: {event.error}")


def compare(stream: Stream, expected: Stream) -> list[str]:
    """All that is wrong with a stream."""
    complaints = list(stream.complaints)
    if stream.prompt_logprobs != expected.prompt_logprobs:
        complaints.append("differs: prompt log probabilities")
    for index, wanted in expected.answers.items():
        answer = stream.answers.get(index, Answer())
        if answer.token_ids != wanted.token_ids:
            complaints.append(f"{_difference(answer.token_ids, wanted.token_ids)} of output {index}")
        elif (answer.text, answer.logprobs) != (wanted.text, wanted.logprobs):
            complaints.append(f"differs: text or log probabilities of output {index}")
        elif answer.finished and wanted.finished and answer.finished.reason is not wanted.finished.reason:
            complaints.append(f"differs: output {index} ended with {answer.finished.reason.name}")
    return complaints


def _difference(found: list[int], wanted: list[int]) -> str:
    for position, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            return f"differs: token {one} for {other} at {position} of {len(wanted)}"
    return f"{'lost' if len(found) < len(wanted) else 'doubled'}: {len(found)} tokens for {len(wanted)}"
