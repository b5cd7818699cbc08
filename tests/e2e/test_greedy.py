"""Greedy output equals transformers' token for token, however the scheduler cuts, mixes, preempts or reuses.

The demo model's prompts were chosen so that no step is a near tie (choose_prompts.py); there is no tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from executor.model.resolve import resolve_model
from tests.e2e.cluster import CACHE, Weights, generate_all, load_weights, running

CASES = json.loads((Path(__file__).parent / "data" / "greedy.json").read_text())
PROMPTS = [case["prompt"] for case in CASES]
TOKENS = [case["tokens"] for case in CASES]
NUM_STEPS = 64


@pytest.fixture(scope="module")
def demo_directory() -> Path:
    return resolve_model("smollm2", CACHE, lambda line: None).directory


@pytest.fixture(scope="module")
def demo(demo_directory: Path) -> Weights:
    return load_weights(demo_directory)


def test_there_are_twenty_prompts_and_no_near_tie_among_them() -> None:
    assert len(CASES) >= 20
    assert all(len(case["tokens"]) == NUM_STEPS and case["gap"] > 1e-3 for case in CASES)


def test_the_recorded_tokens_are_those_of_transformers_generate(demo_directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.float32).eval()
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_STEPS, do_sample=False, pad_token_id=0)
    assert output[:, longest:].tolist() == TOKENS


async def test_alone(demo: Weights) -> None:
    async with running(demo) as cluster:
        for prompt, tokens in list(zip(PROMPTS, TOKENS, strict=True))[:3]:
            assert await generate_all(cluster.engine, [prompt], NUM_STEPS) == [tokens]


@pytest.mark.parametrize("pipeline_depth", [1, 2, 3])
async def test_batched_at_every_pipeline_depth(demo: Weights, pipeline_depth: int) -> None:
    async with running(demo, pipeline_depth=pipeline_depth) as cluster:
        assert await generate_all(cluster.engine, PROMPTS, NUM_STEPS) == TOKENS


async def test_in_chunks_of_sixteen_tokens(demo: Weights) -> None:
    async with running(demo, max_num_seqs=16, max_num_batched_tokens=16) as cluster:
        assert await generate_all(cluster.engine, PROMPTS, NUM_STEPS) == TOKENS


@pytest.mark.parametrize("pipeline_depth", [1, 3])
async def test_after_preemption_in_a_tiny_pool(demo: Weights, pipeline_depth: int) -> None:
    async with running(demo, num_blocks=24, pipeline_depth=pipeline_depth) as cluster:
        assert await generate_all(cluster.engine, PROMPTS, NUM_STEPS) == TOKENS
        assert cluster.core.counters.preemptions > 0
        assert cluster.core.num_free_blocks == 23


async def test_with_prefix_hits(demo: Weights) -> None:
    """The second time the whole conversation so far is cached but for what its last block lacks."""
    longer = [prompt + tokens[:40] for prompt, tokens in zip(PROMPTS, TOKENS, strict=True)]
    async with running(demo, num_blocks=512) as cluster:
        assert await generate_all(cluster.engine, PROMPTS, NUM_STEPS) == TOKENS
        before = cluster.core.counters.prefix_hits
        assert await generate_all(cluster.engine, longer, NUM_STEPS - 40) == [t[40:] for t in TOKENS]
        assert cluster.core.counters.prefix_hits - before == sum((len(p) - 1) // 16 * 16 for p in longer)
