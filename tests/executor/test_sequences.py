"""Slots come and go; what a slot held must not show in the next sequence."""

from __future__ import annotations

from executor.plan import BatchPlan, TableUpdate
from executor.sequences import Sequences
from tests.executor.factories import create_limits, create_new


def test_a_slot_used_again_has_no_blocks_of_its_former_sequence() -> None:
    sequences = Sequences(create_limits(max_num_seqs=1))
    sequences.apply(BatchPlan(1, new=[create_new(1, list(range(12)), [5, 6, 7])]))
    sequences.apply(BatchPlan(2, finished=[1], new=[create_new(2, [1], [9])]))
    assert sequences.block_tables[sequences.slot(2)].tolist() == [9] + [0] * 9


def test_a_shorter_table_is_zero_behind_its_end() -> None:
    sequences = Sequences(create_limits())
    sequences.apply(BatchPlan(1, new=[create_new(1, [1], [5, 6, 7])]))
    sequences.apply(BatchPlan(2, tables=[TableUpdate(1, 1, [8])]))
    assert sequences.block_tables[sequences.slot(1), :4].tolist() == [5, 8, 0, 0]


def test_to_forget_an_unknown_sequence_changes_nothing() -> None:
    sequences = Sequences(create_limits())
    assert sequences.apply(BatchPlan(1, finished=[4], preempted=[5])) == {}
    assert len(sequences) == 0


def test_a_sequence_finished_and_new_in_one_plan_is_known() -> None:
    sequences = Sequences(create_limits())
    sequences.apply(BatchPlan(1, new=[create_new(1, [1, 2], [5])]))
    sequences.apply(BatchPlan(2, preempted=[1], new=[create_new(1, [3], [6])]))
    assert sequences.tokens(sequences.slot(1)).tolist() == [3]


def test_tokens_chosen_by_the_scheduler_are_appended() -> None:
    sequences = Sequences(create_limits())
    sequences.apply(BatchPlan(1, new=[create_new(1, [1, 2], [5])]))
    sequences.apply(BatchPlan(2, tokens=[(1, 7)]))
    assert sequences.tokens(sequences.slot(1)).tolist() == [1, 2, 7]


def test_wrong_sampling_is_an_error_of_the_sequence_that_has_it() -> None:
    sequences = Sequences(create_limits())
    new = [
        create_new(1, [1], [5], logit_bias={50: 1.0}),
        create_new(2, [1], [5], stop_token_ids=(51,)),
        create_new(3, [1], [5], allowed_token_ids=(52,)),
        create_new(4, [1], [5], temperature=float("nan")),
        create_new(5, [1], [5], repetition_penalty=0.0),
        create_new(6, [1], [5], logit_bias={1: float("inf")}),
        create_new(7, [1], [5], beam_candidates=0),
        create_new(8, [1], [5]),
    ]
    assert sequences.apply(BatchPlan(1, new=new)) == {
        1: "logit_bias: token id 50 is not in the vocabulary of 50",
        2: "stop_token_ids: token id 51 is not in the vocabulary of 50",
        3: "allowed_token_ids: token id 52 is not in the vocabulary of 50",
        4: "temperature nan is not finite",
        5: "repetition_penalty 0.0 is not above 0",
        6: "logit_bias: not all values are finite",
        7: "beam_candidates 0 is less than 1",
    }
