"""One output of a request between the engine's tokens and the client's messages.

Owns the output's text: detokenized, stop strings looked for token by token, and what was not sent yet merged into one
pending delta, so that a slow reader costs one message. An output's tokens are all up to and including the one whose
text completed a stop string; its text ends before the stop string. Both are final: neither depends on how the tokens
arrived. Text of the first `min_tokens` tokens is no part of a stop string.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.plan import TokenLogprobs
from scheduler.detokenizer import Detokenizer, Pieces
from scheduler.outputs import EndReason, OutputEvent, OutputFinish, Submission
from scheduler.stop_strings import StopScanner, StopStrings


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """News of one output for its client."""

    index: int
    first_position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The last word on one output, for its client."""

    index: int
    reason: EndReason
    num_output_tokens: int
    stop: str | None  # the stop string found
    stop_token_id: int | None
    finish: OutputFinish  # the engine's


class Output:
    """Grows by `take_in`, is emptied by `take_delta`, and has `end` set once."""

    def __init__(
        self,
        index: int,
        submission: Submission,
        pieces: Pieces,
        stop_strings: StopStrings | None,
        *,
        include_stop: bool = False,
        prefix: str = "",
    ) -> None:
        """`prefix` is text to send before the output's own: the prompt's, for echo."""
        self.index = index
        self.num_tokens = 0
        self.stop: str | None = None
        self.end: OutputEnd | None = None
        self._stop_token_id: int | None = None
        self._stop_token_ids = submission.sampling.stop_token_ids
        self._min_tokens = submission.sampling.min_tokens
        self._include_stop = include_stop
        self._pieces = pieces
        self._detokenizer = Detokenizer(pieces, submission.prompt_token_ids)
        self._scanner = StopScanner(stop_strings) if stop_strings is not None else None
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[TokenLogprobs] = []
        self._pending_text: list[str] = [prefix] if prefix else []

    def take_in(self, event: OutputEvent) -> bool:
        """True: this event completed a stop string, and the engine must be told to finish at `num_tokens`."""
        if self.end is not None:
            return False
        stopped_before = self.stop is not None
        if not stopped_before:
            assert not event.token_ids or event.first_position == self.num_tokens, "tokens come once and in order"
            for offset, token_id in enumerate(event.token_ids):
                self._pending_logprobs.extend(event.logprobs[offset : offset + 1])
                self._take_token(token_id)
                if self.stop is not None:
                    break
        if event.finish is not None:
            self._finish(event.finish)
        return self.stop is not None and not stopped_before and event.finish is None

    def take_delta(self, max_tokens: int) -> OutputDelta | None:
        """What was not sent yet; of more than `max_tokens` tokens the first, and the text with the last of them."""
        if not self._pending_ids and not self._pending_text:
            return None
        ids, self._pending_ids = self._pending_ids[:max_tokens], self._pending_ids[max_tokens:]
        logprobs, self._pending_logprobs = self._pending_logprobs[:max_tokens], self._pending_logprobs[max_tokens:]
        text = ""
        if not self._pending_ids:
            text = "".join(self._pending_text)
            self._pending_text.clear()
        first = self.num_tokens - len(self._pending_ids) - len(ids)
        return OutputDelta(self.index, first, tuple(ids), text, tuple(logprobs))

    def _take_token(self, token_id: int) -> None:
        position = self.num_tokens
        self.num_tokens += 1
        self._pending_ids.append(token_id)
        if token_id in self._stop_token_ids and position >= self._min_tokens:
            self._stop_token_id = token_id  # its text, if wanted, comes last of all
            return
        self._take_text(self._detokenizer.push(token_id), scan=position >= self._min_tokens)

    def _take_text(self, text: str, *, scan: bool = True) -> None:
        if not text:
            return
        if self._scanner is None or not scan:
            self._pending_text.append(text)
            return
        free, self.stop = self._scanner.push(text)
        if free:
            self._pending_text.append(free)
        if self.stop is not None and self._include_stop:
            self._pending_text.append(self.stop)

    def _finish(self, finish: OutputFinish) -> None:
        if self.stop is None:
            self._take_text(self._detokenizer.finish())
        if self.stop is None and self._scanner is not None and (held := self._scanner.finish()):
            self._pending_text.append(held)
        # With its stop string found the output is complete, whatever happened to the request meanwhile.
        reason = finish.reason if self.stop is None else EndReason.STOP
        stop_token_id = self._stop_token_id if self.stop is None and reason is EndReason.STOP else None
        if stop_token_id is not None and self._include_stop:
            self._pending_text.append(self._pieces.text(stop_token_id))
        self.end = OutputEnd(self.index, reason, self.num_tokens, self.stop, stop_token_id, finish)
