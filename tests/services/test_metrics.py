"""What Prometheus is told: its names and labels, and that each value moves with what it counts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from scheduler.engine import Engine
from scheduler.metrics import Metrics
from scheduler.outputs import EndReason, ExecutorLoad, ExecutorState, Load
from tests.services.executors import LocalExecutor, fleet, read_one, submission, until
from tests.services.fake_engine import FakeEngine, answer, hang, text_ids
from tests.services.harness import make_request, serving
from tests.services.harness import until as soon

OPERATIONS = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"
LABELS = {
    "octavo_requests": ("reason",),
    "octavo_requests_refused": ("code",),
    "octavo_requests_moved": (),
    "octavo_prompt_tokens": (),
    "octavo_cached_prompt_tokens": (),
    "octavo_generation_tokens": (),
    "octavo_time_to_first_token_seconds": (),
    "octavo_inter_token_latency_seconds": (),
    "octavo_e2e_request_latency_seconds": (),
    "octavo_request_queue_time_seconds": (),
    "octavo_request_prefill_time_seconds": (),
    "octavo_request_decode_time_seconds": (),
    "octavo_request_prompt_tokens": (),
    "octavo_request_generation_tokens": (),
    "octavo_num_requests_waiting": (),
    "octavo_queue_tokens": (),
    "octavo_num_executors": ("state",),
    "octavo_executors_lost": (),
    "octavo_stream_pause_seconds": (),
    "octavo_num_requests_running": ("executor",),
    "octavo_kv_cache_usage_perc": ("executor",),
    "octavo_plans_in_flight": ("executor",),
    "octavo_num_preemptions": ("executor",),
    "octavo_prefix_cache_queries": ("executor",),
    "octavo_prefix_cache_hits": ("executor",),
    "octavo_step_part_seconds": ("executor", "part"),
    "octavo_step_time_seconds": ("executor",),
    "octavo_plan_round_trip_seconds": ("executor",),
    "octavo_step_sequences": ("executor",),
    "octavo_step_tokens": ("executor",),
    "octavo_plan_size_bytes": ("executor",),
    "octavo_result_size_bytes": ("executor",),
}


def value(engine: Engine | FakeEngine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(name, labels)


def labelled(registry: CollectorRegistry, label: str) -> set[str]:
    """All values that a label has anywhere."""
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {sample.labels[label] for sample in samples if label in sample.labels}


def refresh(engine: Engine) -> None:
    engine.metrics.refresh(engine.load(), stream_pause=0.0)


@contextlib.asynccontextmanager
async def one_executor(**limits: int) -> AsyncIterator[tuple[Engine, str, LocalExecutor]]:
    """An engine, and the address of its executor."""
    async with fleet(LocalExecutor(**limits)) as running:
        yield running.engine, running.executors[0].address, running.executors[0]


def test_names_and_labels_are_these() -> None:
    """Dashboards and alerts name them: a change here is a change for all who look."""
    metrics = Metrics()
    told = {
        name.removesuffix("_total"): metric._labelnames  # type: ignore[attr-defined]
        for metric, names in metrics.registry._collector_to_names.items()
        for name in names[:1]
        if name.startswith("octavo_")
    }
    assert told == LABELS
    assert "process_cpu_seconds" in {metric.name for metric in metrics.registry.collect()}


def test_the_documentation_says_of_each_metric_when_it_moves() -> None:
    rows = re.findall(r"^\| `(octavo_\w+)` \|(.*?)\| (.+) \|$", OPERATIONS.read_text(), re.MULTILINE)
    told = {name.removesuffix("_total"): tuple(re.findall(r"`(\w+)`", labels)) for name, labels, _ in rows}
    assert told == LABELS
    counters = {metric.name for metric in Metrics().registry.collect() if metric.type == "counter"}
    assert {name.removesuffix("_total") for name, _, _ in rows if name.endswith("_total")} == counters & set(LABELS)


async def test_steps_are_measured_for_each_executor() -> None:
    async with one_executor() as (engine, address, _):
        await read_one(engine.submit(submission([1, 2, 3], max_tokens=4)))
        counts = {
            name: value(engine, f"octavo_{name}_count", executor=address)
            for name in (
                "step_time_seconds",
                "plan_round_trip_seconds",
                "step_sequences",
                "step_tokens",
                "result_size_bytes",
            )
        }
        assert counts == dict.fromkeys(counts, 4.0)  # the prompt's, and three of one token
        assert value(engine, "octavo_step_tokens_sum", executor=address) == 3 + 1 + 1 + 1
        assert value(engine, "octavo_step_sequences_sum", executor=address) == 4
        plan_bytes = value(engine, "octavo_plan_size_bytes_sum", executor=address)
        result_bytes = value(engine, "octavo_result_size_bytes_sum", executor=address)
        assert plan_bytes is not None
        assert result_bytes is not None
        assert plan_bytes > 4 * 4
        assert result_bytes > 4 * 4
        parts = {
            part: value(engine, "octavo_step_part_seconds_total", executor=address, part=part)
            for part in ("queued", "prepare", "forward", "sample")
        }
        assert all(seconds is not None and seconds > 0 for seconds in parts.values())
        spent = sum(seconds for part, seconds in parts.items() if part != "queued" and seconds is not None)
        step_time = value(engine, "octavo_step_time_seconds_sum", executor=address)
        round_trip = value(engine, "octavo_plan_round_trip_seconds_sum", executor=address)
        assert step_time is not None
        assert round_trip is not None
        assert abs(spent - step_time) < 1e-9
        assert round_trip > step_time


async def test_a_plan_that_only_tells_of_ends_is_no_step() -> None:
    async with one_executor() as (engine, address, _):
        await read_one(engine.submit(submission(max_tokens=2)))
        await until(lambda: value(engine, "octavo_plan_size_bytes_count", executor=address) == 3)
        assert value(engine, "octavo_step_sequences_count", executor=address) == 2
        assert value(engine, "octavo_step_time_seconds_count", executor=address) == 2


async def test_what_runs_and_what_it_holds_is_told_for_each_executor() -> None:
    async with one_executor(num_blocks=17, block_size=4, max_num_seqs=1) as (engine, address, executor):
        executor.model.gate.clear()
        first, second = (engine.submit(submission(range(1, 9), max_tokens=8)) for _ in range(2))
        await until(lambda: first.first_step_at is not None)
        refresh(engine)
        assert value(engine, "octavo_num_requests_running", executor=address) == 1
        assert value(engine, "octavo_num_requests_waiting") == 1
        assert value(engine, "octavo_queue_tokens") == 16
        assert value(engine, "octavo_plans_in_flight", executor=address) == 2
        assert value(engine, "octavo_kv_cache_usage_perc", executor=address) == 3 / 16
        assert value(engine, "octavo_num_executors", state="ready") == 1
        executor.model.gate.set()
        await read_one(first)
        await read_one(second)
        refresh(engine)
        assert value(engine, "octavo_num_requests_running", executor=address) == 0
        assert value(engine, "octavo_num_requests_waiting") == 0
        assert value(engine, "octavo_kv_cache_usage_perc", executor=address) == 0
        assert value(engine, "octavo_request_queue_time_seconds_count") == 2


async def test_prefix_hits_are_counted_once() -> None:
    async with one_executor(block_size=4) as (engine, address, _):
        for _ in range(2):
            await read_one(engine.submit(submission(range(1, 10), max_tokens=1)))
            refresh(engine)
            refresh(engine)
        assert value(engine, "octavo_prefix_cache_queries_total", executor=address) == 18
        assert value(engine, "octavo_prefix_cache_hits_total", executor=address) == 8


async def test_preemptions_are_counted() -> None:
    async with one_executor(num_blocks=9, block_size=4) as (engine, address, _):
        tickets = [engine.submit(submission([i, 2, 3], max_tokens=20)) for i in range(1, 4)]
        finishes = [(await read_one(ticket)).finish for ticket in tickets]
        told = sum(finish.num_preemptions for finish in finishes if finish is not None)
        refresh(engine)
        assert told > 0
        assert value(engine, "octavo_num_preemptions_total", executor=address) == told


async def test_a_lost_executor_is_counted_and_so_is_what_it_leaves() -> None:
    async with fleet(LocalExecutor(), LocalExecutor()) as running:
        for executor in running.executors:
            executor.model.gate.clear()
        ticket = running.engine.submit(submission(max_tokens=4))
        await until(lambda: bool(ticket.executors))
        holder = running.executor_of(ticket)
        await holder.kill()
        for executor in running.executors:
            executor.model.gate.set()
        assert len((await read_one(ticket)).token_ids) == 4
        refresh(running.engine)
        assert value(running.engine, "octavo_executors_lost_total") == 1
        assert value(running.engine, "octavo_requests_moved_total") == 1
        assert value(running.engine, "octavo_num_executors", state="ready") == 1
        assert value(running.engine, "octavo_kv_cache_usage_perc", executor=holder.address) is None


def test_the_series_of_an_address_go_when_it_does() -> None:
    """Under Kubernetes every new pod has a new one."""
    metrics = Metrics()
    here = ExecutorLoad("10.0.0.1:1", "i1", ExecutorState.READY, num_blocks=10, num_free_blocks=5, prefix_queries=7)
    there = replace(here, target="10.0.0.2:1", incarnation="i2")
    for address in ("10.0.0.1:1", "10.0.0.2:1"):
        metrics.executor(address).sent(100, 1, 1)
    metrics.refresh(Load((here, there)), stream_pause=0.0)
    assert labelled(metrics.registry, "executor") == {"10.0.0.1:1", "10.0.0.2:1"}
    metrics.forget_executor("10.0.0.1:1")
    metrics.refresh(Load((there,)), stream_pause=0.0)
    assert labelled(metrics.registry, "executor") == {"10.0.0.2:1"}


def test_what_alerts_ask_for_begins_at_nothing() -> None:
    """A counter that appeared with its first error showed no rate of it."""
    registry = Metrics().registry
    assert registry.get_sample_value("octavo_requests_total", {"reason": "error"}) == 0
    assert registry.get_sample_value("octavo_requests_refused_total", {"code": "INTERNAL"}) == 0


def test_a_late_loop_is_told() -> None:
    metrics = Metrics()
    metrics.refresh(Load(), stream_pause=0.25)
    assert metrics.registry.get_sample_value("octavo_stream_pause_seconds") == 0.25
    assert metrics.registry.get_sample_value("octavo_num_executors", {"state": "ready"}) == 0


def test_a_new_executor_at_an_address_counts_on() -> None:
    metrics = Metrics()
    first = ExecutorLoad("10.0.0.1:1", "i1", ExecutorState.READY, num_blocks=10, num_free_blocks=5, prefix_queries=7)
    for load in (first, replace(first, prefix_queries=9), replace(first, incarnation="i2", prefix_queries=4)):
        metrics.refresh(Load((load,)), stream_pause=0.0)
    labels = {"executor": "10.0.0.1:1"}
    assert metrics.registry.get_sample_value("octavo_prefix_cache_queries_total", labels) == 9 + 4


async def test_a_request_is_counted_when_it_ends() -> None:
    engine = FakeEngine(
        script=answer(*text_ids("one two three"), prefill_seconds=0.2, decode_seconds=1.5, num_cached_tokens=1)
    )
    async with serving(engine) as running:
        await running.generate(text="Hello world")
        prompt = len(running.engine.tickets[0].submission.prompt_token_ids)
    assert value(engine, "octavo_requests_total", reason="stop") == 1
    assert value(engine, "octavo_prompt_tokens_total") == value(engine, "octavo_request_prompt_tokens_sum") == prompt
    tokens = float(len(text_ids("one two three")))
    assert (
        value(engine, "octavo_generation_tokens_total")
        == value(engine, "octavo_request_generation_tokens_sum")
        == tokens
    )
    assert value(engine, "octavo_cached_prompt_tokens_total") == 1
    assert value(engine, "octavo_request_prefill_time_seconds_sum") == 0.2
    assert value(engine, "octavo_request_decode_time_seconds_sum") == 1.5
    assert value(engine, "octavo_e2e_request_latency_seconds_count") == 1


async def test_no_label_takes_its_values_from_clients() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        call = running.stub.Generate(
            make_request(request_id="secret-id", tenant="secret-tenant", cache_salt="secret-salt")
        )
        await call.read()
        call.cancel()
        engine = running.engine
        await soon(lambda: value(engine, "octavo_requests_total", reason=EndReason.CANCELLED.value) == 1)
        told = {
            label for metric in engine.metrics.registry.collect() for s in metric.samples for label in s.labels.values()
        }
    assert not [label for label in told if "secret" in label]
