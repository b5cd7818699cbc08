"""The spans of a request, in the scheduler and in the executors that compute it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import grpc
import pytest
from octavo.client import AsyncClient, Client
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import executor.tracing
import scheduler.tracing
from executor.config import StartupError
from executor.plan import BatchPlan, Fork, NewSequence, Sampling, StepResult, StepTimings
from executor.server import _open_tracing
from scheduler.__main__ import CannotTrace, tracing
from scheduler.config import parse_config
from scheduler.outputs import EndReason, QueueFull
from tests.services.executors import LocalExecutor, fleet, read_one, submission, until
from tests.services.fake_engine import FakeEngine, answer, text_ids
from tests.services.harness import make_request, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
GENERATE = "octavo.v1.Generation/Generate"
SEQUENCE = "octavo.v1.Executor/sequence"


class Spans:
    """What a tracing sent, by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.processor = SimpleSpanProcessor(self.exporter)

    def __getitem__(self, name: str) -> ReadableSpan:
        [span] = self.all(name)
        return span

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    @property
    def names(self) -> list[str]:
        return sorted(span.name for span in self.exporter.get_finished_spans())


def trace_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


def parent_of(span: ReadableSpan) -> str | None:
    return f"{span.parent.span_id:016x}" if span.parent is not None else None


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def new_sequence(sequence_id: int = 1, traceparent: str = TRACEPARENT, num_computed_tokens: int = 0) -> NewSequence:
    return NewSequence(sequence_id, [1, 2, 3], 3, num_computed_tokens, [1], 0, Sampling(), traceparent)


def step(spans: executor.tracing.SessionSpans, plan: BatchPlan, **result: object) -> None:
    spans.planned(plan)
    spans.answered(StepResult(plan.step_id, timings=StepTimings(10, 20, 300, 4000), **result))  # type: ignore[arg-type]


# --- the scheduler


async def test_a_calls_span_is_a_child_of_the_clients_and_goes_with_the_submission() -> None:
    spans = Spans()
    timings = {"queue_seconds": 0.25, "prefill_seconds": 0.5, "decode_seconds": 1.5}
    engine = FakeEngine(script=answer(*text_ids("Hello world"), executors=("i1",), **timings))
    async with serving(engine, scheduler.tracing.Tracing(spans.processor)) as running:
        call = running.stub.Generate(
            make_request(text="secret", request_id="r1", tenant="t"), metadata=[("traceparent", TRACEPARENT)]
        )
        assert [message async for message in call]
    span = spans[GENERATE]
    assert (trace_of(span), parent_of(span)) == (TRACE, PARENT)
    assert engine.tickets[0].submission.traceparent == f"00-{TRACE}-{id_of(span)}-01"
    told = {key: span.attributes[key] for key in ("octavo.request_id", "octavo.tenant", "octavo.num_output_tokens")}
    assert told == {"octavo.request_id": "r1", "octavo.tenant": "t", "octavo.num_output_tokens": 2}
    assert span.attributes["octavo.reasons"] == ("stop",)
    assert span.attributes["octavo.executors"] == ("i1",)
    assert "secret" not in span.to_json()
    stages = [spans[stage] for stage in ("queue", "prefill", "decode")]
    assert [(stage.end_time - stage.start_time) / 1e9 for stage in stages] == list(timings.values())
    assert [parent_of(stage) for stage in stages] == [id_of(span)] * 3
    assert [stage.start_time for stage in stages[1:]] == [stage.end_time for stage in stages[:-1]]


async def test_the_client_library_hands_the_callers_trace_on() -> None:
    spans = Spans()
    async with serving(tracing=scheduler.tracing.Tracing(spans.processor)) as running:
        async with AsyncClient(running.address) as client:
            await client.complete(text="Hello", traceparent=TRACEPARENT)

        def blocking() -> None:
            with Client(running.address) as client:
                client.complete(text="Hello", traceparent=TRACEPARENT)

        await asyncio.to_thread(blocking)
    assert [(trace_of(span), parent_of(span)) for span in spans.all(GENERATE)] == [(TRACE, PARENT)] * 2


@pytest.mark.parametrize("metadata", [[], [("traceparent", "nonsense")]])
async def test_a_call_without_a_trace_begins_one(metadata: list[tuple[str, str]]) -> None:
    spans = Spans()
    async with serving(tracing=scheduler.tracing.Tracing(spans.processor)) as running:
        assert [message async for message in running.stub.Generate(make_request(), metadata=metadata)]
        given = running.engine.tickets[0].submission.traceparent
    assert spans[GENERATE].parent is None
    assert given[:-2] == f"00-{trace_of(spans[GENERATE])}-{id_of(spans[GENERATE])}-"
    assert int(given[-2:], 16) & 1  # sampled


async def test_a_client_that_does_not_sample_is_not_traced() -> None:
    spans = Spans()
    async with serving(tracing=scheduler.tracing.Tracing(spans.processor)) as running:
        call = running.stub.Generate(make_request(), metadata=[("traceparent", f"00-{TRACE}-{PARENT}-00")])
        assert [message async for message in call]
        assert running.engine.tickets[0].submission.traceparent == ""
    assert spans.names == []


async def test_a_refused_call_has_its_error_and_none_of_its_text() -> None:
    spans = Spans()
    async with serving(
        FakeEngine(refusal=QueueFull("9 requests", 1.0)), scheduler.tracing.Tracing(spans.processor)
    ) as running:
        with pytest.raises(grpc.aio.AioRpcError):
            await running.generate(text="secret")
    span = spans[GENERATE]
    assert (span.status.status_code, span.status.description, span.events) == (StatusCode.ERROR, "QueueFull", ())
    assert "secret" not in span.to_json()


async def test_an_output_that_fails_is_the_spans_error() -> None:
    spans = Spans()
    engine = FakeEngine(script=answer(reason=EndReason.ERROR, error="it broke"))
    async with serving(engine, scheduler.tracing.Tracing(spans.processor)) as running:
        await running.generate()
    assert spans[GENERATE].status.status_code is StatusCode.ERROR
    assert spans[GENERATE].attributes["octavo.errors"] == ("it broke",)


async def test_without_tracing_nothing_goes_with_the_submission() -> None:
    async with serving() as running:
        call = running.stub.Generate(make_request(), metadata=[("traceparent", TRACEPARENT)])
        assert [message async for message in call]
        assert running.engine.tickets[0].submission.traceparent == ""


# --- the executor


async def test_an_executors_span_is_a_child_of_the_requests() -> None:
    spans = Spans()
    local = LocalExecutor(tracing=executor.tracing.Tracing(spans.processor, "i1"))
    async with fleet(local) as running:
        await read_one(running.engine.submit(submission([1, 2, 3], max_tokens=4, traceparent=TRACEPARENT)))
        await read_one(running.engine.submit(submission([4, 5, 6], max_tokens=4)))
        await until(lambda: len(spans.names) == 1)
    span = spans[SEQUENCE]
    assert (trace_of(span), parent_of(span)) == (TRACE, PARENT)
    assert span.resource.attributes["service.name"] == "octavo-executor"
    assert span.resource.attributes["service.instance.id"] == "i1"
    told = {key: span.attributes[f"octavo.{key}"] for key in ("num_prompt_tokens", "num_steps", "num_computed_tokens")}
    assert told == {"num_prompt_tokens": 3, "num_steps": 4, "num_computed_tokens": 6}
    assert 0 < span.attributes["octavo.step_seconds"] <= (span.end_time - span.start_time) / 1e9


async def test_a_request_that_moves_has_a_span_on_each_executor() -> None:
    spans = Spans()
    executors = [LocalExecutor(tracing=executor.tracing.Tracing(spans.processor, name)) for name in ("i1", "i2")]
    async with fleet(*executors) as running:
        ticket = running.engine.submit(submission(max_tokens=30, traceparent=TRACEPARENT))
        news = aiter(ticket)
        await anext(news)
        holder = running.executor_of(ticket)
        holder.model.gate.clear()
        await holder.kill()
        async for _ in news:
            pass
        await until(lambda: len(spans.all(SEQUENCE)) == 2)
    told = spans.all(SEQUENCE)
    assert {span.resource.attributes["service.instance.id"] for span in told} == {"i1", "i2"}
    assert [(trace_of(span), parent_of(span)) for span in told] == [(TRACE, PARENT)] * 2


def test_a_sequence_that_is_preempted_ends_its_span_and_begins_another() -> None:
    spans = Spans()
    session = executor.tracing.Tracing(spans.processor, "i1").session()
    step(session, BatchPlan(1, new=[new_sequence()], row_sequences=[1], row_tokens=[3]))
    step(session, BatchPlan(2, preempted=[1]))
    step(session, BatchPlan(3, new=[new_sequence(num_computed_tokens=2)], row_sequences=[1], row_tokens=[2]))
    step(session, BatchPlan(4, finished=[1]))
    first, second = spans.all(SEQUENCE)
    assert [first.attributes["octavo.preempted"], second.attributes["octavo.preempted"]] == [True, False]
    assert [first.attributes["octavo.num_cached_tokens"], second.attributes["octavo.num_cached_tokens"]] == [0, 2]
    assert [first.attributes["octavo.num_computed_tokens"], second.attributes["octavo.num_computed_tokens"]] == [3, 2]
    assert first.attributes["octavo.step_seconds"] == 4320 / 1e9


def test_a_replaced_sequence_ends_its_span() -> None:
    spans = Spans()
    session = executor.tracing.Tracing(spans.processor, "i1").session()
    for step_id in (1, 2):
        step(session, BatchPlan(step_id, new=[new_sequence()], row_sequences=[1], row_tokens=[3]))
    assert len(spans.all(SEQUENCE)) == 1


def test_forks_have_no_spans_of_their_own() -> None:
    spans = Spans()
    session = executor.tracing.Tracing(spans.processor, "i1").session()
    plan = BatchPlan(1, new=[new_sequence()], row_sequences=[1], row_tokens=[3], forks=[Fork(1, 2, 1)])
    step(session, plan)
    step(session, BatchPlan(2, row_sequences=[1, 2], row_tokens=[1, 1]))
    step(session, BatchPlan(3, finished=[1, 2]))
    assert spans[SEQUENCE].attributes["octavo.num_steps"] == 2


def test_the_end_of_a_session_ends_its_spans_and_a_failed_sequence_has_its_error() -> None:
    spans = Spans()
    session = executor.tracing.Tracing(spans.processor, "i1").session()
    news = [new_sequence(1), new_sequence(2), new_sequence(3, traceparent="")]
    step(session, BatchPlan(1, new=news, row_sequences=[1, 2, 3], row_tokens=[3, 3, 3]), errors={2: "it broke"})
    assert spans.names == []
    session.end()
    codes = [span.status.status_code for span in spans.all(SEQUENCE)]
    assert codes == [StatusCode.UNSET, StatusCode.ERROR]


# --- off


def test_nothing_of_opentelemetry_is_loaded_unless_it_is_asked_for() -> None:
    """All modules that the processes import, but for the model's."""
    program = (
        "import sys, scheduler.__main__, scheduler.engine, scheduler.server, executor.__main__, executor.server\n"
        "assert scheduler.__main__.tracing(scheduler.config.parse_config(['--executors', 'a:1'])) is None\n"
        "assert executor.server._open_tracing(None, 'i1') is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_what_is_not_installed_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scheduler.tracing", "executor.tracing"):
        monkeypatch.setitem(sys.modules, name, None)
    config = parse_config(["--executors", "a:1", "--otlp-endpoint", "http://collector:4317"])
    with pytest.raises(CannotTrace, match=r"pip install 'octavo\[otel\]'"):
        tracing(config)
    with pytest.raises(StartupError, match=r"pip install 'octavo\[otel\]'"):
        _open_tracing("http://collector:4317", "i1")
