"""`python -m scheduler` as a process: what it loads, how it stops, and what it says when it cannot start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.client import Client

REPORT_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print(*sorted(name for name in sys.modules if "." not in name)))
runpy.run_module("scheduler", run_name="__main__", alter_sys=True)
"""
HANGING_ENGINE = """
import asyncio, sys
from scheduler.config import parse_config
from scheduler.server import serve
from tests.services.fake_engine import FakeEngine, hang
sys.exit(asyncio.run(serve(parse_config(), FakeEngine(script=hang))))
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, and ends those that a test left."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, launch: tuple[str, ...] = ("-m", "scheduler")) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *launch, "--executors", "127.0.0.1:1", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until_alive(port: int, name: str = "liveness") -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while True:
            try:
                answer = check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True)
            except grpc.RpcError:  # it listens before its names are known
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.01)


def test_neither_torch_nor_transformers_is_loaded(start: Start, unused_tcp_port: int) -> None:
    process = start("--port", str(unused_tcp_port), launch=("-c", REPORT_MODULES))
    wait_until_alive(unused_tcp_port)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 0, err
    modules = set(out.split())
    assert {"scheduler", "tokenizers", "jinja2", "uvloop"} <= modules
    assert not {"torch", "transformers", "numpy", "executor", "cupy"} & modules


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_good_order(start: Start, unused_tcp_port: int, number: signal.Signals) -> None:
    process = start("--port", str(unused_tcp_port), "--log-format", "json")
    wait_until_alive(unused_tcp_port)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 0
    assert '"event": "draining"' in err
    assert '"event": "stopped"' in err
    assert "Traceback" not in err


def test_a_port_that_is_taken_is_one_sentence_and_exit_code_1(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("--port", str(taken.getsockname()[1]), "--log-level", "error")
        _, err = process.communicate()
    lines = [line for line in err.splitlines() if not line.startswith(("E0000", "E1", "I1", "WARNING"))]
    assert process.returncode == 1
    assert lines == [
        f"octavo scheduler: cannot listen on 127.0.0.1:{taken_port(process)}: "
        "the port is taken, or the address is not this machine's"
    ]


def taken_port(process: subprocess.Popen[str]) -> str:
    arguments = process.args
    assert isinstance(arguments, list)
    return str(arguments[arguments.index("--port") + 1])


def test_it_stops_when_its_parent_is_gone(unused_tcp_port: int) -> None:
    command = [sys.executable, "-m", "scheduler", "--executors", "127.0.0.1:1", "--exit-with-parent"]
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()",
            *command,
            "--port",
            str(unused_tcp_port),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_until_alive(unused_tcp_port)
    parent.kill()
    parent.communicate()
    while is_running(child):
        time.sleep(0.05)


def is_running(process_id: int) -> bool:
    """False for one that ended and that nobody waits for."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_second_signal_does_not_wait(start: Start, unused_tcp_port: int) -> None:
    process = start("--port", str(unused_tcp_port), launch=("-c", HANGING_ENGINE))
    wait_until_alive(unused_tcp_port, "octavo.v1.Generation")
    with Client(f"127.0.0.1:{unused_tcp_port}") as client:
        stream = client.generate(text="Hello")
        next(stream)
        process.send_signal(signal.SIGTERM)
        while client.health():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("module", ["argparse", "uvloop", "grpc"])
def test_an_interrupt_while_python_still_imports_is_quiet(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """It was a traceback of KeyboardInterrupt."""
    (tmp_path / f"{module}.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start()
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")
