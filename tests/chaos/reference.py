"""What transformers says to the undisturbed answers: that each greedy token is the model's own best one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.chaos.streams import Stream
from tests.chaos.workload import is_plain_greedy
from tests.executor.model.factories import TinyModel

TIE = 1e-3  # logits as near as this are a tie between two ways to add up


def check_by_transformers(model: TinyModel, expected: Sequence[Stream], most: int = 8) -> int:
    """How many tokens were compared. Raises AssertionError."""
    plain = [stream for stream in expected if is_plain_greedy(stream.options)][:most]
    compared = 0
    for stream in plain:
        prompt, tokens = list(stream.options["token_ids"]), stream.answers[0].token_ids
        logits = model.reference_logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        behind = (logits.max(dim=1).values - chosen).max().item()
        assert behind <= TIE, f"a token's logit is {behind:g} below the best of transformers"
        compared += len(tokens)
    assert compared
    return compared
