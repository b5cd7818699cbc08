"""The process as its parent and its peers see it: lines, health, signals, exit codes."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from executor.service import PROTOCOL_VERSION

LIMIT = 30.0
SERVICE = "octavo.v1.Executor"


class Process:
    def __init__(self, *flags: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.executor.serve_fake", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def wait_for(self, word: str) -> str:
        """The address in the line that has the word."""
        while line := self.line():
            if line.startswith(f"octavo executor {word} address="):
                return line.partition("address=")[2]
        raise AssertionError(f"the process ended without a line {word!r}: {self.end()}")

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, stderr = self.child.communicate(timeout=LIMIT)
        return self.child.returncode, stderr


@contextmanager
def process(*flags: str) -> Iterator[Process]:
    running = Process(*flags)
    try:
        yield running
    finally:
        running.child.kill()
        running.child.communicate()


def health(channel: grpc.Channel, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def test_a_ready_executor_says_where_it_listens_and_serves() -> None:
    with process("--model", "fake") as running, grpc.insecure_channel(running.wait_for("listening")) as channel:
        assert running.line() == "octavo executor progress looking for the model"
        running.wait_for("ready")
        assert [health(channel, name) for name in (SERVICE, "", "liveness")] == ["SERVING"] * 3
        described = pb_grpc.ExecutorStub(channel).Describe(pb.DescribeRequest(), timeout=LIMIT)
        assert (described.ready, described.model_name, described.debug) == (True, "fake", pb.DebugState())
        running.child.send_signal(signal.SIGTERM)
        assert running.end()[0] == 0


def test_an_executor_that_loads_is_alive_and_not_ready() -> None:
    with process("--model", "slow") as running, grpc.insecure_channel(running.wait_for("listening")) as channel:
        assert [health(channel, name) for name in (SERVICE, "", "liveness")] == ["NOT_SERVING"] * 2 + ["SERVING"]
        described = pb_grpc.ExecutorStub(channel).Describe(pb.DescribeRequest(), timeout=LIMIT)
        assert (described.ready, described.model_name) == (False, "slow")
        running.child.send_signal(signal.SIGTERM)
        assert running.end()[0] == 0


@pytest.mark.parametrize(("model", "line", "code"), [("fake", "ready", 0), ("slow", "listening", 1)])
def test_octavo_health_tells_of_an_executor_as_of_a_server(model: str, line: str, code: int) -> None:
    with process("--model", model) as running:
        command = [sys.executable, "-m", "octavo.cli", "health", "--server", running.wait_for(line)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (code, ("SERVING\n", "NOT_SERVING\n")[code])


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_exit_code_1() -> None:
    with process("--model", "broken") as running:
        assert running.end() == (1, "octavo executor: no model 'broken'\n")


def test_a_fault_of_ours_is_exit_code_1_with_its_traceback_in_the_log() -> None:
    with process("--model", "faulty") as running:
        code, stderr = running.end()
        assert code == 1
        assert "a fault of ours" in stderr
        assert (
            stderr.splitlines()[-1] == "octavo executor: the model could not be loaded: RuntimeError: a fault of ours"
        )


def test_a_taken_port_is_one_sentence_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with process("--model", "fake", "--port", port) as running:
            code, stderr = running.end()
    assert (code, stderr.splitlines()[-1]) == (
        1,
        f"octavo executor: cannot listen on 127.0.0.1:{port}: the port is taken, "
        "or the address is not one of this machine",
    )


def test_a_wrong_flag_is_exit_code_2() -> None:
    with process("--num-blocks", "1") as running:
        code, stderr = running.end()
    assert code == 2
    assert stderr.endswith("error: --num-blocks 1 is less than 2: block 0 is never used\n")


def test_sigterm_drains_and_exits_when_the_stream_ends() -> None:
    with process("--model", "fake") as running, grpc.insecure_channel(running.wait_for("ready")) as channel:
        stub = pb_grpc.ExecutorStub(channel)
        stream = Stream(stub)
        running.child.send_signal(signal.SIGTERM)
        assert stream.wait_for("draining").draining.grace_seconds == 30
        assert [health(channel, name) for name in (SERVICE, "", "liveness")] == ["NOT_SERVING"] * 2 + ["SERVING"]
        stream.plan(pb.BatchPlan(step_id=1))
        assert stream.wait_for("result").result.step_id == 1
        stream.close()
        assert running.end()[0] == 0


def test_a_stream_that_outlives_the_grace_period_is_ended_and_the_exit_code_is_0() -> None:
    with (
        process("--model", "fake", "--grace-period", "0.1") as running,
        grpc.insecure_channel(running.wait_for("ready")) as channel,
    ):
        stream = Stream(pb_grpc.ExecutorStub(channel))
        running.child.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError, match=r"stopped 0\.1 s after it was asked to"):
            stream.wait_for("never")
        assert running.end()[0] == 0


def test_a_second_sigterm_does_not_wait() -> None:
    with process("--model", "fake") as running, grpc.insecure_channel(running.wait_for("ready")) as channel:
        stream = Stream(pb_grpc.ExecutorStub(channel))
        running.child.send_signal(signal.SIGTERM)
        stream.wait_for("draining")
        running.child.send_signal(signal.SIGTERM)
        assert running.end()[0] == -signal.SIGTERM


@pytest.mark.parametrize("module", ["argparse", "uvloop", "grpc"])
def test_an_interrupt_while_python_still_imports_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """It was a traceback of KeyboardInterrupt."""
    (tmp_path / f"{module}.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-m", "executor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=LIMIT)
    assert (child.returncode, stderr) == (130, "")


def test_a_schedulers_drain_ends_the_process_when_its_stream_ends() -> None:
    with process("--model", "fake") as running, grpc.insecure_channel(running.wait_for("ready")) as channel:
        stream = Stream(pb_grpc.ExecutorStub(channel))
        stream.send(pb.ToExecutor(drain=pb.Drain()))
        stream.plan(pb.BatchPlan(step_id=1))
        stream.wait_for("result")
        stream.close()
        assert running.end()[0] == 0


def test_reflection_names_the_services() -> None:
    with process("--model", "slow") as running, grpc.insecure_channel(running.wait_for("listening")) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=LIMIT)
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_it_ends_with_its_parent() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.executor.serve_fake",
        "--model",
        "slow",
        "--port",
        "0",
        "--exit-with-parent",
    ]
    script = f"import subprocess, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        while "listening" not in parent.stdout.readline():
            pass
        parent.kill()
    deadline = time.monotonic() + LIMIT
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_json_logs_are_one_object_a_line() -> None:
    with process("--model", "faulty", "--log-format", "json") as running:
        _, stderr = running.end()
    entry = json.loads(stderr.splitlines()[0])
    assert (entry["event"], entry["level"]) == ("loading failed", "error")
    assert "RuntimeError: a fault of ours" in entry["exception"]


class Stream:
    """A scheduler's session, blocking."""

    def __init__(self, stub: pb_grpc.ExecutorStub) -> None:
        described = stub.Describe(pb.DescribeRequest(), timeout=LIMIT)
        self._outgoing: queue.SimpleQueue[pb.ToExecutor | None] = queue.SimpleQueue()
        self._call = stub.Execute(iter(self._outgoing.get, None), timeout=LIMIT)
        hello = pb.Hello(
            scheduler_id="one", session=1, incarnation=described.incarnation, protocol_version=PROTOCOL_VERSION
        )
        self.send(pb.ToExecutor(hello=hello))
        self.wait_for("ready")

    def send(self, message: pb.ToExecutor) -> None:
        self._outgoing.put(message)

    def plan(self, plan: pb.BatchPlan) -> None:
        self.send(pb.ToExecutor(plan=plan))

    def wait_for(self, kind: str) -> pb.FromExecutor:
        return next(message for message in self._call if message.WhichOneof("message") == kind)

    def close(self) -> None:
        self._outgoing.put(None)


def test_a_device_that_does_not_survive_a_failed_step_ends_the_process() -> None:
    """Not in silence: the session is told the reason before, and whoever started the process reads it on stderr."""
    with process("--model", "failing") as running, grpc.insecure_channel(running.wait_for("ready")) as channel:
        incarnation = pb_grpc.ExecutorStub(channel).Describe(pb.DescribeRequest(), timeout=LIMIT).incarnation
        hello = pb.Hello(scheduler_id="one", session=1, incarnation=incarnation, protocol_version=PROTOCOL_VERSION)
        new = pb.NewSequence(sequence_id=1, token_ids=[3, 4], num_prompt_tokens=2, block_ids=[1])
        plan = pb.BatchPlan(step_id=1, new=[new], row_sequences=[1], row_tokens=[2])
        to_executor: queue.SimpleQueue[pb.ToExecutor] = queue.SimpleQueue()
        to_executor.put(pb.ToExecutor(hello=hello))
        to_executor.put(pb.ToExecutor(plan=plan))
        with pytest.raises(grpc.RpcError) as ended:
            list(pb_grpc.ExecutorStub(channel).Execute(iter(to_executor.get, None), timeout=LIMIT))
        assert ended.value.code() == grpc.StatusCode.INTERNAL
        assert "a step failed: RuntimeError: an illegal memory access was encountered" in ended.value.details()
        code, stderr = running.end()
        assert code == 1
        assert stderr.splitlines()[-1] == (
            "octavo executor: a step failed, and the device cannot be trusted after it: RuntimeError: an illegal "
            "memory access was encountered"
        )
