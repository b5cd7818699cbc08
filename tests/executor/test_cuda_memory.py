"""How many K/V blocks a GPU holds: what the share leaves, and both sizes where it is too little."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.backends.base import AttentionMetadata, OutOfMemory
from executor.backends.cuda.memory import Reading, kv_cache_blocks, profile
from tests.executor.factories import create_limits

H200 = Reading(total=140_000, used=16_000)


def test_the_cache_gets_what_weights_and_activations_leave_of_the_share() -> None:
    assert kv_cache_blocks(100, H200, 10_000, share=0.9) == (126_000 - 16_000 - 10_000) // 100


def test_a_size_that_fits_is_taken_as_it_is() -> None:
    assert kv_cache_blocks(100, H200, 10_000, memory=5_050) == 50


def test_a_size_may_go_beyond_the_share() -> None:
    assert kv_cache_blocks(100, H200, 10_000, memory=114_000) == 1140


def test_a_size_that_does_not_fit_is_refused_with_both_sizes() -> None:
    with pytest.raises(OutOfMemory, match=r"of 117.2 KiB was asked for, but the GPU has 111.3 KiB left"):
        kv_cache_blocks(100, H200, 10_000, memory=120_000)


def test_no_room_for_two_blocks_is_refused_with_both_sizes() -> None:
    with pytest.raises(OutOfMemory, match=r"2 blocks, takes 19.53 KiB, but the budget is 9.766 KiB: 90% of"):
        kv_cache_blocks(10_000, H200, 100_000)


def test_weights_that_fill_the_share_leave_nothing() -> None:
    with pytest.raises(OutOfMemory, match="but the budget is 0 B"):
        kv_cache_blocks(100, Reading(total=1000, used=950), 20)


class FakeGauge:
    """Each step takes ten times its tokens."""

    def __init__(self, model: RecordingModel) -> None:
        self._model = model

    def read(self) -> Reading:
        return H200

    def peak_of(self, step: Callable[[], None]) -> int:
        step()
        return 10 * self._model.steps[-1][0]


class RecordingModel:
    """(tokens, sequences, longest row, logits) of each step; slots and tables must lie in two blocks."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, int]] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        assert ((metadata.slot_mapping >= 4) & (metadata.slot_mapping < 8)).all()
        assert (metadata.block_tables == 1).all()
        assert int(metadata.query_start_loc[-1]) == len(token_ids)
        assert metadata.block_tables.shape[1] * 4 >= metadata.max_seq_len
        self.steps.append((len(token_ids), len(metadata.seq_lens), metadata.max_query_len, len(logits_indices)))
        return torch.zeros(0)


def test_the_profile_runs_the_fullest_mixed_step_and_the_fullest_decode_step() -> None:
    model = RecordingModel()
    limits = create_limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=40)
    assert profile(model, FakeGauge(model), limits) == 10 * 64 + 10 * 8
    assert model.steps == [(64, 8, 40, 8), (8, 8, 1, 8)]
