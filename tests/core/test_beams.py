"""Beam search against one written differently, which keeps no tables and sees every candidate."""

from __future__ import annotations

import math

import pytest

from scheduler.core.plan import StepResult
from scheduler.core.request import FinishReason, Request
from tests.core.factories import VOCAB, content, create_driver, create_request, force_preemption, rank_candidates


def brute_force(request: Request) -> list[tuple[tuple[int, ...], float, FinishReason]]:
    """All extensions of all prefixes by the whole vocabulary, in one list each step; no pruning but the search's own
    rules: the `width` best that do not end go on; one that ends counts if it is among the `width` best of all."""
    width, stop = request.beam_width, request.sampling.stop_token_ids

    def score_of(outputs: tuple[int, ...]) -> dict[int, float]:
        history: list[int] = []
        for token_id in (*request.prompt_token_ids, *outputs):
            history.append(content(history, token_id))
        return dict(rank_candidates(history[-1], VOCAB))

    done: list[tuple[float, tuple[int, ...], float, FinishReason]] = []
    alive = [((), 0.0)]
    for length in range(1, request.max_tokens + 1):
        extended = [
            (total + logprob, (*outputs, token_id))
            for outputs, total in alive
            for token_id, logprob in score_of(outputs).items()
        ]
        extended.sort(reverse=True)
        for total, outputs in extended[:width]:
            if outputs[-1] in stop:
                done.append((total / length, outputs, total, FinishReason.STOP))
        alive = [(outputs, total) for total, outputs in extended[: 2 * width] if outputs[-1] not in stop][:width]
        done = sorted(done, reverse=True, key=lambda d: d[0])[:width]
        if length == request.max_tokens:
            done += [(total / length, outputs, total, FinishReason.LENGTH) for outputs, total in alive]
            break
        if not alive or (len(done) == width and alive[0][1] / length <= done[-1][0]):
            break
    done.sort(reverse=True, key=lambda d: d[0])
    return [(outputs, total, reason) for _, outputs, total, reason in done[: len(request.sequence_ids)]]


def search(driver, request: Request):
    found = {e.sequence_id: e for e in driver.events if e.sequence_id in request.sequence_ids}
    return [(e.token_ids, e.cumulative_logprob, e.finish_reason) for e in (found[i] for i in request.sequence_ids)]


def check(driver, request: Request) -> None:
    for got, expected in zip(search(driver, request), brute_force(request), strict=True):
        assert got[0] == expected[0]
        assert math.isclose(got[1], expected[1], abs_tol=1e-9)
        assert got[2] is expected[2]


def test_the_reference_with_one_beam_is_greedy():
    request = create_request(1, [1, 2], beam_width=1, max_tokens=5)
    history: list[int] = []
    for token_id in (1, 2):
        history.append(content(history, token_id))
    outputs = []
    for _ in range(5):
        outputs.append(rank_candidates(history[-1], 1)[0][0])
        history.append(content(history, outputs[-1]))
    assert brute_force(request)[0][0] == tuple(outputs)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stop", [(), (3,), (0, 5), (0, 2, 3, 6)])
@pytest.mark.parametrize(("width", "n"), [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4)])
def test_the_best_outputs_are_those_of_an_exhaustive_search(width, n, stop, depth):
    for prompt in ([1, 2, 3], [4], [5, 5, 0, 1], [6, 1, 2, 3, 4, 5, 6]):
        driver = create_driver(pipeline_depth=depth)
        request = create_request(1, prompt, n=n, beam_width=width, stop=stop, max_tokens=7)
        driver.core.add(request)
        driver.run()
        check(driver, request)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [10, 11, 13, 17])
def test_searches_survive_tiny_pools_that_they_share(num_blocks, depth):
    driver = create_driver(
        num_blocks=num_blocks, block_size=3, max_num_seqs=8, max_num_batched_tokens=8, pipeline_depth=depth
    )
    requests = [
        create_request(10 * i, [i, i + 1], n=2, beam_width=3, stop=[i], max_tokens=6, priority=i % 2)
        for i in range(1, 5)
    ]
    others = [create_request(100 + i, [i] * 4, max_tokens=7) for i in range(3)]
    for request in (*requests, *others):
        driver.core.add(request)
    driver.run()
    for request in requests:
        check(driver, request)
    assert driver.core.num_free_blocks == driver.core.num_blocks


@pytest.mark.parametrize("when", range(2, 8))
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_hypothesis_may_give_way_at_any_step(when, victim, depth):
    driver = create_driver(pipeline_depth=depth)
    request = create_request(1, [1, 2, 3], n=3, beam_width=3, max_tokens=8)
    driver.core.add(request)
    for _ in range(when):
        driver.step()
    driver.plan()
    beam = driver.core._beams[1]
    force_preemption(driver.core, beam.live[victim].sequence_id)
    driver.run()
    check(driver, request)


def test_an_end_that_is_not_among_the_best_of_a_step_is_no_output():
    driver = create_driver()
    driver.core.add(create_request(1, [1], beam_width=2, n=2, stop=[7], max_tokens=2))
    plan = driver.core.schedule()
    best = plan.row_sequences[0]
    driver.core.update(StepResult(plan.step_id, candidates={best: ((5, -0.1), (6, -0.2), (7, -0.3), (4, -9.0))}))
    plan = driver.core.schedule()
    worse = tuple((t, -90.0) for t in (1, 2, 3, 4))
    events = driver.core.update(StepResult(plan.step_id, candidates=dict.fromkeys(plan.row_sequences, worse)))
    assert [e.finish_reason for e in events] == [FinishReason.LENGTH, FinishReason.LENGTH]


def test_an_end_that_is_among_them_is_one():
    driver = create_driver()
    driver.core.add(create_request(1, [1], beam_width=2, n=2, stop=[7], max_tokens=2))
    plan = driver.core.schedule()
    best = plan.row_sequences[0]
    driver.core.update(StepResult(plan.step_id, candidates={best: ((5, -0.1), (7, -0.2), (6, -0.3), (4, -9.0))}))
    plan = driver.core.schedule()
    worse = tuple((t, -90.0) for t in (1, 2, 3, 4))
    events = driver.core.update(StepResult(plan.step_id, candidates=dict.fromkeys(plan.row_sequences, worse)))
    assert [(e.token_ids[0], e.finish_reason, e.cumulative_logprob) for e in events] == [
        (7, FinishReason.STOP, -0.2),
        (5, FinishReason.LENGTH, -90.1),
    ]


def test_nothing_is_planned_while_results_of_the_search_are_in_flight():
    driver = create_driver(pipeline_depth=3)
    driver.core.add(create_request(1, beam_width=2, n=2))
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.answer()
    assert driver.plan().num_tokens == 2
    assert driver.plan() is None


def test_outputs_are_told_at_the_end_and_at_once():
    driver = create_driver()
    driver.core.add(create_request(1, beam_width=3, n=2, max_tokens=4))
    while driver.core.sequence(1) is not None:
        assert not driver.events
        driver.step()
    assert [(e.sequence_id, e.first_position, len(e.token_ids)) for e in driver.events] == [(1, 0, 4), (2, 0, 4)]


def test_a_search_asks_for_twice_its_width_of_candidates():
    driver = create_driver()
    driver.core.add(create_request(1, beam_width=3, n=2))
    assert driver.plan().new[0].beam_candidates == 6


def test_ending_one_output_ends_the_search():
    driver = create_driver()
    driver.core.add(create_request(1, beam_width=3, n=2))
    driver.step()
    driver.step()
    driver.core.abort(2)
    driver.core.check_integrity()
    assert driver.core.num_free_blocks == driver.core.num_blocks
    driver.run()
    assert not driver.events


def test_an_error_of_one_hypothesis_ends_all_outputs():
    driver = create_driver()
    driver.core.add(create_request(1, beam_width=3, n=2))
    driver.step()
    driver.step()
    plan = driver.plan()
    driver.answer(fail=frozenset([plan.row_sequences[1]]))
    assert driver.finished == {1: FinishReason.ERROR, 2: FinishReason.ERROR}
    assert driver.core.num_free_blocks == driver.core.num_blocks
    driver.run()


def test_the_next_request_gets_its_seats_only_when_the_search_is_over():
    driver = create_driver(max_num_seqs=3)
    driver.core.add(create_request(1, beam_width=3, max_tokens=4))
    driver.core.add(create_request(2, [4], max_tokens=2))
    while 1 not in driver.finished:
        assert 2 not in driver.outputs
        driver.step()
    driver.run()
    assert driver.finished[2] is FinishReason.LENGTH
