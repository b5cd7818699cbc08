"""What a benchmark sends: endless streams of prompts, each with the number of tokens wanted in answer.

A stream is a function of its sizes and a seed, and its first n prompts are the same whatever n is, so a run for a time
and a run for a count begin alike. Token ids come from a range that most models have; of a smaller vocabulary, from its
upper part. Nothing here knows a server.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from octavo.request import GenerateOptions, request_of

TOKEN_IDS = range(100, 49_000)
LONG = 2000  # tokens of the long prompts among short ones


class Work(NamedTuple):
    """One request's prompt and its end. `num_prompt_tokens` is None where only the server can count them."""

    prompt: GenerateOptions  # one of text, token_ids and chat
    num_output_tokens: int
    num_prompt_tokens: int | None = None


class Workload(NamedTuple):
    """A stream of prompts, and how many of them make a usual run."""

    stream: Callable[[range, int], Iterator[Work]]  # of the token ids to draw from, and the seed
    num_requests: int
    concurrency: int


def drawn_from(vocab_size: int) -> range:
    """Token ids that a model of this vocabulary has."""
    return range(min(TOKEN_IDS.start, vocab_size // 2), min(TOKEN_IDS.stop, vocab_size))


def chat(ids: range, seed: int) -> Iterator[Work]:
    """Prompts of 32 to 256 tokens, answers of 16 to 256."""
    r = random.Random(seed)
    while True:
        yield _work(_tokens(r, ids, r.randint(32, 256)), r.randint(16, 256))


def shared_prefix(ids: range, seed: int) -> Iterator[Work]:
    """1,024 tokens that all share, then 32 of each one's own."""
    r = random.Random(seed)
    head = _tokens(r, ids, 1024)
    while True:
        yield _work(head + _tokens(r, ids, 32), 32)


def long_and_short(ids: range, seed: int) -> Iterator[Work]:
    """Short chats, and every eighth prompt of 2,000 tokens."""
    r = random.Random(seed)
    for number in itertools.count():
        length, out = (LONG, 16) if number % 8 == 7 else (48, 96)
        yield _work(_tokens(r, ids, length), out)


def single(ids: range, seed: int) -> Iterator[Work]:
    """128 tokens in, 65 out, meant to be sent one after the other."""
    return fixed(ids, seed, 128, 65)


def fixed(ids: range, seed: int, num_prompt_tokens: int, num_output_tokens: int) -> Iterator[Work]:
    """All of one size."""
    r = random.Random(seed)
    while True:
        yield _work(_tokens(r, ids, num_prompt_tokens), num_output_tokens)


WORKLOADS: dict[str, Workload] = {
    "chat": Workload(chat, num_requests=64, concurrency=64),
    "shared_prefix": Workload(shared_prefix, num_requests=32, concurrency=32),
    "long_and_short": Workload(long_and_short, num_requests=32, concurrency=32),
    "single": Workload(single, num_requests=8, concurrency=1),
}


class BadLine(Exception):
    """A line of a file of prompts that is none."""


def read_prompts(lines: Sequence[str], num_output_tokens: int) -> list[Work]:
    """One prompt a line: plain text, or a JSON object with one of `text`, `token_ids` and `chat`, and `max_tokens`
    where it wants another number of output tokens. Empty lines are skipped. Raises BadLine."""
    found = [
        _read_line(number, line.strip(), num_output_tokens) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise BadLine("there is no prompt in it")
    return found


def _read_line(number: int, line: str, num_output_tokens: int) -> Work:
    if not line.startswith("{"):
        return Work({"text": line}, num_output_tokens)
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BadLine(f"line {number} begins as JSON and is none: {error}") from None
    wanted = fields.pop("max_tokens", num_output_tokens)
    if len(fields) != 1 or not fields.keys() <= {"text", "token_ids", "chat"}:
        raise BadLine(f"line {number} needs one of text, token_ids and chat, and may have max_tokens: {line[:80]}")
    if not isinstance(wanted, int) or wanted < 1:
        raise BadLine(f"line {number} has max_tokens {wanted!r}")
    try:
        request_of(cast(GenerateOptions, fields))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadLine(f"line {number} cannot be sent: {error}") from None
    ids = fields.get("token_ids")
    return Work(cast(GenerateOptions, fields), wanted, len(ids) if isinstance(ids, list) else None)


def _tokens(r: random.Random, ids: range, count: int) -> list[int]:
    return [r.choice(ids) for _ in range(count)]


def _work(token_ids: list[int], num_output_tokens: int) -> Work:
    return Work({"token_ids": token_ids}, num_output_tokens, len(token_ids))
