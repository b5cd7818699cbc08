"""Finds stop strings in text that arrives in parts, and holds back what may become one.

An Aho-Corasick automaton over characters: one state for each prefix of a stop string, so that a character costs the
same however many strings there are, and the text to hold back is exactly as long as the state is deep. The match that
is complete first wins; of those that end together, the longest. So the result does not depend on how the text was cut
into tokens, and nothing of a stop string was returned before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class _State:
    __slots__ = ("depth", "following", "match", "suffix")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.following: dict[str, _State] = {}
        self.suffix: _State | None = None  # of the longest proper suffix that is a prefix too; None at the root
        self.match: str | None = None  # longest stop string that ends here


class StopStrings:
    """The automaton of one request's stop strings; shared by its outputs."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.root = _State(0)
        for string in stop:
            state = self.root
            for character in string:
                state = state.following.setdefault(character, _State(state.depth + 1))
            state.match = string
        self._link_suffixes()

    def step(self, state: _State, character: str) -> _State:
        origin: _State | None = state
        while origin is not None:
            if (following := origin.following.get(character)) is not None:
                return following
            origin = origin.suffix
        return self.root

    def _link_suffixes(self) -> None:
        waiting = deque([self.root])
        while waiting:
            state = waiting.popleft()
            for character, following in state.following.items():
                following.suffix = self.root if state.suffix is None else self.step(state.suffix, character)
                following.match = following.match or following.suffix.match
                waiting.append(following)


class Scanned(NamedTuple):
    """Text that is free to go, and the stop string that was found after it."""

    text: str
    stop: str | None


class StopScanner:
    """One output's place in the automaton. After a match it is spent."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = strings.root
        self._held = ""

    def push(self, text: str) -> Scanned:
        """On a match the text ends before the stop string, and what follows the stop string is dropped."""
        held = self._held + text
        state = self._state
        for position, character in enumerate(text, start=len(self._held) + 1):
            state = self._strings.step(state, character)
            if state.match is not None:
                self._held = ""
                return Scanned(held[: position - len(state.match)], state.match)
        self._state = state
        free = len(held) - state.depth
        self._held = held[free:]
        return Scanned(held[:free], None)

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held
