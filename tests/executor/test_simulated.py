"""The executor that computes no model: what it draws, what it refuses, and what it tells of itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

from executor.config import parse_arguments
from executor.plan import BatchPlan, Fork, NewSequence, Sampling
from executor.simulated import SimulatedRunner, load_simulated

PROMPT = [3, 1, 4, 1, 5, 9]
GREEDY = Sampling()


def create_runner(*flags: str, step_ms: float = 0) -> SimulatedRunner:
    config = parse_arguments([f"--simulate-step-ms={step_ms}", "--max-model-len=64", *flags], {})
    runner = load_simulated(config, "cpu", lambda line: None).runner
    assert isinstance(runner, SimulatedRunner)
    return runner


def create_new(tokens: Sequence[int], sampling: Sampling, sample_index: int = 0) -> NewSequence:
    return NewSequence(1, tokens, len(PROMPT), 0, [1, 2], sample_index, sampling)


def draw(count: int, tokens: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, sample_index: int = 0) -> list[int]:
    runner = create_runner()
    new = [create_new(tokens, sampling, sample_index)]
    drawn = []
    for step in range(count):
        rows = [1] if step else [len(tokens)]
        drawn += runner.run(BatchPlan(step + 1, new=[] if step else new, row_sequences=[1], row_tokens=rows)).token_ids
    return drawn


def test_a_sequence_goes_on_elsewhere_as_it_would_have_here() -> None:
    whole = draw(8)
    assert draw(5, [*PROMPT, *whole[:3]]) == whole[3:]
    sampling = Sampling(temperature=1.0, seed=7)
    whole = draw(8, sampling=sampling)
    assert draw(5, [*PROMPT, *whole[:3]], sampling) == whole[3:]


def test_seed_and_sample_index_count_only_where_something_is_drawn() -> None:
    warm = [Sampling(temperature=1.0, seed=seed) for seed in (1, 2)]
    assert draw(8, sampling=warm[0]) != draw(8, sampling=warm[1])
    assert draw(8, sampling=warm[0]) != draw(8, sampling=warm[0], sample_index=1)
    assert draw(8, sampling=Sampling(seed=1)) == draw(8, sampling=Sampling(seed=2))


def test_a_prompt_in_chunks_draws_the_same() -> None:
    runner = create_runner()
    first = runner.run(BatchPlan(1, new=[create_new(PROMPT, GREEDY)], row_sequences=[1], row_tokens=[4]))
    assert list(first.token_ids) == []
    assert list(runner.run(BatchPlan(2, row_sequences=[1], row_tokens=[2])).token_ids) == draw(1)


def test_forks_draw_with_their_own_index() -> None:
    runner, sampling = create_runner(), Sampling(temperature=1.0, seed=7)
    plan = BatchPlan(
        1, new=[create_new(PROMPT, sampling)], row_sequences=[1], row_tokens=[len(PROMPT)], forks=[Fork(1, 2, 1)]
    )
    result = runner.run(plan)
    assert list(result.sequence_ids) == [1, 2]
    assert list(result.token_ids) == [draw(1, sampling=sampling)[0], draw(1, sampling=sampling, sample_index=1)[0]]


def test_what_needs_logits_fails_alone() -> None:
    runner = create_runner()
    other = NewSequence(2, PROMPT, len(PROMPT), 0, [3, 4], 0, GREEDY)
    plan = BatchPlan(
        1,
        new=[create_new(PROMPT, Sampling(logprobs=1)), other],
        row_sequences=[1, 2],
        row_tokens=[len(PROMPT), len(PROMPT)],
    )
    result = runner.run(plan)
    assert dict(result.errors) == {1: "a simulated model has no log probabilities"}
    assert list(result.sequence_ids) == [2]


def test_a_step_takes_its_time_and_a_plan_without_rows_none() -> None:
    runner = create_runner(step_ms=30)
    began = time.monotonic()
    runner.run(BatchPlan(1, new=[create_new(PROMPT, GREEDY)], row_sequences=[1], row_tokens=[len(PROMPT)]))
    assert time.monotonic() - began >= 0.03
    assert runner.progress == 1
    runner.run(BatchPlan(2, finished=[1]))
    assert (runner.progress, len(runner.sequences)) == (1, 0)


def test_end_tokens_are_never_drawn() -> None:
    runner = SimulatedRunner(create_runner().limits, 0, never_drawn=[token for token in range(258) if token != 7])
    result = runner.run(BatchPlan(1, new=[create_new(PROMPT, GREEDY)], row_sequences=[1], row_tokens=[len(PROMPT)]))
    assert list(result.token_ids) == [7]


def test_it_says_that_it_is_simulated() -> None:
    config = parse_arguments(["--simulate-step-ms=20"], {})
    assert config.model == "simulated"
    model = load_simulated(config, "cpu", lambda line: None).model
    assert (model.name, model.device, model.deterministic) == ("simulated", "simulated", True)
    assert model.fingerprint == load_simulated(config, "cpu", lambda line: None).model.fingerprint
