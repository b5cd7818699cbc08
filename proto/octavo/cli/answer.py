"""One answer as it comes: printed, timed, and summed up in a line.

Text goes to stdout token by token where there is one output; of several, each is printed whole once it has ended, under
its number. With `--json` every event is one JSON object a line instead. Times are those of the reader: from the call to
the text.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import time
from collections.abc import Iterable, Iterator

from octavo.cli.terminal import ExitCode, say, write
from octavo.client import Delta, Event, Finished, FinishReason

_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT)


class Timed:
    """An answer's events, with a clock beside them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = events
        self._first: float | None = None  # seconds from the call to the first delta
        self._last = 0.0  # to the last event
        self._ends: list[Finished] = []

    def __iter__(self) -> Iterator[Event]:
        start = time.perf_counter()
        for event in self._events:
            self._last = time.perf_counter() - start
            if isinstance(event, Delta) and self._first is None:
                self._first = self._last
            if isinstance(event, Finished):
                self._ends.append(event)
            yield event

    def tell_failures(self) -> int:
        """Says which outputs ended for want of something, and why; returns the exit code that goes with it."""
        failed = [end for end in self._ends if end.reason in _FAILED]
        for end in failed:
            say(f"output {end.index} ended with {end.reason.name}: {end.error or 'it waited too long'}")
        return ExitCode.FAILURE if failed else ExitCode.OK

    @property
    def summary(self) -> str:
        """How many tokens, how fast, and why it ended."""
        tokens = sum(end.usage.num_output_tokens for end in self._ends)
        parts = [f"{tokens} tokens in {self._last:.2f} s"]
        if self._first is not None:
            parts.append(f"the first after {self._first * 1000:.0f} ms")
            if tokens > 1 and self._last > self._first:
                parts.append(f"then {(tokens - 1) / (self._last - self._first):.1f} tokens/s")
        if self._ends:
            usage = self._ends[0].usage
            cached = f", {usage.num_cached_tokens} of them cached" if usage.num_cached_tokens else ""
            parts.append(f"prompt of {usage.num_prompt_tokens} tokens{cached}")
            parts.append("ended with " + ", ".join(sorted({end.reason.name for end in self._ends})))
        return "; ".join(parts)


def print_text(events: Iterable[Event]) -> None:
    """The text of one output while it grows."""
    text = ""
    for event in events:
        if isinstance(event, Delta) and event.text:
            text = event.text
            write(text)
    if not text.endswith("\n"):
        write("\n")


def print_texts(events: Iterable[Event]) -> None:
    """The texts of several outputs, each when it has ended."""
    texts: dict[int, str] = {}
    for event in events:
        match event:
            case Delta():
                texts[event.index] = texts.get(event.index, "") + event.text
            case Finished():
                write(f"[{event.index}] {texts.get(event.index, '')}\n")


def print_json(events: Iterable[Event]) -> None:
    for event in events:
        body = {"event": _snake(type(event).__name__), **_fields(event)}
        write(json.dumps(body, ensure_ascii=False) + "\n")


def _fields(value: object) -> dict[str, object]:
    assert dataclasses.is_dataclass(value)
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: object) -> object:
    """As JSON can hold it."""
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return {name: _plain(part) for name, part in zip(value._fields, value, strict=True)}
        return [_plain(part) for part in value]
    return value


def _snake(name: str) -> str:
    """PromptLogprobs -> prompt_logprobs."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
