"""The one rule: who gets how many tokens in a step, and when a request begins."""

from __future__ import annotations

import pytest

from scheduler.core.config import CoreConfig
from scheduler.core.request import DoesNotFit, FinishReason
from tests.core.factories import create_core, create_driver, create_request, expected_output


def rows(plan) -> dict[int, int]:
    return dict(zip(plan.row_sequences, plan.row_tokens, strict=True))


def test_a_request_runs_as_soon_as_it_is_added():
    driver = create_driver()
    driver.core.add(create_request(1, [1, 2, 3, 4, 5]))
    plan = driver.plan()
    assert rows(plan) == {1: 5}
    assert [(n.sequence_id, n.token_ids, n.num_computed_tokens, n.block_ids) for n in plan.new] == [
        (1, (1, 2, 3, 4, 5), 0, (1, 2))
    ]


def test_blocks_are_given_out_only_as_tokens_arrive():
    driver = create_driver(block_size=4)
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=6))
    held = []
    while driver.step():
        held.append(driver.core.num_blocks - driver.core.num_free_blocks)
    # After each answer: 3, 4, 5, 6, 7 tokens computed, then the end.
    assert held == [1, 1, 2, 2, 2, 0, 0]


def test_a_new_block_is_told_in_the_step_that_writes_it():
    driver = create_driver(block_size=4)
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=6))
    tables = []
    while (plan := driver.plan()) is not None:
        tables.append([tuple(t) for t in plan.tables])
        driver.answer()
    assert tables == [[], [], [(1, 1, (2,))], [], [], [], []]


def test_a_finished_request_makes_room_for_the_next_plan():
    driver = create_driver(max_num_seqs=1, num_blocks=3, block_size=4)
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=1))
    driver.core.add(create_request(2, [4, 5, 6], max_tokens=1))
    assert rows(driver.plan()) == {1: 3}
    driver.answer()
    plan = driver.plan()
    assert plan.finished == [1]
    assert rows(plan) == {2: 3}


def test_a_request_joins_while_others_decode():
    driver = create_driver()
    driver.core.add(create_request(1, [1, 2, 3]))
    driver.step()
    driver.core.add(create_request(2, [4, 5]))
    assert rows(driver.plan()) == {1: 1, 2: 2}


def test_a_long_prompt_is_computed_in_chunks_between_decodes():
    driver = create_driver(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=100)
    for sequence_id in (1, 2, 3):
        driver.core.add(create_request(sequence_id, [sequence_id], max_tokens=20))
    driver.step()
    driver.core.add(create_request(4, range(40), max_tokens=2))
    steps = []
    while 4 not in driver.finished:
        steps.append(rows(driver.plan()))
        driver.answer()
    decodes = {1: 1, 2: 1, 3: 1}
    assert steps == [{**decodes, 4: 13}, {**decodes, 4: 13}, {**decodes, 4: 13}, {**decodes, 4: 1}, {**decodes, 4: 1}]


@pytest.mark.parametrize("arrival", [0, 9])
def test_decodes_are_not_held_up_by_a_long_prompt_before_or_behind_them(arrival):
    driver = create_driver(max_num_batched_tokens=8, max_num_seqs=8)
    for sequence_id in (1, 2, 3, 4):
        driver.core.add(create_request(sequence_id, [sequence_id], max_tokens=30))
    driver.step()
    driver.core.add(create_request(9, range(60), arrival=arrival))
    for _ in range(10):
        assert rows(driver.plan()) == {1: 1, 2: 1, 3: 1, 4: 1, 9: 4}
        driver.answer()


def test_the_budget_is_never_exceeded_and_never_left_while_work_waits():
    driver = create_driver(max_num_batched_tokens=16, max_num_seqs=8, num_blocks=500)
    for sequence_id in range(1, 9):
        driver.core.add(create_request(sequence_id, range(sequence_id * 50, sequence_id * 50 + 50), max_tokens=3))
    while (plan := driver.plan()) is not None:
        assert plan.num_tokens <= 16
        if driver.core.num_waiting:
            assert plan.num_tokens == 16
        driver.answer()
    assert len(driver.finished) == 8


def test_no_more_sequences_run_than_max_num_seqs():
    driver = create_driver(max_num_seqs=3)
    for sequence_id in range(1, 7):
        driver.core.add(create_request(sequence_id, [sequence_id], max_tokens=2))
    driver.core.add(create_request(7, [7], n=2, max_tokens=2))
    most = 0
    while (plan := driver.plan()) is not None:
        most = max(most, len(plan.row_sequences) + len(plan.forks))
        driver.answer()
    assert most == 3


def test_requests_begin_in_order_of_arrival_within_a_priority():
    driver = create_driver(max_num_seqs=1)
    driver.core.add(create_request(1, [1], arrival=3, max_tokens=1))
    driver.core.add(create_request(2, [2], arrival=1, max_tokens=1))
    driver.core.add(create_request(3, [3], arrival=2, max_tokens=1, priority=-1))
    driver.run()
    assert list(driver.finished) == [3, 2, 1]


def test_nobody_overtakes_the_first_one_that_waits_for_blocks():
    driver = create_driver(num_blocks=6, block_size=4)
    driver.core.add(create_request(1, range(12), max_tokens=4))
    driver.step()
    driver.core.add(create_request(2, range(20, 32), max_tokens=1))
    driver.core.add(create_request(3, [1], max_tokens=1))
    assert rows(driver.plan()) == {1: 1}
    assert driver.core.num_waiting == 2


@pytest.mark.parametrize(
    ("settings", "prompt", "message"),
    [
        ({"num_blocks": 9, "block_size": 16, "max_model_len": 4096}, 200, "200 tokens .* KV cache of 128 tokens"),
        ({"max_model_len": 100}, 100, "100 tokens .* max_model_len 100"),
        ({"num_blocks": 3, "block_size": 4}, 8, "8 tokens .* KV cache of 8 tokens"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_naming_both_numbers(settings, prompt, message):
    driver = create_driver(**settings)
    driver.core.add(create_request(1, [1, 2], max_tokens=2))
    with pytest.raises(DoesNotFit, match=message):
        driver.core.add(create_request(2, range(prompt)))
    driver.run()
    assert driver.finished == {1: FinishReason.LENGTH}


def test_more_outputs_than_sequences_of_one_step_are_refused():
    with pytest.raises(DoesNotFit, match="5 outputs at once exceed max_num_seqs 4"):
        create_core(max_num_seqs=4).add(create_request(1, n=5))


def test_a_prompt_that_leaves_one_token_gets_one():
    driver = create_driver(num_blocks=3, block_size=4)
    driver.core.add(create_request(1, range(7), max_tokens=50))
    driver.run()
    assert driver.outputs[1] == expected_output(create_request(1, range(7), max_tokens=1), 0)
    assert driver.finished == {1: FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_only_sequence_ends_with_length_when_it_fills_the_pool(depth):
    driver = create_driver(num_blocks=5, block_size=4, pipeline_depth=depth)
    request = create_request(1, range(6), max_tokens=1000)
    driver.core.add(request)
    driver.run()
    assert driver.finished == {1: FinishReason.LENGTH}
    assert len(driver.outputs[1]) == 10
    assert driver.core.counters.preemptions == 0


def test_the_output_is_bounded_by_max_model_len():
    driver = create_driver(max_model_len=12)
    driver.core.add(create_request(1, range(9), max_tokens=100))
    driver.run()
    assert len(driver.outputs[1]) == 3
    assert driver.finished == {1: FinishReason.LENGTH}


def test_a_stop_token_ends_the_output_and_is_part_of_it():
    outputs = expected_output(create_request(1, [1, 2, 3], max_tokens=20), 0)
    stop = outputs[3]
    driver = create_driver()
    driver.core.add(create_request(1, [1, 2, 3], max_tokens=20, stop=[stop]))
    driver.run()
    assert driver.outputs[1] == outputs[: outputs.index(stop) + 1]
    assert driver.finished == {1: FinishReason.STOP}


def test_a_budget_below_max_num_seqs_is_no_configuration():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        CoreConfig(
            num_blocks=9, block_size=4, max_num_seqs=8, max_num_batched_tokens=7, max_model_len=64, pipeline_depth=1
        )
