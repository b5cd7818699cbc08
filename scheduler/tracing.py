"""A span for each Generate call, sent to a collector by OTLP.

A call's span is a child of the `traceparent` in its metadata, and the parent of those that executors make of its
sequences: its own traceparent goes to them in the plan. Spans hold ids, numbers and times, and no text. The one module
here that imports OpenTelemetry, and imported only where --otlp-endpoint is given.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

STAGES = ("queue", "prefill", "decode")
CLOSE_SECONDS = 2.0  # no process waits longer for a collector that is away
_PROPAGATOR = TraceContextTextMapPropagator()


def open_tracing(endpoint: str) -> Tracing:
    """Spans go out from a thread, in batches; what a collector that is away does not take is dropped."""
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class Tracing:
    """Close it when done."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: "octavo-scheduler"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")

    @contextlib.contextmanager
    def request(self, request_id: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[RequestSpan]:
        """The span of a call, from now to the end of the block; an error that leaves the block is the span's status."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        span = self._tracer.start_span(
            "octavo.v1.Generation/Generate",
            context=_PROPAGATOR.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes={"octavo.request_id": request_id},
            record_exception=False,  # its text may quote the prompt
        )
        try:
            yield RequestSpan(self._tracer, span)
        except Exception as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Sends what has ended; blocks until then, or until it takes too long."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class RequestSpan:
    """One call's span while it is open."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._accepted_ns = time.time_ns()
        carrier: dict[str, str] = {}
        if span.is_recording():
            _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        self.traceparent = carrier.get("traceparent", "")  # empty where the caller's says not to sample

    def accepted(self) -> None:
        """The request waits in the queue from now on."""
        self._accepted_ns = time.time_ns()

    def summarize(self, values: Mapping[str, object]) -> None:
        """What the log's line of the request says; its stages become spans of their own."""
        for name, value in values.items():
            if isinstance(value, list):
                self._span.set_attribute(f"octavo.{name}", [str(item) for item in value])
            elif isinstance(value, int | float | str):
                self._span.set_attribute(f"octavo.{name}", value)
        if values["errors"]:
            self._span.set_status(StatusCode.ERROR)
        begin = self._accepted_ns
        for stage in STAGES:
            seconds = values[f"{stage}_seconds"]
            if isinstance(seconds, float) and seconds:
                span = self._tracer.start_span(
                    stage, context=set_span_in_context(self._span, Context()), start_time=begin
                )
                begin += round(seconds * 1e9)
                span.end(begin)
