"""A span for each sequence that a session brought, sent to a collector by OTLP.

From the plan that introduces a sequence to the last step before a plan takes it away; a child of the span that the
sequence's traceparent names. Forks of a sequence have none of their own. All methods run on the event loop. The one
module here that imports OpenTelemetry, and imported only where --otlp-endpoint is given.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from executor.plan import BatchPlan, NewSequence, StepResult

CLOSE_SECONDS = 2.0  # no process waits longer for a collector that is away
_PROPAGATOR = TraceContextTextMapPropagator()


def open_tracing(endpoint: str, incarnation: str) -> Tracing:
    """Spans go out from a thread, in batches; what a collector that is away does not take is dropped."""
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), incarnation)


class Tracing:
    """Close it when done."""

    def __init__(self, processor: SpanProcessor, incarnation: str) -> None:
        resource = Resource.create({SERVICE_NAME: "octavo-executor", SERVICE_INSTANCE_ID: incarnation})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")

    def session(self) -> SessionSpans:
        return SessionSpans(self._tracer)

    def close(self) -> None:
        """Sends what has ended; blocks until then, or until it takes too long."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


@dataclass(slots=True)
class _Traced:
    """A sequence with a span."""

    span: Span
    ended_ns: int  # of its last step
    num_steps: int = 0
    num_tokens: int = 0  # computed
    step_ns: int = 0  # of those steps, by the executor's clock


class SessionSpans:
    """Is told of every plan, and of every result, in order."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._plans: deque[tuple[BatchPlan, int]] = deque()  # unanswered, each with the time of its receipt
        self._traced: dict[int, _Traced] = {}  # by sequence id

    def planned(self, plan: BatchPlan) -> None:
        self._plans.append((plan, time.time_ns()))

    def answered(self, result: StepResult) -> None:
        plan, received_ns = self._plans.popleft()
        for sequence_id in plan.finished:
            self._end(sequence_id)
        for sequence_id in plan.preempted:
            self._end(sequence_id, preempted=True)
        for new in plan.new:
            self._end(new.sequence_id)
            if new.traceparent:
                self._traced[new.sequence_id] = self._begin(new, received_ns)
        if not self._traced:
            return
        timings, now = result.timings, time.time_ns()
        for sequence_id, num_tokens in zip(plan.row_sequences, plan.row_tokens, strict=True):
            if (traced := self._traced.get(sequence_id)) is not None:
                traced.num_steps += 1
                traced.num_tokens += num_tokens
                traced.step_ns += timings.prepare_ns + timings.forward_ns + timings.sample_ns
                traced.ended_ns = now
        for sequence_id, error in result.errors.items():
            if (traced := self._traced.get(sequence_id)) is not None:
                traced.span.set_status(StatusCode.ERROR, error)

    def end(self) -> None:
        """The session is over, and whatever it held is forgotten."""
        for sequence_id in list(self._traced):
            self._end(sequence_id)

    def _begin(self, new: NewSequence, received_ns: int) -> _Traced:
        span = self._tracer.start_span(
            "octavo.v1.Executor/sequence",
            context=_PROPAGATOR.extract({"traceparent": new.traceparent}, Context()),
            kind=SpanKind.SERVER,
            attributes={
                "octavo.sequence_id": new.sequence_id,
                "octavo.num_prompt_tokens": new.num_prompt_tokens,
                "octavo.num_cached_tokens": new.num_computed_tokens,
            },
            start_time=received_ns,
        )
        return _Traced(span, received_ns)

    def _end(self, sequence_id: int, *, preempted: bool = False) -> None:
        traced = self._traced.pop(sequence_id, None)
        if traced is not None:
            traced.span.set_attributes(
                {
                    "octavo.num_steps": traced.num_steps,
                    "octavo.num_computed_tokens": traced.num_tokens,
                    "octavo.step_seconds": traced.step_ns / 1e9,
                    "octavo.preempted": preempted,
                }
            )
            traced.span.end(traced.ended_ns)
