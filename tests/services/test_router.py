"""The router: who gets a request, by cached prefix and by load; and the same in a simulation against its rivals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.router import Load, compare
from scheduler.router import DECODE_TOKENS, Candidate, choose, cost

IDLE = Candidate(obstacle=None, cached_tokens=0, queued_tokens=0, num_running=0, num_free_blocks=100)


def candidate(**overrides: object) -> Candidate:
    return replace(IDLE, **overrides)  # type: ignore[arg-type]


def chosen(*candidates: Candidate, num_tokens: int = 1000) -> int | None:
    choice = choose(num_tokens, candidates)
    return None if choice is None else choice.candidate


@pytest.mark.parametrize(
    ("candidates", "wanted"),
    [
        pytest.param([], None, id="nobody is there"),
        pytest.param([candidate(obstacle="full")], None, id="the only one is full"),
        pytest.param([IDLE, candidate(cached_tokens=160)], 1, id="a cached prefix wins among idle ones"),
        pytest.param([candidate(cached_tokens=160), candidate(cached_tokens=320)], 1, id="the longer prefix wins"),
        pytest.param([candidate(queued_tokens=10), IDLE], 1, id="less to compute wins"),
        pytest.param([candidate(num_running=1), IDLE], 1, id="fewer that run win"),
        pytest.param(
            [candidate(cached_tokens=320, queued_tokens=319), IDLE], 0, id="a prefix is worth the wait it saves"
        ),
        pytest.param([candidate(cached_tokens=320, queued_tokens=321), IDLE], 1, id="and not a token more"),
        pytest.param(
            [candidate(cached_tokens=992, obstacle="no block"), candidate(queued_tokens=5000)],
            1,
            id="no prefix opens a full one",
        ),
        pytest.param([candidate(num_free_blocks=99), IDLE], 1, id="a tie goes to more free blocks"),
        pytest.param([IDLE, IDLE, IDLE], 0, id="and then to the first"),
        pytest.param([candidate(obstacle="full"), IDLE], 1, id="its index is that among all"),
    ],
)
def test_who_is_chosen(candidates: list[Candidate], wanted: int | None) -> None:
    assert chosen(*candidates) == wanted


def test_the_reason_tells_what_is_computed_before_the_first_token() -> None:
    choice = choose(100, [candidate(cached_tokens=64, queued_tokens=20, num_running=2)])
    assert choice is not None
    assert choice.reason == (
        "36 of 100 tokens to compute, 20 queued and 2 sequences running before them: "
        f"cost {36 + 20 + 2 * DECODE_TOKENS}"
    )


candidates = st.lists(
    st.builds(
        Candidate,
        obstacle=st.sampled_from([None, None, "full"]),
        cached_tokens=st.integers(0, 63).map(lambda blocks: blocks * 16),
        queued_tokens=st.integers(0, 5000),
        num_running=st.integers(0, 64),
        num_free_blocks=st.integers(0, 1000),
    ),
    max_size=64,
)


@given(candidates)
def test_one_is_chosen_whenever_one_has_no_obstacle_and_never_one_that_has(given: list[Candidate]) -> None:
    index = chosen(*given)
    if index is None:
        assert all(one.obstacle for one in given)
    else:
        assert given[index].obstacle is None


@given(candidates)
def test_nobody_without_an_obstacle_would_have_been_sooner(given: list[Candidate]) -> None:
    index = chosen(*given)
    if index is not None:
        best = min(cost(1000, one) for one in given if one.obstacle is None)
        assert cost(1000, given[index]) == best


@given(candidates, st.integers(0, 2**32))
def test_the_order_in_which_executors_are_listed_does_not_change_the_cost(given: list[Candidate], seed: int) -> None:
    index = chosen(*given)
    shuffled = sorted(given, key=lambda one: hash((seed, one)))
    other = chosen(*shuffled)
    assert (index is None) == (other is None)
    if index is not None and other is not None:
        assert cost(1000, given[index]) == cost(1000, shuffled[other])
        assert given[index].num_free_blocks == shuffled[other].num_free_blocks


@given(candidates, st.integers(0, 63))
def test_more_in_the_cache_never_loses_a_request(given: list[Candidate], blocks: int) -> None:
    index = chosen(*given)
    if index is not None:
        better = replace(given[index], cached_tokens=given[index].cached_tokens + 16 * blocks)
        assert chosen(*given[:index], better, *given[index + 1 :]) == index


@pytest.mark.parametrize("num_executors", [4, 8])
def test_on_shared_prefixes_it_hits_more_than_its_rivals_and_its_slowest_wait_less(num_executors: int) -> None:
    rows = {row.policy: row for row in compare(num_executors, Load(requests=30), seed=0)}
    router = rows.pop("router")
    assert all(router.hit_rate > rival.hit_rate for rival in rows.values())
    assert router.ttft_p99_ms <= rows["round robin"].ttft_p99_ms
    assert router.ttft_p50_ms <= min(rival.ttft_p50_ms for rival in rows.values())


def test_the_simulation_is_the_same_for_the_same_seed() -> None:
    load = Load(requests=10)
    assert compare(2, load, seed=3) == compare(2, load, seed=3) != compare(2, load, seed=4)
