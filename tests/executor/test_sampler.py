"""Each parameter's exact effect, the distribution of draws, and that no draw depends on its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from executor.draws import sampling_batch
from executor.plan import BatchPlan, NewSequence
from executor.sampler import NO_TOKEN_LEFT, SamplerOutput, SamplingBatch, sample
from executor.sequences import Sequences
from tests.executor.factories import create_limits, create_new

INF = math.inf


def sample_rows(logits: Sequence[Sequence[float]] | torch.Tensor, new: Sequence[NewSequence]) -> SamplerOutput:
    rows = logits if isinstance(logits, torch.Tensor) else torch.tensor(logits, dtype=torch.float32)
    before = rows.clone()
    output = sample(rows, batch_of(new, rows.shape[1]))
    assert torch.equal(rows.nan_to_num(), before.nan_to_num()), "logits are left as they are"
    return output


def batch_of(new: Sequence[NewSequence], vocab: int) -> SamplingBatch:
    sequences = Sequences(create_limits(vocab_size=vocab, max_num_seqs=len(new)))
    assert sequences.apply(BatchPlan(1, new=new)) == {}
    return sampling_batch(sequences, sequences.slots([each.sequence_id for each in new]), None)


def one(logits: Sequence[float], tokens: Sequence[int] = (0,), num_prompt_tokens: int | None = None, **sampling: object) -> int:  # fmt: skip  # noqa: E501
    new = create_new(1, tokens, [1], num_prompt_tokens=num_prompt_tokens, **sampling)
    output = sample_rows([logits], [new])
    assert output.errors == {}
    return int(output.token_ids[0])


def support(logits: Sequence[float], count: int = 400, **sampling: object) -> set[int]:
    """The tokens that come up over many seeds."""
    new = [create_new(seed + 1, [0], [1], seed=seed, **{"temperature": 1.0, **sampling}) for seed in range(count)]
    output = sample_rows([logits] * count, new)
    assert output.errors == {}
    return set(output.token_ids.tolist())


def test_greedy_takes_the_largest_logit() -> None:
    assert one([0.5, 2.0, 1.0]) == 1


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert one([0.5, 2.0, 2.0, 2.0]) == 1


def test_a_logit_bias_is_added() -> None:
    assert one([0.5, 2.0, 1.0], logit_bias={0: 1.6}) == 0
    assert one([0.5, 2.0, 1.0], logit_bias={1: -1.2}) == 2


def test_only_allowed_ids_are_drawn() -> None:
    assert one([0.5, 2.0, 1.0], allowed_token_ids=(0, 2)) == 2
    assert support([0.5, 2.0, 1.0, 1.0], allowed_token_ids=(0, 3)) == {0, 3}


def test_stop_ids_are_not_drawn_below_min_tokens() -> None:
    stop = {"stop_token_ids": (1,), "min_tokens": 2}
    logits = [0.5, 2.0, 1.0]
    drawn = [one(logits, [0] * (1 + position), 1, **stop) for position in range(4)]
    assert drawn == [2, 2, 1, 1]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_all_known_tokens() -> None:
    assert one([2.0, 1.5, -1.0], [0], 1, repetition_penalty=1.5) == 1  # 2 / 1.5 < 1.5
    assert one([2.0, 1.5, -1.0], [1, 0], 1, repetition_penalty=1.5) == 0  # both known: the order stays
    assert one([-1.0, -1.5], [0], 1, repetition_penalty=2.0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("sampling", "token"),
    [
        ({"repetition_penalty": 1e-38}, 0),  # 200 / 1e-38 is beyond float32
        ({"repetition_penalty": 1e-38, "frequency_penalty": 3e38}, 1),
        ({"repetition_penalty": 3e38}, 1),
        ({"presence_penalty": -3e38, "frequency_penalty": -3e38}, 0),
        ({"presence_penalty": 3e38, "frequency_penalty": 3e38}, 1),
        ({"logit_bias": {0: 3.4e38}, "presence_penalty": -3.4e38}, 0),
        ({"logit_bias": {0: -3.4e38}, "presence_penalty": 3.4e38}, 1),
        ({"allowed_token_ids": (1,), "presence_penalty": -3e38, "frequency_penalty": -3e38}, 1),
    ],
)
def test_penalties_that_overflow_float32_leave_a_token_to_draw(
    sampling: dict[str, object], token: int, temperature: float
) -> None:
    """repetition_penalty 1e-38 made logits infinite, and the draw failed as if a mask had left no token."""
    assert one([200.0, 100.0, -200.0], [2, 0, 0], 1, temperature=temperature, **sampling) == token


def test_beam_candidates_after_a_penalty_that_overflows_have_finite_log_probabilities() -> None:
    new = create_new(1, [0, 2], [1], num_prompt_tokens=1, repetition_penalty=1e-38, beam_candidates=3)
    assert sample_rows([[2.0, 1.0, -2.0]], [new]).candidates[0][0] == (0, 0.0)


def test_a_mask_that_forbids_every_token_is_told_even_beside_penalties_that_overflow() -> None:
    new = create_new(1, [0], [1], repetition_penalty=1e-38, min_tokens=5, stop_token_ids=(0,), allowed_token_ids=(0,))
    assert sample_rows([[2.0, 1.0]], [new]).errors == {0: NO_TOKEN_LEFT}


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    assert one([2.0, 1.5], [0, 0, 0], 3, presence_penalty=1.0, frequency_penalty=1.0) == 0
    assert one([2.0, 1.5], [1, 0], 1, presence_penalty=0.4) == 0
    assert one([2.0, 1.5], [1, 0], 1, presence_penalty=0.6) == 1
    assert one([2.0, 1.5], [1, 0, 0], 1, frequency_penalty=0.3) == 1
    assert one([2.0, 1.5], [1, 0], 1, frequency_penalty=0.3) == 0


def test_a_low_temperature_draws_the_best_token() -> None:
    assert support([1.0, 1.1, 0.0], temperature=1e-3) == {1}


@pytest.mark.parametrize("temperature", [1e-38, 1e-30])
def test_a_tiny_temperature_is_greedy_and_no_error(temperature: float) -> None:
    assert support([1.0, 1.1, -3e5], temperature=temperature) == {1}


def test_top_k_keeps_the_k_best() -> None:
    assert support([1.0, 0.9, 0.8, 0.7, 0.6], top_k=3) == {0, 1, 2}


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    assert support([1.0, 0.9, 0.9, 0.9, 0.6], top_k=2) == {0, 1, 2, 3}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert support([1.0, 0.9, 0.8], top_k=100) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert support(logits, top_p=0.39) == {0}
    assert support(logits, top_p=0.41) == {0, 1}
    assert support(logits, top_p=0.75) == {0, 1, 2}
    assert support(logits, top_p=0.95) == {0, 1, 2, 3}


def test_top_p_keeps_all_that_tie_with_the_last() -> None:
    assert support([2.0, 1.0, 1.0, 1.0, 0.0], top_p=0.6) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert support(logits, top_k=2, top_p=0.56) == {0}  # 0.4 / 0.7 = 0.571


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert support(logits, min_p=0.59) == {0, 1}
    assert support(logits, min_p=0.61) == {0}


def test_top_p_counts_unlikely_tokens_where_the_likely_ones_do_not_make_it_up() -> None:
    flat = torch.full((1, 5000), -12.0)
    flat[0, :2500] = -11.9
    flat[0, 0] = -1.9
    new = [create_new(seed + 1, [0], [1], seed=seed, temperature=1.0, top_p=0.9) for seed in range(300)]
    seen = set(sample(flat.expand(300, -1), batch_of(new, 5000)).token_ids.tolist())
    assert max(seen) < 2500
    assert max(seen) > 2000


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 1.0, "logit_bias": {3: 1.0}},
    ],
)
def test_draws_follow_the_distribution(sampling: dict[str, float]) -> None:
    count, vocab = 20_000, 600
    logits = np.full(vocab, -INF, np.float32)
    places = [0, 3, 17, 255, 256, 257, 400, 511, 512, 599]
    logits[places] = np.random.default_rng(1).standard_normal(10)
    new = [create_new(i + 1, [0], [1], seed=i, **sampling) for i in range(count)]
    rows = torch.from_numpy(logits).expand(count, vocab)
    output = sample(rows.contiguous(), batch_of(new, vocab))
    expected = reference_distribution(logits, **sampling)
    observed = np.bincount(output.token_ids, minlength=vocab)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum()
    assert chi_square < 33.7  # the 0.9999 quantile at 9 degrees of freedom


def reference_distribution(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, logit_bias: dict[int, float] | None = None) -> np.ndarray:  # fmt: skip  # noqa: E501
    values = logits.astype(np.float64)
    for token, bias in (logit_bias or {}).items():
        values[token] += bias
    values = values / temperature
    order = np.argsort(-values)
    if top_k:
        values[order[top_k:]] = -INF
    p = np.exp(values - values.max())
    p /= p.sum()
    kept = np.zeros(len(p), bool)
    mass = 0.0
    for token in order:
        if mass < top_p:
            kept[token] = True
        mass += p[token]
    kept &= p >= min_p * p.max()
    p = np.where(kept, p, 0)
    result: np.ndarray = p / p.sum()
    return result


def mixed_rows(count: int, vocab: int) -> tuple[torch.Tensor, list[NewSequence]]:
    """Rows of every kind."""
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(count, vocab, generator=generator)
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.9, "top_k": 300, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 1.0, "logit_bias": {3: 2.0}, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(0, vocab, 7))},
    ]
    new = [
        create_new(i + 1, [i, i + 1, 5], [1], num_prompt_tokens=1 + i % 3, seed=100 + i, **kinds[i % len(kinds)])
        for i in range(count)
    ]
    return logits, new


def test_a_row_alone_draws_what_it_draws_among_64_in_any_order() -> None:
    vocab = 3001
    logits, new = mixed_rows(64, vocab)
    together = sample(logits, batch_of(new, vocab)).token_ids
    alone = [int(sample(logits[i : i + 1], batch_of(new[i : i + 1], vocab)).token_ids[0]) for i in range(64)]
    order = np.random.default_rng(0).permutation(64)
    shuffled = sample(logits[order].contiguous(), batch_of([new[i] for i in order], vocab)).token_ids
    assert together.tolist() == alone
    assert shuffled.tolist() == together[order].tolist()


def test_the_same_seed_position_and_sample_draw_the_same_and_others_differ() -> None:
    logits = torch.zeros(1, 1000)

    def draw(seed: int, position: int, sample_index: int) -> int:
        new = create_new(1, [0] * (1 + position), [1], num_prompt_tokens=1, seed=seed, sample_index=sample_index, temperature=1.0)  # fmt: skip  # noqa: E501
        return int(sample(logits, batch_of([new], 1000)).token_ids[0])

    assert draw(42, 0, 0) == draw(42, 0, 0)
    assert len({draw(42, 0, 0), draw(43, 0, 0), draw(42, 1, 0), draw(42, 0, 1), draw(42 + 2**32, 0, 0)}) == 5


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_row_that_is_not_finite_is_an_error_of_its_own(bad: float) -> None:
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.1}):
        new = [create_new(1, [0], [1], **sampling), create_new(2, [0], [1], **sampling)]
        output = sample_rows([[1.0, bad, 0.0], [0.0, 50.0, 0.0]], new)
        assert output.errors == {0: "non-finite logits"}
        assert output.token_ids.tolist() == [0, 1]


def test_a_row_with_no_token_left_says_so() -> None:
    new = create_new(1, [0], [1], allowed_token_ids=(2,), stop_token_ids=(2,), min_tokens=1)
    output = sample_rows([[1.0, 2.0, 3.0]], [new])
    assert output.errors == {0: "logit_bias, allowed_token_ids and min_tokens leave no token to draw"}


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = np.log([0.1, 0.2, 0.3, 0.4]).tolist()
    new = create_new(1, [0], [1], logprobs=2, logit_bias={1: 9.0}, top_k=1, temperature=0.3)
    output = sample_rows([logits], [new])
    found = output.logprobs[0]
    assert (output.token_ids[0], found.rank) == (1, 3)
    assert found.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token for token, _ in found.top] == [3, 2]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_logprobs_without_alternatives_tell_of_the_token_alone() -> None:
    output = sample_rows([[0.0, 0.0]], [create_new(1, [0], [1], logprobs=0)])
    assert output.logprobs[0].top == ()
    assert output.logprobs[0].logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_of_equal_logprobs_the_lowest_id_comes_first() -> None:
    output = sample_rows([[1.0, 2.0, 1.0, 2.0, 1.0]], [create_new(1, [0], [1], logprobs=4)])
    assert [token for token, _ in output.logprobs[0].top] == [1, 3, 0, 2]


def test_rows_that_did_not_ask_report_no_logprobs() -> None:
    output = sample_rows([[1.0, 2.0]] * 2, [create_new(1, [0], [1]), create_new(2, [0], [1], logprobs=1)])
    assert list(output.logprobs) == [1]


def test_beam_candidates_leave_out_what_a_mask_forbids() -> None:
    new = create_new(1, [0], [1], beam_candidates=3, stop_token_ids=(1,), min_tokens=1)
    output = sample_rows([np.log([0.2, 0.5, 0.3]).tolist()], [new])
    assert [token for token, _ in output.candidates[0]] == [2, 0]
    assert [value for _, value in output.candidates[0]] == pytest.approx([math.log(0.6), math.log(0.4)], abs=1e-6)
