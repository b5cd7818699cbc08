"""The requests that benchmarks and tests of scheduling are run with: prompt token ids, and how many tokens to draw.

Each is a function of its sizes and a seed, so that any system can be given the very same ones, and a figure can be
checked on draws that nobody tuned to. Nothing here knows a tokenizer: ids come from a range that every model has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

TOKEN_IDS = range(100, 49_000)
LONG_PROMPT = 2000  # tokens


class Work(NamedTuple):
    """One request."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def _tokens(r: random.Random, count: int) -> list[int]:
    return [r.choice(TOKEN_IDS) for _ in range(count)]


def chat(n: int = 64, seed: int = 0) -> list[Work]:
    """All at once: prompts of 32 to 256 tokens, outputs of 16 to 256."""
    r = random.Random(seed)
    return [Work(_tokens(r, r.randint(32, 256)), r.randint(16, 256)) for _ in range(n)]


def shared_prefix(n: int = 32, seed: int = 1, prefix: int = 1024, tail: int = 32, out: int = 32) -> list[Work]:
    """The same system prompt of `prefix` tokens before every request's own `tail`."""
    r = random.Random(seed)
    head = _tokens(r, prefix)
    return [Work(head + _tokens(r, tail), out) for _ in range(n)]


def long_and_short(n: int = 32, seed: int = 2) -> list[Work]:
    """Short chats, and every eighth request a prompt of 2,000 tokens: what chunked prefill is for."""
    r = random.Random(seed)
    kinds = [(LONG_PROMPT, 16) if i % 8 == 7 else (48, 96) for i in range(n)]
    return [Work(_tokens(r, length), out) for length, out in kinds]


def single(seed: int = 3, prompt: int = 128, out: int = 65) -> list[Work]:
    """One request alone."""
    return [Work(_tokens(random.Random(seed), prompt), out)]


WORKLOADS: dict[str, Callable[..., list[Work]]] = {
    "chat": chat,
    "shared_prefix": shared_prefix,
    "long_and_short": long_and_short,
    "single": single,
}
