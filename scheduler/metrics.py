"""The scheduler's Prometheus metrics: a registry of its own, names with units, and the port that serves them.

The service counts, the server refreshes the gauges from the engine's snapshot once a second. Nothing is kept per
request, and no label takes its values from clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from scheduler.outputs import Load

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """All that is measured."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("octavo_num_requests_running", "Sequences in the executors' batches", registry=registry)
        self.waiting = Gauge("octavo_num_requests_waiting", "Requests that wait to be run", registry=registry)
        self.kv_cache_usage = Gauge(
            "octavo_kv_cache_usage_perc", "Share of KV blocks that sequences hold, in [0, 1]", registry=registry
        )
        self.requests = Counter("octavo_requests", "Outputs that ended", ["reason"], registry=registry)
        self.refused = Counter("octavo_requests_refused", "Calls ended by a status", ["code"], registry=registry)
        self.prompt_tokens = Counter("octavo_prompt_tokens", "Prompt tokens accepted", registry=registry)
        self.cached_tokens = Counter("octavo_cached_prompt_tokens", "Of those, cached before", registry=registry)
        self.output_tokens = Counter("octavo_generation_tokens", "Output tokens", registry=registry)
        self.time_to_first_token = Histogram(
            "octavo_time_to_first_token_seconds",
            "From a call's arrival to its first token",
            buckets=LONG_SECONDS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "octavo_inter_token_latency_seconds",
            "Between news of one output, per token",
            buckets=SHORT_SECONDS,
            registry=registry,
        )
        self.request_latency = Histogram(
            "octavo_e2e_request_latency_seconds",
            "From a call's arrival to its end",
            buckets=LONG_SECONDS,
            registry=registry,
        )

    def refresh(self, load: Load) -> None:
        """Takes the gauges from the engine's snapshot."""
        self.running.set(sum(executor.num_running for executor in load.executors))
        self.waiting.set(load.queue_length + sum(executor.num_waiting for executor in load.executors))
        blocks = sum(executor.num_blocks for executor in load.executors)
        free = sum(executor.num_free_blocks for executor in load.executors)
        self.kv_cache_usage.set((blocks - free) / blocks if blocks else 0.0)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answers GET /metrics from a thread; returns what stops it. Raises OSError where the port is taken."""
        server: WSGIServer
        thread: threading.Thread
        server, thread = start_http_server(port, host, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
