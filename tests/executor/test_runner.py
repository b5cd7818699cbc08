"""Steps over a model whose K/V are the tokens themselves: what a row sees is what its blocks hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from executor.plan import BatchPlan, Fork, InvalidPlan, TableUpdate
from tests.executor.factories import POISON, VOCAB, create_new, create_runner, greedy, logits_after, rows

PROMPT = [3, 1, 4, 1, 5, 9]


def test_a_prompt_and_its_decode_steps_give_the_greedy_continuation() -> None:
    runner, _ = create_runner()
    drawn = list(runner.run(rows(1, {7: 6}, new=[create_new(7, PROMPT, [5, 9])])).token_ids)
    drawn += runner.run(rows(2, {7: 1})).token_ids
    drawn += runner.run(rows(3, {7: 1})).token_ids
    drawn += runner.run(rows(4, {7: 1}, tables=[TableUpdate(7, 2, [2])])).token_ids
    assert drawn == greedy(PROMPT, 4)


def test_a_chunk_that_ends_before_the_last_token_samples_nothing() -> None:
    runner, _ = create_runner()
    first = runner.run(rows(1, {7: 4}, new=[create_new(7, PROMPT, [5, 9])]))
    second = runner.run(rows(2, {7: 2}))
    assert (list(first.token_ids), list(second.token_ids)) == ([], greedy(PROMPT, 1))


def test_prefill_and_decode_rows_share_a_step() -> None:
    runner, _ = create_runner()
    runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9])]))
    result = runner.run(rows(2, {1: 1, 2: 3, 3: 2}, new=[create_new(2, [8, 8, 8], [7]), create_new(3, [6, 6, 6], [8])]))
    assert dict(zip(result.sequence_ids, result.token_ids, strict=True)) == {
        1: greedy(PROMPT, 2)[1],
        2: greedy([8, 8, 8], 1)[0],
    }


def test_a_prefix_hit_reads_the_blocks_another_sequence_filled() -> None:
    runner, _ = create_runner()
    runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9])]))
    shared = create_new(2, [*PROMPT[:4], 7, 7], [5, 6], num_computed_tokens=4)
    result = runner.run(rows(2, {2: 2}, new=[shared]))
    assert list(result.token_ids) == greedy([*PROMPT[:4], 7, 7], 1)


def test_copies_are_made_before_the_step_writes() -> None:
    runner, _ = create_runner()
    runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9])]))
    plan = rows(2, {1: 1}, tables=[TableUpdate(1, 1, [6])], copy_sources=[9], copy_destinations=[6])
    assert list(runner.run(plan).token_ids) == greedy(PROMPT, 2)[1:]


def test_forked_children_draw_with_their_own_sample_index_from_the_parents_row() -> None:
    runner, _ = create_runner()
    new = create_new(1, PROMPT, [5, 9], temperature=1.0, seed=11)
    forked = runner.run(rows(1, {1: 6}, new=[new], forks=[Fork(1, 2, 1), Fork(1, 3, 2)]))
    alone = []
    for index in range(3):
        other, _ = create_runner()
        single = create_new(1, PROMPT, [5, 9], temperature=1.0, seed=11, sample_index=index)
        alone += other.run(rows(1, {1: 6}, new=[single])).token_ids
    assert (list(forked.sequence_ids), list(forked.token_ids)) == ([1, 2, 3], alone)


def test_forked_children_go_on_as_sequences_of_their_own() -> None:
    runner, _ = create_runner()
    new = create_new(1, PROMPT, [5, 9], temperature=5.0, seed=3)
    first = runner.run(rows(1, {1: 6}, new=[new], forks=[Fork(1, 2, 1)]))
    tables = [TableUpdate(2, 1, [6])]
    runner.run(rows(2, {1: 1, 2: 1}, tables=tables, copy_sources=[9], copy_destinations=[6]))
    slots = [runner.sequences.slot(sequence_id) for sequence_id in (1, 2)]
    assert [runner.sequences.tokens(slot)[6] for slot in slots] == list(first.token_ids)
    assert first.token_ids[0] != first.token_ids[1]
    assert [runner.sequences.block_tables[slot, :3].tolist() for slot in slots] == [[5, 9, 0], [5, 6, 0]]


def test_a_fork_of_a_row_that_samples_nothing_is_an_invalid_plan() -> None:
    runner, _ = create_runner()
    with pytest.raises(InvalidPlan, match="sequence 1 samples nothing"):
        runner.run(rows(1, {1: 4}, new=[create_new(1, PROMPT, [5, 9])], forks=[Fork(1, 2, 1)]))


def test_nan_logits_fail_their_sequence_alone_and_it_is_skipped_until_replaced() -> None:
    runner, model = create_runner()
    new = [create_new(1, [POISON, 2], [5, 6]), create_new(2, PROMPT, [7, 8])]
    first = runner.run(rows(1, {1: 2, 2: 6}, new=new))
    second = runner.run(rows(2, {1: 1, 2: 1}))
    third = runner.run(rows(3, {1: 2}, new=[create_new(1, [1, 2], [5, 6])]))
    assert dict(first.errors) == {1: "non-finite logits"}
    assert list(first.sequence_ids) == [2]
    assert (dict(second.errors), list(second.token_ids)) == ({}, greedy(PROMPT, 2)[1:])
    assert list(third.token_ids) == greedy([1, 2], 1)
    assert model.num_forwards == 3


def test_children_of_a_failed_parent_fail_with_it() -> None:
    runner, _ = create_runner()
    result = runner.run(rows(1, {1: 2}, new=[create_new(1, [POISON, 2], [5])], forks=[Fork(1, 2, 1)]))
    skipped = runner.run(rows(2, {1: 1, 2: 1}))
    assert dict(result.errors) == {1: "non-finite logits", 2: "non-finite logits"}
    assert (list(skipped.token_ids), dict(skipped.errors)) == ([], {})


def test_a_plan_without_rows_is_answered_without_running_the_model() -> None:
    runner, model = create_runner()
    runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9])]))
    result = runner.run(BatchPlan(2, finished=[1]))
    assert (result.step_id, list(result.token_ids), model.num_forwards, len(runner.sequences)) == (2, [], 1, 0)


def test_a_row_past_max_model_len_is_an_error_of_its_sequence() -> None:
    runner, _ = create_runner(max_model_len=8)
    runner.run(rows(1, {1: 8}, new=[create_new(1, [*PROMPT, 2, 2], [5, 9])]))
    result = runner.run(rows(2, {1: 1}))
    assert dict(result.errors) == {1: "position 8 is past max_model_len 8"}


def test_a_token_outside_the_vocabulary_is_an_error_of_its_sequence() -> None:
    runner, _ = create_runner()
    new = [create_new(1, [VOCAB], [5]), create_new(2, [1], [6])]
    result = runner.run(rows(1, {1: 1, 2: 1}, new=new))
    assert dict(result.errors) == {1: "token id 50 is not in the vocabulary of 50"}
    assert list(result.token_ids) == greedy([1], 1)


def test_beams_report_the_best_tokens_and_go_on_with_the_token_they_are_given() -> None:
    runner, _ = create_runner()
    result = runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9], beam_candidates=3)]))
    logits = logits_after(PROMPT).astype(np.float64)
    best = np.argsort(-logits)[:3]
    expected = logits[best] - math.log(np.exp(logits).sum())
    assert list(result.token_ids) == []
    assert [token for token, _ in result.candidates[1]] == best.tolist()
    assert [logprob for _, logprob in result.candidates[1]] == pytest.approx(expected.tolist(), abs=1e-5)
    result = runner.run(rows(2, {1: 1}, tokens=[(1, 7)]))
    assert result.candidates[1][0][0] == greedy([*PROMPT, 7], 1)[0]


def test_prompt_logprobs_come_in_chunks_without_a_gap() -> None:
    runner, _ = create_runner()
    first = runner.run(rows(1, {1: 4}, new=[create_new(1, PROMPT, [5, 9], prompt_logprobs=2)])).prompt_logprobs[1]
    second = runner.run(rows(2, {1: 2})).prompt_logprobs[1]
    assert (first.first_position, len(first.entries), second.first_position, len(second.entries)) == (1, 4, 5, 1)
    for position, entry in enumerate([*first.entries, *second.entries], start=1):
        logits = logits_after(PROMPT[:position]).astype(np.float64)
        expected = logits[PROMPT[position]] - math.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(expected, abs=1e-5)
        assert entry.rank == 1 + int((logits > logits[PROMPT[position]]).sum())
        assert [token for token, _ in entry.top] == np.argsort(-logits)[:2].tolist()


def test_a_replaced_sequence_draws_what_it_would_have_drawn() -> None:
    runner, _ = create_runner()
    new = create_new(1, PROMPT, [5, 9, 10], temperature=2.0, seed=5)
    drawn = list(runner.run(rows(1, {1: 6}, new=[new])).token_ids)
    for step in range(2, 5):
        drawn += runner.run(rows(step, {1: 1})).token_ids
    again, _ = create_runner()
    resumed = create_new(1, PROMPT + drawn[:2], [3, 4, 2], num_prompt_tokens=6, temperature=2.0, seed=5)
    assert list(again.run(rows(1, {1: 8}, new=[resumed])).token_ids) == drawn[2:3]
    assert list(again.run(rows(2, {1: 1})).token_ids) == drawn[3:]


def test_progress_counts_layers() -> None:
    runner, _ = create_runner()
    runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9])]))
    assert runner.progress == 2


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (rows(2, {9: 1}), "sequence 9 is not known"),
        (rows(2, {1: 2}), "sequence 1: a row up to token 8, of which 7 are known"),
        (rows(2, {1: 1}, tables=[TableUpdate(1, 0, [64])]), r"block 64 is not in \[1, 64\)"),
        (rows(2, {1: 1}, tables=[TableUpdate(1, 0, [0])]), r"block 0 is not in \[1, 64\)"),
        (rows(2, {1: 1}, tables=[TableUpdate(1, 3, [4])]), "has 2 blocks, its update starts at 3"),
        (rows(2, {1: 1}, tables=[TableUpdate(1, 0, [4])]), "1 blocks of 4 do not hold 7 tokens"),
        (rows(2, {1: 1}, tables=[TableUpdate(1, 2, list(range(1, 10)))]), "would have 11 blocks"),
        (rows(2, {1: 1}, tables=[TableUpdate(2, 0, [4])]), "sequence 2 is not known"),
        (rows(2, {1: 1}, copy_sources=[3], copy_destinations=[3]), "block 3 is both a source and a destination"),
        (rows(2, {1: 1}, copy_sources=[3, 4], copy_destinations=[5, 5]), "destination of two copies"),
        (rows(2, {1: 0}), "a row computes no token"),
        (rows(2, {1: 65}), "65 tokens exceed max_num_batched_tokens 64"),
        (rows(2, dict.fromkeys(range(1, 10), 1)), "9 rows exceed max_num_seqs 8"),
        (rows(2, {}, finished=list(range(9))), "9 finished sequences exceed max_num_seqs 8"),
        (rows(2, {}, preempted=list(range(9))), "9 preempted sequences exceed max_num_seqs 8"),
        (rows(2, {}, tokens=[(1, 1)] * 9), "9 chosen tokens exceed max_num_seqs 8"),
        (rows(2, {1: 1}, tables=[TableUpdate(1, 0, [4])] * 9), "9 table updates exceed max_num_seqs 8"),
        (rows(2, {}, copy_sources=list(range(1, 10)), copy_destinations=list(range(11, 20))), "9 copies exceed"),
        (rows(2, {1: 1}, forks=[Fork(1, child, 1) for child in range(2, 11)]), "9 forks exceed max_num_seqs 8"),
        (rows(2, {}, new=[create_new(i, [1], [3]) for i in range(2, 11)]), "9 new sequences exceed max_num_seqs 8"),
        (rows(2, {}, new=[create_new(i, [1], [3]) for i in range(2, 10)]), "9 sequences to keep exceed max_num_seqs 8"),
        (
            rows(2, {1: 1}, new=[create_new(i, [1], [3]) for i in range(2, 9)], forks=[Fork(1, 9, 1)]),
            "9 sequences to keep exceed max_num_seqs 8",
        ),
        (BatchPlan(2, row_sequences=[1, 1], row_tokens=[1, 1]), "a sequence has two rows"),
        (BatchPlan(2, row_sequences=[1], row_tokens=[]), "row_sequences has 1 entries, row_tokens 0"),
        (rows(2, {1: 1}, forks=[Fork(1, 1, 1)]), "child 1 is already known"),
        (rows(2, {}, new=[create_new(2, [], [3])]), "new sequence 2 has no tokens"),
        (rows(2, {}, new=[create_new(2, [1], [3], num_computed_tokens=1)]), "leaves none of 1"),
        (rows(2, {}, new=[create_new(2, [1], [3], num_prompt_tokens=2)]), r"num_prompt_tokens 2 is not in \[1, 1\]"),
        (rows(2, {}, tokens=[(3, 1)]), "sequence 3 is not known"),
    ],
)
def test_a_plan_that_no_correct_scheduler_sends_names_what_is_wrong(plan: BatchPlan, message: str) -> None:
    runner, _ = create_runner()
    runner.run(rows(1, {1: 6}, new=[create_new(1, PROMPT, [5, 9])]))
    with pytest.raises(InvalidPlan, match=message):
        runner.run(plan)


def test_sequences_that_leave_make_room_in_the_same_plan() -> None:
    """What a plan may bring is bounded by what stays, not by what the executor knew before."""
    runner, _ = create_runner()
    runner.run(rows(1, {}, new=[create_new(i, [1], [3]) for i in range(1, 9)]))
    runner.run(rows(2, {}, finished=[1, 2], preempted=[3], new=[create_new(i, [1], [3]) for i in (3, 4, 9, 10)]))
    assert len(runner.sequences) == 8
    assert 1 not in runner.sequences
