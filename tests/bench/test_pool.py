"""What loads say of the KV cache during a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from octavo.bench.pool import Own, PoolWatch
from octavo.client import ExecutorLoad, ExecutorState, Load

NOTHING = Own(0, 0)


def make_executor(**overrides: object) -> ExecutorLoad:
    executor = ExecutorLoad("here:1", "i1", ExecutorState.READY, "", 2, 0, 10, 6, 100, 40, 3, 1, 9)
    return replace(executor, **overrides)  # type: ignore[arg-type]


def make_load(*executors: ExecutorLoad, **overrides: object) -> Load:
    return replace(Load(executors, 0, 0, 9, (), False), **overrides)  # type: ignore[arg-type]


def test_use_is_the_share_of_blocks_that_sequences_hold() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.add(make_load(make_executor(num_free_blocks=8)), NOTHING, 0.1)
    watch.add(make_load(make_executor(num_free_blocks=2)), NOTHING, 0.2)
    assert (watch.use().mean_used, watch.use().peak_used) == pytest.approx((0.5, 0.8))


def test_a_lost_executor_has_no_blocks() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    lost = make_executor(incarnation="i2", state=ExecutorState.LOST, num_free_blocks=0)
    watch.add(make_load(make_executor(num_free_blocks=5), lost), NOTHING, 0.1)
    assert watch.use().mean_used == pytest.approx(0.5)


def test_counters_are_those_of_the_run() -> None:
    watch = PoolWatch(make_load(make_executor(prefix_queries=100, prefix_hits=40, num_preemptions=3)), 16)
    watch.count(make_load(make_executor(prefix_queries=300, prefix_hits=90, num_preemptions=5)))
    assert watch.use().hit_rate == pytest.approx(0.25)
    assert watch.use().num_preemptions == 2


def test_an_executor_that_joined_later_began_at_nothing() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.count(make_load(make_executor(), make_executor(incarnation="i2", prefix_queries=10, prefix_hits=5)))
    assert watch.use().hit_rate == pytest.approx(0.5)


def test_an_executor_that_left_keeps_what_it_counted() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.count(make_load(make_executor(num_preemptions=4)))
    watch.count(make_load())
    assert watch.use().num_preemptions == 1


def test_no_lookups_have_no_hit_rate() -> None:
    assert PoolWatch(make_load(make_executor()), 16).use().hit_rate is None


def test_waste_is_known_while_all_that_runs_is_ours_and_decodes() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.add(make_load(make_executor()), Own(num_decoding=2, num_tokens=48), 0.1)
    assert watch.use().waste == pytest.approx(0.25)  # 48 tokens in 4 blocks of 16


@pytest.mark.parametrize(
    "load",
    [make_load(make_executor(num_running=3)), make_load(make_executor(), queue_length=1)],
    ids=["others", "queue"],
)
def test_waste_is_not_known_while_others_run_or_wait(load: Load) -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.add(load, Own(num_decoding=2, num_tokens=48), 0.1)
    assert watch.use().waste is None


def test_waste_is_not_known_where_blocks_were_shared() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.add(make_load(make_executor(prefix_queries=200, prefix_hits=50)), Own(2, 48), 0.1)
    assert watch.use().waste is None


def test_a_client_ahead_of_the_load_makes_no_waste_below_nothing() -> None:
    watch = PoolWatch(make_load(make_executor()), 16)
    watch.add(make_load(make_executor()), Own(2, 66), 0.1)
    assert watch.use().waste == 0
