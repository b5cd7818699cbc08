"""What the clients of a chaos run ask for: every kind of request whose tokens are fixed by the request alone.

Greedy and seeded draws, penalties, several outputs, beams, log probabilities, long prompts, prompts that share a
beginning, ends at end-of-sequence tokens. The same seed gives the same requests.
"""

from __future__ import annotations

import random

from octavo.client import GenerateOptions

FIRST_TOKEN = 3  # below are special tokens


def create_requests(
    count: int, vocab_size: int, *, max_tokens: int = 240, seed: int = 0, logits: bool = True
) -> list[GenerateOptions]:
    """`logits`: the executors have some, so log probabilities and beams can be asked for."""
    r = random.Random(seed)
    shared = [r.randrange(FIRST_TOKEN, vocab_size) for _ in range(96)]
    requests = []
    for i in range(count):
        length = r.randrange(250, 400) if i % 4 == 0 else r.randrange(4, 80)
        prompt = [r.randrange(FIRST_TOKEN, vocab_size) for _ in range(length)]
        if i % 3 == 0:
            prompt = shared[: r.randrange(32, 96)] + prompt
        options = GenerateOptions(
            token_ids=prompt,
            max_tokens=r.randrange(max_tokens // 2, max_tokens),
            temperature=0.0,
            ignore_eos=i % 5 != 0,
        )
        if i % 2:
            options |= _draws(r, i)
        if logits and i % 8 == 2:
            options |= GenerateOptions(logprobs=2)
        if logits and i % 16 == 4:
            options |= GenerateOptions(prompt_logprobs=1)
        if logits and i % 24 == 6:
            options |= GenerateOptions(beam_width=3, n=2, max_tokens=40)
        requests.append(options)
    return requests


def _draws(r: random.Random, i: int) -> GenerateOptions:
    options = GenerateOptions(temperature=r.choice([0.7, 1.0, 1.3]), seed=r.getrandbits(64), n=(1, 3, 1, 2)[i // 2 % 4])
    if i % 3 == 0:
        options |= GenerateOptions(top_k=20, top_p=0.9)
    if i % 6 == 1:
        options |= GenerateOptions(frequency_penalty=0.3, repetition_penalty=1.1)
    return options


def is_plain_greedy(options: GenerateOptions) -> bool:
    """Its tokens are the model's own best ones."""
    return options["temperature"] == 0 and "beam_width" not in options and options["ignore_eos"]
