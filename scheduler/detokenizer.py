"""Text of a stream of token ids, as it grows.

`Pieces` knows what each id stands for under the tokenizer's decoder; a `Detokenizer` joins them for one output. The
invariant: what `push` and `finish` return, joined, is the tokenizer's own decoding of all the ids, and nothing
returned is ever taken back. So text lags behind by an incomplete character; one cut off at the end of an output is
U+FFFD, as in the full decoding. One difference is wanted: where a run of byte-fallback tokens holds a bad byte, the
library makes all of its run U+FFFD; here the good characters stay, since they may have been sent. Each token costs
the same, however long the output is.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# Whole text, or bytes that make characters only together with their neighbours.
Piece = str | bytes


class UnknownDecoder(Exception):
    """The tokenizer decodes in a way that this module does not know."""


@dataclass(frozen=True, slots=True)
class _Rules:
    """A tokenizer.json's decoder, reduced to what it does to one token."""

    byte_level: bool = False  # characters stand for bytes, as in GPT-2
    byte_fallback: bool = False  # <0xE4> is one byte
    replacements: tuple[tuple[str, str], ...] = ()
    first_replacements: tuple[tuple[str, str], ...] | None = None  # of the first token, where they differ
    prefix: str = ""  # before each token but the first
    strip: tuple[str, int] = ("", 0)  # a character, and how many of them go from the start of the text


def _rules(decoder: Mapping[str, object] | None) -> _Rules:
    if decoder is None:
        return _Rules(prefix=" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    assert isinstance(steps, list)
    byte_level = byte_fallback = fused = False
    replacements: list[tuple[str, str]] = []
    first: tuple[tuple[str, str], ...] | None = None
    strip = ("", 0)
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                drops = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
                first = (*replacements, (mark, "")) if drops else None
                replacements.append((mark, " "))
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if fused:
                strip = (content, start)
            case _:
                raise UnknownDecoder(f"the tokenizer's decoder has a step that is not known here: {step}")
    return _Rules(byte_level, byte_fallback, tuple(replacements), first, "", strip)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


class Pieces:
    """What each token id stands for. Shared by all outputs; filled as ids appear."""

    def __init__(
        self,
        decoder: Mapping[str, object] | None,
        id_to_token: Callable[[int], str | None],
        special_token_ids: Iterable[int] = (),
    ) -> None:
        self._rules = _rules(decoder)
        self._id_to_token = id_to_token
        self.special_token_ids = frozenset(special_token_ids)
        self._alphabet = _byte_level_alphabet() if self._rules.byte_level else {}
        self._known: dict[int, Piece | None] = {}

    @property
    def strip(self) -> tuple[str, int]:
        return self._rules.strip

    def piece(self, token_id: int) -> Piece | None:
        """None for an id that stands for nothing, such as padding of the vocabulary."""
        try:
            return self._known[token_id]
        except KeyError:
            return self._known.setdefault(token_id, self._make(token_id, first=False))

    def first_piece(self, token_id: int) -> Piece | None:
        """The same where no token stands before it."""
        return self._make(token_id, first=True)

    def text(self, token_id: int) -> str:
        """The token on its own; bytes that are no character on their own are U+FFFD."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "replace")
        return piece or ""

    def _make(self, token_id: int, *, first: bool) -> Piece | None:
        token = self._id_to_token(token_id)
        if token is None:
            return None
        rules = self._rules
        if rules.byte_level:
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        use_first = first and rules.first_replacements is not None
        for old, new in (rules.first_replacements or ()) if use_first else rules.replacements:
            token = token.replace(old, new)
        if rules.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token if first else rules.prefix + token


class Detokenizer:
    """The text of one output.

    With a prompt, the text is what follows the prompt's own: leading blanks stay, and a character of which the
    prompt holds the first bytes belongs to the output, where it becomes complete.
    """

    def __init__(
        self, pieces: Pieces, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces
        self._hidden = pieces.special_token_ids if skip_special_tokens else frozenset()
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._strip_character, self._num_strip = pieces.strip
        self._skip_prompt(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """New text, if there is any yet."""
        if token_id in self._hidden:
            return ""
        piece = self._pieces.first_piece(token_id) if self._first else self._pieces.piece(token_id)
        if piece is None:
            return ""
        self._first = False
        text = self._bytes.decode(piece) if isinstance(piece, bytes) else self._end_of_bytes() + piece
        return self._stripped(text) if self._num_strip and text else text

    def finish(self) -> str:
        """What was held back. Nothing may follow."""
        return self._stripped(self._end_of_bytes())

    def _end_of_bytes(self) -> str:
        return self._bytes.decode(b"", final=True)

    def _stripped(self, text: str) -> str:
        while self._num_strip and text:
            if text[0] != self._strip_character:
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text

    def _skip_prompt(self, token_ids: Sequence[int]) -> None:
        """Takes up the prompt's end: a character is at most four bytes, so that its last four bytes tell all."""
        tail: list[bytes] = []
        for token_id in reversed(token_ids):
            piece = None if token_id in self._hidden else self._pieces.piece(token_id)
            if not piece:
                continue
            self._first, self._num_strip = False, 0
            if isinstance(piece, str):
                break
            tail.append(piece)
            if sum(map(len, tail)) >= 4:
                break
        self._bytes.decode(b"".join(reversed(tail)))


def prompt_text(pieces: Pieces, token_ids: Sequence[int]) -> str:
    """The prompt's text as far as its characters are complete: a Detokenizer given this prompt goes on from there."""
    detokenizer = Detokenizer(pieces)
    return "".join(map(detokenizer.push, token_ids))
