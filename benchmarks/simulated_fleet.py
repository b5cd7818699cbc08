"""Many simulated executors in one process, for benchmarks: `python -m benchmarks.simulated_fleet COUNT STEP_MS`.

Each has a port, a service and a step thread of its own, as a process of its own would. Prints their addresses as JSON;
then each line on stdin is answered with the intervals, in seconds, from the end of one step to the end of the next, of
all executors since the line before. Steps that did not follow at once (nothing was planned) count like all others.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid

import grpc.aio
import uvloop
from octavo.v1 import executor_pb2_grpc

from executor.config import parse_arguments
from executor.log import configure_log
from executor.plan import BatchPlan, StepResult
from executor.service import ExecutorService, ServiceOptions
from executor.simulated import SimulatedRunner, load_simulated
from executor.step_thread import StepThread


class TimedRunner(SimulatedRunner):
    """Keeps the intervals between its steps."""

    intervals: list[float]
    _last = 0.0

    def run(self, plan: BatchPlan, queued_ns: int = 0) -> StepResult:
        result = super().run(plan, queued_ns)
        if plan.row_sequences:
            now = time.monotonic()
            self.intervals.append(now - self._last)
            self._last = now
        return result


async def main(count: int, step_ms: str) -> None:
    configure_log("console", "error")  # stdout is for answers
    config = parse_arguments([f"--simulate-step-ms={step_ms}", "--num-blocks=8192"], {})
    runners, servers, addresses = [], [], []
    for _ in range(count):
        model = load_simulated(config, "", lambda line: None).model
        runner = TimedRunner(model.limits, float(step_ms) / 1e3, model.eos_token_ids)
        runner.intervals = []
        steps = StepThread(runner)
        steps.start()
        service = ExecutorService(ServiceOptions(model.name, model.device, uuid.uuid4().hex))
        service.serve(model, steps)
        server = grpc.aio.server()
        executor_pb2_grpc.add_ExecutorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        runners.append(runner)
        servers.append(server)
    print(json.dumps(addresses), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([round(one, 6) for runner in runners for one in runner.intervals]), flush=True)
        for runner in runners:
            runner.intervals = []


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
