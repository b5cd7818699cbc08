"""Greedy output of tiny random models of each family equals transformers', through the whole path.

Random prompts; those with a near tie in float64 are left out, as in choose_prompts.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.choose_prompts import MIN_GAP, greedy
from tests.e2e.cluster import generate_all, load_weights, running
from tests.executor.model.factories import CONFIGS, create_tiny_model

NUM_STEPS = 64
NUM_PROMPTS = 16


@pytest.fixture(params=CONFIGS)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[list[int]], list[list[int]]]:
    """(directory, prompts, tokens that transformers adds to each in float64)."""
    model = create_tiny_model(tmp_path, request.param, eos_token_id=None)
    reference = model.reference.double()
    r = random.Random(7)
    prompts, expected = [], []
    for _ in range(NUM_PROMPTS):
        prompt = [r.randrange(3, 128) for _ in range(r.randint(1, 60))]
        tokens, gap = greedy(reference, prompt)
        if gap > MIN_GAP:
            prompts.append(prompt)
            expected.append(tokens)
    assert len(prompts) >= 8
    return tmp_path, prompts, expected


async def test_tiny_models_say_what_transformers_says(tiny: tuple[Path, list[list[int]], list[list[int]]]) -> None:
    directory, prompts, expected = tiny
    weights = load_weights(directory)
    shorter = [prompt + tokens[:30] for prompt, tokens in zip(prompts, expected, strict=True)]
    for limits in (
        {"pipeline_depth": 1},
        {"pipeline_depth": 2, "block_size": 32},
        {"pipeline_depth": 3},
        {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    ):
        async with running(weights, **limits) as cluster:
            assert await generate_all(cluster.engine, prompts[:1], NUM_STEPS) == expected[:1]
            assert await generate_all(cluster.engine, prompts, NUM_STEPS) == expected
            assert await generate_all(cluster.engine, shorter, 34) == [tokens[30:] for tokens in expected]
            assert cluster.core.counters.prefix_hits > 0
    async with running(weights, num_blocks=14, max_model_len=160) as cluster:
        assert await generate_all(cluster.engine, prompts, NUM_STEPS) == expected
        assert cluster.core.counters.preemptions > 0
