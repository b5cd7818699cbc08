"""Requests that may be what kills executors have plans of their own, and hold nobody up for ever."""

from __future__ import annotations

import pytest

from tests.core.factories import create_driver, create_request, expected_output


def test_a_chunk_of_one_is_not_cut_for_decodes_that_are_not_in_its_plan():
    driver = create_driver(max_num_seqs=8, max_num_batched_tokens=8)
    for sequence_id in range(1, 8):
        driver.core.add(create_request(sequence_id, [sequence_id], max_tokens=60))
    driver.step()
    driver.core.add(create_request(9, range(20), alone=True, max_tokens=2))
    chunks = []
    while 9 not in driver.finished:
        plan = driver.plan()
        if 9 in plan.row_sequences:
            assert plan.row_sequences == [9]
            chunks.extend(plan.row_tokens)
        driver.answer()
    assert chunks == [8, 8, 4, 1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_is_acquitted_shares_plans_again(depth):
    driver = create_driver(pipeline_depth=depth, max_num_seqs=8)
    requests = [create_request(i, [i] * 9, max_tokens=12, alone=i % 3 == 0) for i in range(1, 7)]
    for request in requests:
        driver.core.add(request)
    while not all(driver.outputs.get(i) for i in (3, 6)):
        driver.step()
    for sequence_id in (3, 6):
        driver.core.acquit(sequence_id)
        driver.core.check_integrity()
    while driver.core.has_work:
        plan = driver.plan()
        if plan is None:
            driver.answer()
        elif not driver.finished and len(driver.plans) == 1:
            assert {3, 6} <= set(plan.row_sequences)
    for request in requests:
        assert driver.outputs[request.sequence_ids[0]] == expected_output(request, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_in_flight_beside_it(depth):
    driver = create_driver(pipeline_depth=depth, max_num_batched_tokens=16)
    requests = [create_request(i, [i] * 9, max_tokens=6, alone=i % 3 == 0) for i in range(1, 9)]
    for request in requests:
        driver.core.add(request)
    while driver.core.has_work:
        while driver.plan() is not None:
            held = [set(plan.row_sequences) for plan in driver.plans]
            alone = {i for rows in held for i in rows if i % 3 == 0}
            assert not alone or set().union(*held) == alone
            assert len(alone) <= 1
        driver.answer()
    for request in requests:
        assert driver.outputs[request.sequence_ids[0]] == expected_output(request, 0)
