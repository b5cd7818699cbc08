"""The executor with its CUDA backend says what the CPU backend says, through the real stream, with no GPU.

The kernels are the shipped source, run on the CPU by the simulator; everything around them (plans, staging, work lists,
buckets of decode rows, sampling) is what runs on a device. Prompts with a near tie are left out, as in
choose_prompts.py; what is left must agree token for token.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executor.backends.base import AttentionMetadata
from executor.backends.cuda.graphs import Rerun, StagedDecoder
from executor.model.loader import LoadedModel, load_model
from tests.e2e.choose_prompts import MIN_GAP, greedy
from tests.e2e.cluster import Weights, generate, generate_all, load_weights, running, submission
from tests.executor.model.factories import create_tiny_model
from tests.executor.simulated import LateBackend, SimulatedBackend

NUM_STEPS = 24
NUM_PROMPTS = 10
MAX_BUCKET = 6  # some steps have more rows, and run eagerly
KINDS = ["llama", "mistral", "qwen3"]


class LateDecoder:
    """A staged decoder, made when the first step comes: by then the cluster has allocated the cache."""

    def __init__(self, model: LoadedModel, backend: SimulatedBackend) -> None:
        self._model = model
        self._backend = backend
        self._cache: list[torch.Tensor] | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        if self._cache is not self._backend.keys:
            self._cache = self._backend.keys
            self._backend.use_heads(self._model.config.num_heads)
            windows = tuple(dict.fromkeys(self._model.config.sliding_windows))
            max_blocks = -(-self._model.max_model_len // self._backend.cache.spec.block_size)
            self.staged = StagedDecoder(self._model.decoder, self._backend, windows, max_blocks, Rerun(), MAX_BUCKET)
            self.staged.capture_all()
        return self.staged.forward(token_ids, metadata, logits_indices, progress)


def simulated_weights(directory: Path, cache_dir: Path, *, deterministic: bool = False) -> Weights:
    return weights_on(SimulatedBackend(torch.float32, deterministic=deterministic), directory, cache_dir)


def weights_on(backend: SimulatedBackend, directory: Path, cache_dir: Path) -> Weights:
    model = load_model(directory, backend, cache_dir, None, lambda line: None)
    decoder = LateDecoder(model, backend)
    return Weights(dataclasses.replace(model, decoder=decoder), backend)  # type: ignore[arg-type]


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[list[int]], list[list[int]]]:
    """(directory, prompts, tokens that transformers adds to each in float64)."""
    model = create_tiny_model(tmp_path, request.param, eos_token_id=None, head_dim=64, num_hidden_layers=2)
    reference = model.reference.double()
    r = random.Random(7)
    prompts, expected = [], []
    for _ in range(NUM_PROMPTS):
        prompt = [r.randrange(3, 128) for _ in range(r.randint(1, 60))]
        tokens, gap = greedy(reference, prompt)
        if gap > MIN_GAP:
            prompts.append(prompt)
            expected.append(tokens[:NUM_STEPS])
    assert len(prompts) >= 5
    return tmp_path, prompts, expected


async def test_the_simulated_device_says_what_the_cpu_says(
    tiny: tuple[Path, list[list[int]], list[list[int]]],
) -> None:
    directory, prompts, expected = tiny
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 128}
    async with running(load_weights(directory), **limits) as cluster:
        assert await generate_all(cluster.engine, prompts, NUM_STEPS) == expected
    weights = simulated_weights(directory, directory)
    async with running(weights, **limits) as cluster:
        assert await generate_all(cluster.engine, prompts[:1], NUM_STEPS) == expected[:1]
        assert await generate_all(cluster.engine, prompts, NUM_STEPS) == expected
        assert weights.model.decoder.staged.num_graphs == 4
    async with running(weights, block_size=32, **limits) as cluster:
        assert await generate_all(cluster.engine, prompts, NUM_STEPS) == expected
    async with running(weights, num_blocks=9, **limits) as cluster:
        assert await generate_all(cluster.engine, prompts, NUM_STEPS) == expected
        assert cluster.core.counters.preemptions > 0


async def test_three_outputs_of_one_prompt_are_drawn_as_on_a_cpu(tmp_path: Path) -> None:
    """One row of logits, blocks shared and copied on the first write, the same random numbers."""
    create_tiny_model(tmp_path, "llama", eos_token_id=None, head_dim=64, num_hidden_layers=2)
    wanted = submission([5, 6, 7, 8, 9] * 4, 12, n=3, temperature=0.8, top_p=0.9, seed=11, frequency_penalty=0.3)
    drawn = []
    for weights in (load_weights(tmp_path), simulated_weights(tmp_path, tmp_path)):
        async with running(weights) as cluster:
            drawn.append([answer.token_ids for answer in await generate(cluster.engine, wanted)])
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[1]}) == 3


async def test_deterministic_answers_do_not_depend_on_who_else_runs(tmp_path: Path) -> None:
    create_tiny_model(tmp_path, "qwen3", eos_token_id=None, head_dim=64, num_hidden_layers=2)
    prompts = [[number, *range(3, 3 + 7 * number)] for number in range(1, 6)]
    weights = simulated_weights(tmp_path, tmp_path, deterministic=True)
    async with running(weights, max_num_batched_tokens=16, max_num_seqs=8) as cluster:
        alone = [await generate_all(cluster.engine, [prompt], 8) for prompt in prompts]
    async with running(weights, max_num_seqs=8) as cluster:
        together = await generate_all(cluster.engine, prompts, 8)
    assert together == [answer for (answer,) in alone]


async def test_tokens_that_stay_on_the_device_are_those_that_the_host_hears(tmp_path: Path) -> None:
    """Steps launched ahead take their tokens from the draws before them, in graphs and in eager steps."""
    create_tiny_model(tmp_path, "llama", eos_token_id=None, head_dim=64, num_hidden_layers=2)
    prompts = [[number, *range(3, 3 + 7 * number)] for number in range(1, 9)]
    wanted = submission([5, 6, 7, 8, 9] * 4, 12, n=3, temperature=0.8, top_p=0.9, seed=11)
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 12, "num_blocks": 24}
    backend = LateBackend(torch.float32)
    late = weights_on(backend, tmp_path, tmp_path)
    told = []
    for weights, depth in ((simulated_weights(tmp_path, tmp_path), 1), (late, 1), (late, 2), (late, 3)):
        before = backend.num_fed
        async with running(weights, pipeline_depth=depth, **limits) as cluster:
            answers = await generate(cluster.engine, wanted)
            told.append([answer.token_ids for answer in answers] + await generate_all(cluster.engine, prompts, 10))
        assert (backend.num_fed > before) == (depth > 1)
    assert told == [told[0]] * 4
