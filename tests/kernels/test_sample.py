"""The sampling kernels draw what executor/sampler.py draws: same tokens, errors, log probabilities and candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.backends.cuda.sampling import Sampler
from executor.backends.cuda.staging import Staging
from executor.sampler import sample
from tests.executor.factories import create_new
from tests.kernels.draws import THREADS, assert_same, batch_of, check_draws, sampler, varied_rows
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher, guarded

INF = math.inf


@pytest.mark.parametrize(("count", "vocab"), [(1000, 997), (60, 5000), (40, 33)])
def test_tokens_are_those_of_the_cpu_sampler(count: int, vocab: int) -> None:
    logits, batch = varied_rows(count, vocab, seed=vocab)
    before = logits.clone()
    assert_same(sampler().sample(logits, batch), sample(logits.clone(), batch))
    assert torch.equal(logits, before), "logits are left as they are"


def test_tokens_do_not_depend_on_the_number_of_threads() -> None:
    logits, batch = varied_rows(24, 3001, seed=1)
    few, many = (sampler(threads=threads).launch(logits, batch) for threads in (64, 1024))
    assert torch.equal(few.token_ids, many.token_ids)
    asked = [draw for draw, _ in batch.logprobs]
    assert torch.equal(few.logprobs[asked], many.logprobs[asked])


def test_tokens_do_not_depend_on_who_runs_first() -> None:
    check_draws(*varied_rows(24, 1500, seed=2))


def test_sampling_has_no_undefined_behaviour() -> None:
    logits, batch = varied_rows(24, 1500, seed=3)
    launcher = SimulatorLauncher(build=SimulatorBuild(sanitize=True))
    assert_same(sampler(launcher).sample(logits, batch), sample(logits.clone(), batch))


def test_columns_may_come_through_staging() -> None:
    logits, batch = varied_rows(24, 300, seed=4)
    staged = Sampler(SimulatorLauncher(), Staging(torch.device("cpu"), 1 << 12).upload, THREADS)
    assert_same(staged.sample(logits, batch), sample(logits.clone(), batch))


@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [0, 1, 2, 50])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
def test_ties_are_kept_together_as_on_the_cpu(top_p: float, top_k: int, min_p: float) -> None:
    random = np.random.default_rng(5)
    logits = torch.from_numpy(random.integers(0, 3, (40, 400)).astype(np.float32))
    logits[20:] = 1.0  # all equal
    parameters = {"temperature": 1.0, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    batch = batch_of([create_new(i + 1, [0], [1], seed=i, **parameters) for i in range(40)], 400)
    assert_same(sampler().sample(logits, batch), sample(logits.clone(), batch))


def test_the_best_of_two_logits_closer_than_their_weights_can_tell() -> None:
    logits = torch.zeros(32, 70)
    logits[:, 40] = 1e-8
    new = [create_new(i + 1, [0], [1], seed=i, temperature=1.0, top_k=1) for i in range(32)]
    assert sampler().sample(logits, batch_of(new, 70)).token_ids.tolist() == [40] * 32


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e30])
def test_extreme_temperatures_draw_as_on_the_cpu(temperature: float) -> None:
    logits = 1e4 * torch.randn(16, 200, generator=torch.Generator().manual_seed(6))
    logits[:, 3] = -INF
    new = [create_new(i + 1, [0], [1], seed=i, temperature=temperature, top_k=i, top_p=0.9) for i in range(16)]
    batch = batch_of(new, 200)
    assert_same(sampler().sample(logits, batch), sample(logits.clone(), batch))


def test_tokens_of_no_weight_are_never_drawn() -> None:
    logits = torch.full((300, 500), -INF)
    logits[:, [7, 128, 499]] = 0.0
    new = [create_new(i + 1, [0], [1], seed=i, temperature=1.0) for i in range(300)]
    assert set(sampler().sample(logits, batch_of(new, 500)).token_ids.tolist()) == {7, 128, 499}


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1}, {"allowed_token_ids": (0,)}]
)
def test_a_row_that_is_not_finite_is_an_error_of_its_own(bad: float, sampling: Mapping[str, object]) -> None:
    logits = torch.zeros(3, 200)
    logits[0, 150], logits[2, 9] = bad, 1.0
    logits[1] = -INF
    new = [create_new(i + 1, [0], [1], **{"min_p": 0.9, **sampling}) for i in range(3)]
    batch = batch_of(new, 200)
    got = sampler().sample(logits, batch)
    assert got.errors == {0: "non-finite logits", 1: "non-finite logits"}
    assert_same(got, sample(logits.clone(), batch))


def test_a_row_with_no_token_left_says_so() -> None:
    new = create_new(1, [0], [1], allowed_token_ids=(2,), stop_token_ids=(2,), min_tokens=1)
    output = sampler().sample(torch.zeros(1, 10), batch_of([new], 10))
    assert output.errors == {0: "logit_bias, allowed_token_ids and min_tokens leave no token to draw"}


def test_forks_draw_from_the_row_of_their_parent() -> None:
    logits = guarded(torch.randn(2, 300, generator=torch.Generator().manual_seed(7)))
    common = {"num_prompt_tokens": 1, "seed": 9, "temperature": 1.0, "logprobs": 1}
    new = [create_new(i + 1, [0, 5, 5], [1], sample_index=i, **common) for i in range(3)]
    new.append(create_new(4, [0, 5, 5], [1], sample_index=3, frequency_penalty=2.0, **common))
    batch = replace(batch_of(new, 300), logits_rows=np.array([0, 0, 1, 1]))
    assert_same(sampler().sample(logits, batch), sample(logits.clone(), batch))


def test_a_vocabulary_of_one_token() -> None:
    batch = batch_of([create_new(1, [0], [1], temperature=1.0, top_k=1, top_p=0.5, logprobs=0)], 1)
    logits = guarded(torch.ones(1, 1))
    assert_same(sampler().sample(logits, batch), sample(logits.clone(), batch))


def test_no_draw_launches_nothing() -> None:
    assert sampler().sample(torch.zeros(0, 10), batch_of([], 10)).token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e-38, "frequency_penalty": 3e38},
        {"repetition_penalty": 3e38},
        {"presence_penalty": -3e38, "frequency_penalty": -3e38},
        {"presence_penalty": 3e38, "frequency_penalty": 3e38},
        {"logit_bias": {0: 3.4e38}, "presence_penalty": -3.4e38},
        {"logit_bias": {0: -3.4e38}, "presence_penalty": 3.4e38},
        {"allowed_token_ids": (1,), "presence_penalty": -3e38, "frequency_penalty": -3e38},
    ],
)
def test_penalties_that_overflow_draw_as_on_the_cpu(sampling: dict[str, object], temperature: float) -> None:
    """repetition_penalty 1e-38 made logits infinite, and the draw failed as if a mask had left no token."""
    logits = torch.tensor([[200.0, 100.0, -200.0]])
    new = create_new(1, [2, 0, 0], [1], num_prompt_tokens=1, temperature=temperature, **sampling)
    batch = batch_of([new], 3)
    assert_same(sampler().sample(logits, batch), sample(logits.clone(), batch))
