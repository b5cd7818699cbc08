"""Messages to plans and results to messages; wrong columns are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.v1 import executor_pb2 as pb

from executor.plan import (
    Fork,
    InvalidPlan,
    NewSequence,
    PromptLogprobs,
    Sampling,
    StepResult,
    StepTimings,
    TableUpdate,
    TokenLogprobs,
)
from executor.runner import Runner
from executor.wire import message_from_result, plan_from_message
from tests.executor.factories import create_limits, create_runner

LIMITS = create_limits()


def test_a_plan_with_everything_arrives_whole() -> None:
    message = pb.BatchPlan(
        step_id=3,
        finished=[1],
        preempted=[2],
        new=[
            pb.NewSequence(
                sequence_id=4,
                token_ids=[5, 6, 7],
                num_prompt_tokens=2,
                num_computed_tokens=1,
                block_ids=[8, 9],
                sample_index=2,
                sampling=pb.SequenceSampling(
                    temperature=0.5,
                    top_k=3,
                    top_p=0.75,
                    min_p=0.25,
                    presence_penalty=0.5,
                    frequency_penalty=1.5,
                    repetition_penalty=1.25,
                    logit_bias={7: -1.0},
                    allowed_token_ids=[1, 2],
                    seed=2**64 - 1,
                    min_tokens=4,
                    stop_token_ids=[0],
                    logprobs=0,
                    prompt_logprobs=5,
                    beam_candidates=6,
                ),
            )
        ],
        token_sequences=[4],
        tokens=[11],
        table_sequences=[4, 5],
        table_starts=[2, 0],
        table_counts=[1, 2],
        table_blocks=[10, 11, 12],
        copy_sources=[3],
        copy_destinations=[4],
        row_sequences=[4, 5],
        row_tokens=[1, 16],
        fork_parents=[4],
        fork_children=[6],
        fork_samples=[1],
    )
    plan = plan_from_message(message, LIMITS)
    assert (plan.step_id, plan.finished, plan.preempted) == (3, [1], [2])
    assert plan.new == [
        NewSequence(
            4,
            [5, 6, 7],
            2,
            1,
            [8, 9],
            2,
            Sampling(0.5, 3, 0.75, 0.25, 0.5, 1.5, 1.25, {7: -1.0}, (1, 2), 2**64 - 1, 4, (0,), 0, 5, 6),
        )
    ]
    assert plan.tokens == [(4, 11)]
    assert plan.tables == [TableUpdate(4, 2, [10]), TableUpdate(5, 0, [11, 12])]
    assert (plan.copy_sources, plan.copy_destinations) == ([3], [4])
    assert (plan.row_sequences, plan.row_tokens, plan.forks) == ([4, 5], [1, 16], [Fork(4, 6, 1)])


def test_absent_sampling_fields_change_nothing() -> None:
    message = pb.BatchPlan(new=[pb.NewSequence(sequence_id=1, token_ids=[1], num_prompt_tokens=1)])
    assert plan_from_message(message, LIMITS).new[0].sampling == Sampling()


def test_a_result_with_everything_arrives_whole() -> None:
    top = ((3, -0.5), (4, -1.0))
    result = StepResult(
        step_id=9,
        sequence_ids=[1, 2],
        token_ids=[30, 40],
        logprobs={1: TokenLogprobs(-0.5, 1, top)},
        candidates={5: top},
        prompt_logprobs={2: PromptLogprobs(3, (TokenLogprobs(-2.0, 7, top), TokenLogprobs(-3.0, 8, top)))},
        errors={6: "non-finite logits"},
        timings=StepTimings(1, 2, 3, 4),
    )
    message = pb.StepResult.FromString(message_from_result(result).SerializeToString())
    assert message == pb.StepResult(
        step_id=9,
        sequence_ids=[1, 2],
        token_ids=[30, 40],
        logprobs=[
            pb.Logprobs(sequence_id=1, logprob=-0.5, rank=1, top_token_ids=[3, 4], top_logprobs=[-0.5, -1.0]),
            pb.Logprobs(sequence_id=5, top_token_ids=[3, 4], top_logprobs=[-0.5, -1.0]),
        ],
        prompt_logprobs=[
            pb.PromptPositions(
                sequence_id=2,
                first_position=3,
                logprobs=[-2.0, -3.0],
                ranks=[7, 8],
                num_top=2,
                top_token_ids=[3, 4, 3, 4],
                top_logprobs=[-0.5, -1.0, -0.5, -1.0],
            )
        ],
        errors=[pb.SequenceError(sequence_id=6, message="non-finite logits")],
        timings=pb.StepTimings(queued_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4),
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row_sequences": [1, 2], "row_tokens": [1]}, "row_sequences 2, row_tokens 1"),
        ({"copy_sources": [1]}, "copy_sources 1, copy_destinations 0"),
        ({"tokens": [1]}, "token_sequences 0, tokens 1"),
        ({"fork_parents": [1], "fork_children": [2]}, "fork_parents 1, fork_children 1, fork_samples 0"),
        ({"table_sequences": [1], "table_starts": [0]}, "table_sequences 1, table_starts 1, table_counts 0"),
        ({"table_blocks": [1]}, "table_blocks has 1 entries, table_counts sum to 0"),
        (
            {"table_sequences": [1], "table_starts": [0], "table_counts": [2], "table_blocks": [1]},
            "table_blocks has 1 entries, table_counts sum to 2",
        ),
    ],
)
def test_columns_that_do_not_fit_together_are_named(columns: dict[str, list[int]], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        plan_from_message(pb.BatchPlan(**columns), LIMITS)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"finished": range(9)}, "9 finished sequences exceed max_num_seqs 8"),
        ({"preempted": range(9)}, "9 preempted sequences exceed max_num_seqs 8"),
        ({"new": [pb.NewSequence()] * 300_000}, "300000 new sequences exceed max_num_seqs 8"),
        ({"tokens": range(9)}, "9 chosen tokens exceed max_num_seqs 8"),
        ({"table_sequences": range(9)}, "9 table updates exceed max_num_seqs 8"),
        ({"copy_sources": range(9)}, "9 copies exceed max_num_seqs 8"),
        ({"row_sequences": range(9)}, "9 rows exceed max_num_seqs 8"),
        ({"fork_children": range(9)}, "9 forks exceed max_num_seqs 8"),
        (
            {"new": [pb.NewSequence(token_ids=range(329))]},
            "329 tokens of new sequences exceed the 328 that can be known",
        ),
        ({"new": [pb.NewSequence(block_ids=range(81))]}, "81 ids in block tables exceed the 80 that tables have room"),
        ({"table_blocks": range(81)}, "81 ids in block tables exceed the 80 that tables have room for"),
    ],
)
def test_what_is_longer_than_any_plan_is_refused_before_it_is_converted(
    columns: dict[str, object], message: str
) -> None:
    """300,000 new sequences in one plan kept the event loop, and then the step thread, from answering for seconds."""
    with pytest.raises(InvalidPlan, match=message):
        plan_from_message(pb.BatchPlan(**columns), LIMITS)


SMALL = st.integers(0, 6)
ANY = st.one_of(SMALL, st.integers(0, 2**32 - 1))
FLOATS = st.floats(width=32)


def columns(values: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(values, max_size=4)


def samplings() -> st.SearchStrategy[pb.SequenceSampling]:
    return st.builds(
        pb.SequenceSampling,
        temperature=FLOATS,
        top_k=ANY,
        top_p=st.none() | FLOATS,
        min_p=FLOATS,
        presence_penalty=FLOATS,
        repetition_penalty=st.none() | FLOATS,
        logit_bias=st.dictionaries(ANY, FLOATS, max_size=2),
        allowed_token_ids=columns(ANY),
        seed=st.integers(0, 2**64 - 1),
        min_tokens=ANY,
        stop_token_ids=columns(ANY),
        logprobs=st.none() | ANY,
        prompt_logprobs=st.none() | ANY,
        beam_candidates=st.none() | ANY,
    )


def new_sequences() -> st.SearchStrategy[pb.NewSequence]:
    return st.builds(
        pb.NewSequence,
        sequence_id=SMALL,
        token_ids=st.lists(ANY, max_size=6),
        num_prompt_tokens=SMALL,
        num_computed_tokens=SMALL,
        block_ids=columns(SMALL),
        sample_index=ANY,
        sampling=samplings(),
    )


def plans() -> st.SearchStrategy[pb.BatchPlan]:
    names = ("finished", "preempted", "token_sequences", "tokens", "table_sequences", "table_starts", "table_counts")
    more = ("table_blocks", "copy_sources", "copy_destinations", "row_sequences", "row_tokens")
    forks = ("fork_parents", "fork_children", "fork_samples")
    return st.builds(
        pb.BatchPlan,
        step_id=SMALL,
        new=st.lists(new_sequences(), max_size=3),
        **{name: columns(ANY if name == "tokens" else SMALL) for name in (*names, *more, *forks)},
    )


def run(runner: Runner, message: pb.BatchPlan) -> StepResult | None:
    try:
        return runner.run(plan_from_message(message, LIMITS))
    except InvalidPlan:
        return None


@given(st.lists(plans(), min_size=1, max_size=3))
def test_any_plan_is_either_answered_or_refused(messages: list[pb.BatchPlan]) -> None:
    runner, _ = create_runner(num_blocks=6)
    for message in messages:
        result = run(runner, message)
        if result is not None:
            assert pb.StepResult.FromString(message_from_result(result).SerializeToString()).step_id == message.step_id


@given(st.lists(new_sequences(), min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_any_sampling_draws_a_token_of_the_vocabulary_or_fails_its_sequence(
    new: list[pb.NewSequence], row_tokens: list[int]
) -> None:
    runner, _ = create_runner(num_blocks=8)
    for index, sequence in enumerate(new):
        sequence.sequence_id = index + 1
        sequence.token_ids[:] = [token % 40 for token in sequence.token_ids] or [1]
        sequence.num_prompt_tokens = len(sequence.token_ids)
        sequence.num_computed_tokens = 0
        sequence.block_ids[:] = [1 + 2 * index, 2 + 2 * index]
    ids = [sequence.sequence_id for sequence in new]
    message = pb.BatchPlan(step_id=1, new=new, row_sequences=ids, row_tokens=[len(s.token_ids) for s in new])
    result = run(runner, message)
    assert result is not None
    assert all(0 <= token < 50 for token in result.token_ids)
    assert set(result.sequence_ids) | set(result.errors) | set(result.candidates) == set(ids)
