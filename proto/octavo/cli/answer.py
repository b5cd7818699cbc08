"""One answer as it comes: printed, timed, and summed up in a line.

Text goes to stdout token by token where there is one output; of several, each is printed whole once it has ended, under
its number. With `--json` every event is one JSON object a line instead. Times are those of the reader: from the call to
the text. Who waits long for the first token is told where to look.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
import time
from collections.abc import Iterable, Iterator

from octavo.cli.terminal import ExitCode, say, write
from octavo.client import Delta, Event, Finished, FinishReason, OctavoError

_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT)
_PATIENCE = 10.0  # seconds without a token, before the reader is told of it


class Timed:
    """An answer's events, with a clock beside them."""

    def __init__(self, events: Iterable[Event], tells_of_waiting: bool = True) -> None:
        self._events = events
        self._tells_of_waiting = tells_of_waiting
        self._first: float | None = None  # seconds from the call to the first delta
        self._last = 0.0  # to the last event
        self._ends: list[Finished] = []

    def __iter__(self) -> Iterator[Event]:
        start = time.perf_counter()
        notice = threading.Timer(_PATIENCE, _tell_of_waiting)
        notice.daemon = True
        if self._tells_of_waiting:
            notice.start()
        try:
            for event in self._events:
                self._last = time.perf_counter() - start
                if isinstance(event, Delta | Finished):
                    notice.cancel()
                if isinstance(event, Delta) and self._first is None:
                    self._first = self._last
                if isinstance(event, Finished):
                    self._ends.append(event)
                yield event
        finally:
            notice.cancel()

    def tell_failures(self) -> int:
        """Says which outputs ended for want of something, and why; returns the exit code that goes with it."""
        failed = [end for end in self._ends if end.reason in _FAILED]
        for end in failed:
            hint = "; see `octavo load`" if end.reason is FinishReason.TIMEOUT else ""
            say(f"output {end.index} ended with {end.reason.name}: {end.error or 'it waited too long'}{hint}")
        return ExitCode.FAILURE if failed else ExitCode.OK

    @property
    def summary(self) -> str:
        """How many tokens, how fast, and why it ended."""
        tokens = sum(end.usage.num_output_tokens for end in self._ends)
        parts = [f"{tokens} tokens in {self._last:.2f} s"]
        if self._first is not None:
            parts.append(f"the first after {self._first * 1000:.0f} ms")
            if tokens > 1 and self._is_paced:
                parts.append(f"then {(tokens - 1) / (self._last - self._first):.1f} tokens/s")
        if self._ends:
            usage = self._ends[0].usage
            cached = f", {usage.num_cached_tokens} of them cached" if usage.num_cached_tokens else ""
            parts.append(f"prompt of {usage.num_prompt_tokens} tokens{cached}")
            parts.append("ended with " + ", ".join(sorted({end.reason.name for end in self._ends})))
        return "; ".join(parts)

    @property
    def _is_paced(self) -> bool:
        """Tokens came about as fast as they were computed, so that their rate says something. Those of a beam search
        come all at once; of an answer that another executor went on with, the gap is no rate either."""
        if self._first is None or self._last <= self._first or any(len(end.executors) > 1 for end in self._ends):
            return False
        return self._last - self._first >= max((end.timings.decode for end in self._ends), default=0.0) / 2


def _tell_of_waiting() -> None:
    say(f"no token after {_PATIENCE:g} s; `octavo load` says what runs, what waits and why")


def print_text(events: Iterable[Event]) -> None:
    """The text of one output while it grows."""
    text = ""
    try:
        for event in events:
            if isinstance(event, Delta) and event.text:
                text = event.text
                write(text)
    except OctavoError:
        if text and not text.endswith("\n"):
            write("\n")  # what went wrong is told on a line of its own
        raise
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
