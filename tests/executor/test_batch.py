"""What a step's rows become: positions, slots, padded tables, and which tokens give logits."""

from __future__ import annotations

import numpy as np

from executor.batch import Batch, build_batch
from executor.plan import BatchPlan, NewSequence
from executor.sequences import Sequences
from tests.executor.factories import create_limits, create_new


def build(new: list[NewSequence], row_tokens: list[int]) -> Batch:
    sequences = Sequences(create_limits())
    sequences.apply(BatchPlan(1, new=new))
    slots = sequences.slots([each.sequence_id for each in new])
    return build_batch(sequences, slots, np.array(row_tokens), 4)


def test_a_mixed_batch_of_a_prompt_a_chunk_and_a_decode_row() -> None:
    batch = build(
        [
            create_new(1, [10, 11, 12, 13, 14], [7, 3]),
            create_new(2, [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], [9, 8, 5], num_computed_tokens=3),
            create_new(3, [30, 31, 32, 33, 34], [2, 6], num_computed_tokens=4),
        ],
        [5, 3, 1],
    )
    metadata = batch.metadata
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 23, 24, 25, 34]
    assert metadata.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 4]
    assert metadata.slot_mapping.tolist() == [28, 29, 30, 31, 12, 39, 32, 33, 24]
    assert metadata.query_start_loc.tolist() == [0, 5, 8, 9]
    assert metadata.seq_lens.tolist() == [5, 6, 5]
    assert metadata.block_tables.tolist() == [[7, 3], [9, 8], [2, 6]]
    assert (metadata.max_query_len, metadata.max_seq_len) == (5, 6)
    assert batch.logits_indices.tolist() == [4, 8]


def test_rows_of_a_decode_step_with_tables_of_different_length() -> None:
    batch = build(
        [
            create_new(1, list(range(9)), [7, 3, 4], num_computed_tokens=8),
            create_new(2, [5], [9]),
        ],
        [1, 1],
    )
    assert batch.token_ids.tolist() == [8, 5]
    assert batch.metadata.block_tables.tolist() == [[7, 3, 4], [9, 0, 0]]
    assert batch.metadata.slot_mapping.tolist() == [16, 36]
    assert batch.logits_indices.tolist() == [0, 1]


def test_a_prompt_that_wants_logprobs_gives_logits_at_each_of_its_positions_but_the_last() -> None:
    batch = build(
        [create_new(1, [1, 2, 3, 4, 5], [7, 3], prompt_logprobs=0), create_new(2, [6, 7], [8])],
        [5, 2],
    )
    assert batch.logits_indices.tolist() == [4, 6, 0, 1, 2, 3]
    assert [each[1:] for each in batch.prompt_ranges] == [(1, 2, 6)]


def test_a_decode_row_has_no_prompt_positions_left() -> None:
    new = create_new(1, [1, 2, 3], [7], num_prompt_tokens=2, num_computed_tokens=2, prompt_logprobs=0)
    batch = build([new], [1])
    assert (batch.prompt_ranges, batch.logits_indices.tolist()) == ([], [0])


def test_types_are_those_of_the_contract() -> None:
    batch = build([create_new(1, [1, 2, 3], [7])], [3])
    metadata = batch.metadata
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")
    assert [str(getattr(metadata, name).dtype) for name in names] == ["torch.int32"] * 3 + ["torch.int64"] * 2
    assert (str(batch.token_ids.dtype), str(batch.logits_indices.dtype)) == ("torch.int64", "torch.int64")
    assert metadata.block_tables.is_contiguous()
