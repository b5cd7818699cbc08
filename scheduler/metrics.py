"""The scheduler's Prometheus metrics: a registry of its own, names with units.

The service counts requests, the engine what becomes of them, each executor's session its steps; the server refreshes
the gauges from the engine's snapshot once a second. Nothing is kept per request, and no label takes its values from
clients. The label `executor` is an address, and its series go when the address does. docs/operations.md says what each
metric means for whoever looks.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from scheduler.core.plan import StepTimings
from scheduler.outputs import EndReason, ExecutorLoad, ExecutorState, Load

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BYTES = (64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
_NOTHING_COUNTED = ExecutorLoad("", "", ExecutorState.CONNECTING)
STEP_PARTS = ("queued", "prepare", "forward", "sample")  # of StepTimings


class Metrics:
    """All that is measured."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._describe_requests()
        self._describe_state()
        self._describe_steps()
        self._executors: dict[str, ExecutorMetrics] = {}
        self._counted: dict[str, ExecutorLoad] = {}  # by incarnation, as of the last refresh

    def _describe_requests(self) -> None:
        registry = self.registry
        self.requests = Counter("octavo_requests", "Outputs that ended", ["reason"], registry=registry)
        self.refused = Counter("octavo_requests_refused", "Calls ended by a status", ["code"], registry=registry)
        # A counter that begins with its first count shows no rate of it, and alerts ask for rates.
        for reason in EndReason:
            self.requests.labels(reason.value)
        for code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INVALID_ARGUMENT", "INTERNAL"):
            self.refused.labels(code)
        self.moved = Counter("octavo_requests_moved", "Requests that an executor left to others", registry=registry)
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
        self.queue_time = Histogram(
            "octavo_request_queue_time_seconds",
            "From a request's acceptance to its first step",
            buckets=LONG_SECONDS,
            registry=registry,
        )
        self.prefill_time = Histogram(
            "octavo_request_prefill_time_seconds",
            "From a request's first step to its first token",
            buckets=LONG_SECONDS,
            registry=registry,
        )
        self.decode_time = Histogram(
            "octavo_request_decode_time_seconds",
            "From an output's first token to its last",
            buckets=LONG_SECONDS,
            registry=registry,
        )
        self.request_prompt_tokens = Histogram(
            "octavo_request_prompt_tokens", "Prompt tokens of a request", buckets=TOKENS, registry=registry
        )
        self.request_output_tokens = Histogram(
            "octavo_request_generation_tokens", "Tokens of an output", buckets=TOKENS, registry=registry
        )

    def _describe_state(self) -> None:
        registry, by_executor = self.registry, ["executor"]
        self.waiting = Gauge("octavo_num_requests_waiting", "Requests that wait to be run", registry=registry)
        self.queue_tokens = Gauge("octavo_queue_tokens", "KV demand of the queue, in tokens", registry=registry)
        self.executors = Gauge("octavo_num_executors", "Addresses of executors", ["state"], registry=registry)
        self.lost = Counter("octavo_executors_lost", "Executors that ended unasked", registry=registry)
        self.stream_pause = Gauge(
            "octavo_stream_pause_seconds",
            "Streams wait so long between messages, for the loop is late",
            registry=registry,
        )
        self.running = Gauge("octavo_num_requests_running", "Sequences in its batch", by_executor, registry=registry)
        self.kv_cache_usage = Gauge(
            "octavo_kv_cache_usage_perc",
            "Share of KV blocks that sequences hold, in [0, 1]",
            by_executor,
            registry=registry,
        )
        self.plans_in_flight = Gauge(
            "octavo_plans_in_flight", "Plans sent and not yet answered", by_executor, registry=registry
        )
        self.preemptions = Counter(
            "octavo_num_preemptions", "Times a sequence's blocks were taken away", by_executor, registry=registry
        )
        self.prefix_queries = Counter(
            "octavo_prefix_cache_queries", "Tokens looked up in the prefix cache", by_executor, registry=registry
        )
        self.prefix_hits = Counter("octavo_prefix_cache_hits", "Of those, found", by_executor, registry=registry)

    def _describe_steps(self) -> None:
        registry, by_executor = self.registry, ["executor"]
        self.step_part = Counter(
            "octavo_step_part_seconds",
            "Of its steps' time: waiting for the step before, preparing, the model, drawing tokens",
            ["executor", "part"],
            registry=registry,
        )
        self.step_time = Histogram(
            "octavo_step_time_seconds",
            "From the start of a step to its last token, by the executor's clock",
            by_executor,
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.round_trip = Histogram(
            "octavo_plan_round_trip_seconds",
            "From the sending of a plan to its result, the steps before it included",
            by_executor,
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.step_sequences = Histogram(
            "octavo_step_sequences", "Sequences of a step", by_executor, buckets=SEQUENCES, registry=registry
        )
        self.step_tokens = Histogram(
            "octavo_step_tokens", "Tokens computed in a step", by_executor, buckets=TOKENS, registry=registry
        )
        self.plan_size = Histogram(
            "octavo_plan_size_bytes", "Of a plan on the wire", by_executor, buckets=BYTES, registry=registry
        )
        self.result_size = Histogram(
            "octavo_result_size_bytes", "Of a step's result on the wire", by_executor, buckets=BYTES, registry=registry
        )

    def executor(self, address: str) -> ExecutorMetrics:
        """The series of one address."""
        if address not in self._executors:
            self._executors[address] = ExecutorMetrics(self, address)
        return self._executors[address]

    def forget_executor(self, address: str) -> None:
        """The address is gone for good, and its series with it; whoever measures there still is not heard."""
        if self._executors.pop(address, None) is not None:
            for metric in self._of_executors():
                metric.remove_by_labels({"executor": address})

    def _of_executors(self) -> list[Counter | Gauge | Histogram]:
        return [
            *(self.running, self.kv_cache_usage, self.plans_in_flight),
            *(self.preemptions, self.prefix_queries, self.prefix_hits),
            *(self.step_part, self.step_time, self.round_trip),
            *(self.step_sequences, self.step_tokens, self.plan_size, self.result_size),
        ]

    def refresh(self, load: Load, stream_pause: float) -> None:
        """Takes the gauges from the engine's snapshot."""
        self.stream_pause.set(stream_pause)
        self.queue_tokens.set(load.queue_tokens)
        self.waiting.set(load.queue_length + sum(executor.num_waiting for executor in load.executors))
        for state in ExecutorState:
            self.executors.labels(state.value).set(sum(executor.state is state for executor in load.executors))
        for executor in load.executors:
            if executor.num_blocks:
                self._refresh_executor(executor)
            else:  # nobody is there, and a mean over executors must not count it
                for gauge in (self.running, self.kv_cache_usage, self.plans_in_flight):
                    gauge.remove(executor.target)
        self._counted = {executor.incarnation: executor for executor in load.executors}

    def _refresh_executor(self, executor: ExecutorLoad) -> None:
        address = executor.target
        self.running.labels(address).set(executor.num_running)
        self.kv_cache_usage.labels(address).set(1 - executor.num_free_blocks / executor.num_blocks)
        self.plans_in_flight.labels(address).set(executor.plans_in_flight)
        before = self._counted.get(executor.incarnation, _NOTHING_COUNTED)
        self.preemptions.labels(address).inc(executor.num_preemptions - before.num_preemptions)
        self.prefix_queries.labels(address).inc(executor.prefix_queries - before.prefix_queries)
        self.prefix_hits.labels(address).inc(executor.prefix_hits - before.prefix_hits)


class ExecutorMetrics:
    """What one address sends and hears. The children of its label are looked up once: this runs in every step."""

    def __init__(self, metrics: Metrics, address: str) -> None:
        self._round_trip = metrics.round_trip.labels(address)
        self._step_time = metrics.step_time.labels(address)
        self._parts = [metrics.step_part.labels(address, part) for part in STEP_PARTS]
        self._step_sequences = metrics.step_sequences.labels(address)
        self._step_tokens = metrics.step_tokens.labels(address)
        self._plan_size = metrics.plan_size.labels(address)
        self._result_size = metrics.result_size.labels(address)

    def sent(self, num_bytes: int, num_sequences: int, num_tokens: int) -> None:
        """A plan. One without sequences only tells of ends, and is no step."""
        self._plan_size.observe(num_bytes)
        if num_sequences:
            self._step_sequences.observe(num_sequences)
            self._step_tokens.observe(num_tokens)

    def answered(self, num_bytes: int, seconds: float, timings: StepTimings) -> None:
        """A step's result, so long after its plan was sent."""
        self._result_size.observe(num_bytes)
        self._round_trip.observe(seconds)
        self._step_time.observe((timings.prepare_ns + timings.forward_ns + timings.sample_ns) / 1e9)
        for part, nanoseconds in zip(self._parts, timings, strict=True):
            part.inc(nanoseconds / 1e9)
