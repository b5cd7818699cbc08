"""Batches of draws of every kind, run by the sampling kernels, and compared with executor/sampler.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.sampling import Sampler
from executor.draws import sampling_batch
from executor.plan import BatchPlan, NewSequence
from executor.sampler import SamplerOutput, SamplingBatch, sample
from executor.sequences import Sequences
from tests.executor.factories import create_limits, create_new
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher, guarded

THREADS = 128  # of a block in most tests: the draws are the same for any number


def guarded_upload(arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
    return {name: guarded(torch.from_numpy(np.ascontiguousarray(array))) for name, array in arrays.items()}


def sampler(launcher: Launcher | None = None, threads: int = THREADS) -> Sampler:
    return Sampler(launcher or SimulatorLauncher(), guarded_upload, threads)


def batch_of(new: Sequence[NewSequence], vocab: int) -> SamplingBatch:
    sequences = Sequences(create_limits(vocab_size=vocab, max_num_seqs=len(new)))
    assert sequences.apply(BatchPlan(1, new=new)) == {}
    return sampling_batch(sequences, sequences.slots([each.sequence_id for each in new]), None)


def varied_sampling(i: int, vocab: int, random: np.random.Generator) -> dict[str, object]:
    """Parameters of every kind and mixture, by i."""
    kind, given = i % 12, {}
    if 1 <= kind <= 10:
        given["temperature"] = float(random.choice([0.2, 0.7, 1.0, 1.5]))
    if kind in (2, 4, 6, 9):
        given["top_k"] = int(random.integers(1, min(vocab, 300)))
    if kind in (3, 4, 7, 9):
        given["top_p"] = float(random.uniform(0.05, 0.99))
    if kind in (5, 6, 7, 9):
        given["min_p"] = float(random.uniform(0, 0.3))
    if kind in (8, 9, 11):
        given["repetition_penalty"] = float(random.uniform(0.7, 1.6))
        given["presence_penalty"], given["frequency_penalty"] = 0.5, 0.25
    if kind == 10:
        given["logit_bias"] = {int(token): float(3 * random.normal()) for token in random.permutation(vocab)[:5]}
    if kind == 8:
        given["allowed_token_ids"] = tuple(random.permutation(vocab)[: vocab // 2].tolist())
    if i % 5 == 0:
        given["logprobs"] = i % 4
    if i % 7 == 0:
        given["min_tokens"], given["stop_token_ids"] = 9, (1, 2)
    if i % 23 == 0:
        given["beam_candidates"] = 6
    return given


def varied_rows(count: int, vocab: int, seed: int) -> tuple[torch.Tensor, SamplingBatch]:
    """Rows from flat to sharp, some of them with many ties."""
    random = np.random.default_rng(seed)
    new = [
        create_new(
            i + 1,
            random.integers(0, vocab, 9).tolist(),
            [1],
            num_prompt_tokens=2 + i % 5,
            seed=int(random.integers(0, 2**63)) * 2 + i % 2,
            sample_index=i % 3,
            **varied_sampling(i, vocab, random),
        )
        for i in range(count)
    ]
    logits = random.standard_normal((count, vocab)) * random.choice([0.5, 3.0, 8.0], (count, 1))
    logits[::17] = logits[::17].round()
    return guarded(torch.from_numpy(logits.astype(np.float32))), batch_of(new, vocab)


def assert_same(got: SamplerOutput, want: SamplerOutput) -> None:
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.errors == want.errors
    assert list(got.logprobs) == list(want.logprobs)
    for draw, wanted in want.logprobs.items():
        found = got.logprobs[draw]
        assert found.rank == wanted.rank
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)
    assert sorted(got.candidates) == sorted(want.candidates)
    for draw, best in want.candidates.items():
        assert [token for token, _ in got.candidates[draw]] == [token for token, _ in best]
        assert [value for _, value in got.candidates[draw]] == pytest.approx([value for _, value in best], abs=1e-5)


def check_draws(logits: torch.Tensor, batch: SamplingBatch, build: SimulatorBuild | None = None) -> None:
    """Under every schedule: the same bits, and the draws of the CPU's sampler."""
    asked = [draw for draw, _ in batch.logprobs]

    def run(launcher: SimulatorLauncher) -> list[torch.Tensor]:
        drawn = sampler(launcher).launch(logits, batch)
        adjusted = [] if drawn.adjusted is None else [drawn.adjusted]
        return [drawn.token_ids, drawn.flags, drawn.logprobs[asked], drawn.ranks[asked], *adjusted]

    identical_on_every_schedule(run, build)
    assert_same(sampler(SimulatorLauncher(build=build)).sample(logits, batch), sample(logits.clone(), batch))
