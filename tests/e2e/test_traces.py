"""One trace across both processes, as a collector gets it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from octavo.v1 import generation_pb2 as pb
from octavo.v1.generation_pb2_grpc import GenerationStub
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.servers import Running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(TraceServiceServicer):
    """Keeps what it gets: spans by service and name."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], list[Span]] = {}
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(
        self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            [service] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.setdefault((service, span.name), []).append(span)
        return otlp.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


def test_a_trace_goes_through_both_processes(collector: Collector) -> None:
    flags = ("--port=0", "--simulate-step-ms=1", f"--otlp-endpoint=http://127.0.0.1:{collector.port}")
    with Running("serve", *flags) as running, grpc.insecure_channel(running.address) as channel:
        request = pb.GenerateRequest(text="What is traced?", max_tokens=5)
        stub = GenerationStub(channel)
        assert list(stub.Generate(request, metadata=[("traceparent", f"00-{TRACE}-{PARENT}-01")]))
        assert list(stub.Generate(request, metadata=[("traceparent", f"00-{TRACE}-{PARENT}-00")]))  # not to be sampled
        running.interrupt()
        assert running.end() == 0
    [call] = collector.spans["octavo-scheduler", "octavo.v1.Generation/Generate"]
    [sequence] = collector.spans["octavo-executor", "octavo.v1.Executor/sequence"]
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert (sequence.trace_id.hex(), sequence.parent_span_id) == (TRACE, call.span_id)
    [steps] = [each.value.int_value for each in sequence.attributes if each.key == "octavo.num_steps"]
    assert steps == 5
    assert call.start_time_unix_nano <= sequence.start_time_unix_nano
    assert b"What is traced?" not in call.SerializeToString() + sequence.SerializeToString()
