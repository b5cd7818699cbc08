"""Mutual TLS between the processes, TLS and tokens for clients, all by flags, with the `octavo` command as client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.client import AccessDenied, Client, ClientFiles, OctavoError
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from tests.e2e.servers import Running, octavo, wait_until
from tests.services.certificates import Authority, Pair

TOKEN, ADMIN = "a-token-of-a-tenant", "a-token-of-an-admin"


class Setup:
    """Certificates of both processes, and a file of tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.scheduler, self.executor = self.authority.issue("scheduler"), self.authority.issue("executor")
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"acme {TOKEN}\noperations {ADMIN} admin\n")

    @contextmanager
    def running_executor(self) -> Iterator[tuple[str, str]]:
        """Its address, and that of its health port."""
        health = free_port()
        flags = ["--simulate-step-ms=1", "--port=0", "--scheduler-name=scheduler", f"--health-port={health}"]
        flags += [f"--tls-cert={self.executor.cert}", f"--tls-key={self.executor.key}"]
        with child("executor", *flags, f"--tls-client-ca={self.authority.ca}") as process:
            assert process.stdout is not None
            for line in process.stdout:
                if " ready address=" in line:
                    yield line.rpartition("=")[2].strip(), f"127.0.0.1:{health}"
                    return
            raise AssertionError("the executor ended")

    @contextmanager
    def running_scheduler(self, executor: str, pair: Pair) -> Iterator[tuple[str, str]]:
        port, health = free_port(), free_port()
        flags = [f"--executors={executor}", f"--port={port}", f"--health-port={health}", f"--tokens-file={self.tokens}"]
        flags += [
            f"--tls-cert={self.scheduler.cert}",
            f"--tls-key={self.scheduler.key}",
            "--executor-tls-name=executor",
        ]
        flags += [f"--executor-tls-ca={self.authority.ca}"]
        flags += [f"--executor-tls-cert={pair.cert}", f"--executor-tls-key={pair.key}"]
        with child("scheduler", *flags):
            wait_until("it listens", lambda: answers(f"127.0.0.1:{health}", "liveness"))
            yield f"127.0.0.1:{port}", f"127.0.0.1:{health}"

    def client(self, address: str, token: str) -> Client:
        return Client(address, timeout=30, tls=ClientFiles(self.authority.ca), token=token)


@contextmanager
def child(module: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, "--exit-with-parent", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(address: str, service: str) -> bool:
    """SERVING, without TLS."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=5
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_all_connections_are_encrypted_and_each_side_is_known(setup: Setup) -> None:
    with (
        setup.running_executor() as (executor, health),
        setup.running_scheduler(executor, setup.scheduler) as (address, own),
    ):
        wait_until("the scheduler serves", lambda: answers(own, ""))
        assert answers(health, "")
        token = setup.folder / "token"
        token.write_text(f"{TOKEN}\n")
        flags = [
            "generate",
            "hello",
            "--max-tokens=4",
            "--json",
            f"--server={address}",
            f"--tls-ca={setup.authority.ca}",
        ]
        done = octavo(*flags, f"--token-file={token}")
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert sum(len(event["token_ids"]) for event in events if event["event"] == "delta") == 4
        assert "a bearer token is needed" in octavo(*flags).stderr
        assert "not one to trust; see --tls-ca" in octavo(*flags[:-1], "--tls", f"--token-file={token}").stderr
        assert "closes connections that are not encrypted: see --tls" in octavo("health", f"--server={address}").stderr
        with (
            setup.client(address, TOKEN) as client,
            pytest.raises(AccessDenied, match="GetLoad takes a token marked admin"),
        ):
            client.load()
        renewed = setup.authority.issue("scheduler")  # in the files of the old one
        assert renewed == setup.scheduler
        with setup.client(address, ADMIN) as client:
            assert [e.state.value for e in client.load().executors] == ["ready"]


def test_an_executor_refuses_all_but_its_scheduler(setup: Setup) -> None:
    stranger, other = setup.authority.issue("stranger"), Authority(setup.folder, "other").issue("scheduler", "forged")
    with setup.running_executor() as (executor, _):
        with setup.running_scheduler(executor, stranger) as (address, _), setup.client(address, ADMIN) as client:
            refused = "this executor takes calls from 'scheduler' alone, not from 'stranger', '127.0.0.1', 'stranger'"
            wait_until("it is refused", lambda: refused in client.load().executors[0].reason)
            assert client.load().executors[0].state.value == "refused"
        for pair in (other, None):  # of another root, and none at all
            credentials = grpc.ssl_channel_credentials(
                setup.authority.ca.read_bytes(),
                None if pair is None else pair.key.read_bytes(),
                None if pair is None else pair.cert.read_bytes(),
            )
            with grpc.secure_channel(executor, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
                pb_grpc.ExecutorStub(channel).Describe(pb.DescribeRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        mine = grpc.ssl_channel_credentials(
            setup.authority.ca.read_bytes(), setup.scheduler.key.read_bytes(), setup.scheduler.cert.read_bytes()
        )
        with grpc.secure_channel(executor, mine) as channel:
            assert pb_grpc.ExecutorStub(channel).Describe(pb.DescribeRequest(), timeout=10).ready


def test_serve_takes_tls_and_tokens(setup: Setup) -> None:
    flags = [f"--tls-cert={setup.scheduler.cert}", f"--tls-key={setup.scheduler.key}", f"--tokens-file={setup.tokens}"]
    with Running("serve", "--port=0", "--simulate-step-ms=1", *flags) as running:
        with setup.client(running.address, TOKEN) as client:
            assert client.complete(text="hello", max_tokens=3).usage.num_output_tokens == 3
        running.interrupt()
        assert running.end() == 0


@pytest.mark.parametrize(
    ("module", "flags", "sentence"),
    [
        ("scheduler", ["--tls-cert=c"], "--tls-cert and --tls-key go together"),
        ("scheduler", ["--tls-client-ca=c"], "--tls-client-ca needs --tls-cert and --tls-key"),
        ("scheduler", ["--executor-tls-name=n"], "--executor-tls-cert and --executor-tls-name need --executor-tls-ca"),
        ("executor", ["--scheduler-name=n"], "--scheduler-name needs --tls-client-ca"),
        ("executor", ["--health-port=70000"], "--health-port 70000 is not in [0, 65535]"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(module: str, flags: list[str], sentence: str) -> None:
    executors = ["--executors=127.0.0.1:1"] if module == "scheduler" else []
    done = octavo(module, *executors, *flags)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_files_that_cannot_be_used_end_the_start_with_a_sentence(setup: Setup) -> None:
    wrong = [f"--tls-cert={setup.scheduler.cert}", f"--tls-key={setup.executor.key}", "--port=0"]
    for command in (["scheduler", "--executors=127.0.0.1:1"], ["executor", "--simulate-step-ms=1"]):
        done = octavo(*command, *wrong)
        assert done.returncode == 1
        assert "are no certificate and its key" in done.stderr
        assert "Traceback" not in done.stderr


def test_no_text_of_a_prompt_reaches_logs_metrics_or_errors() -> None:
    """At level debug too, and whatever becomes of the request."""
    canary = "zanzibar"
    http = free_port()
    with Running(
        "serve", "--port=0", "--simulate-step-ms=1", f"--http-port={http}", "--log-level=debug", "--log-format=json"
    ) as running:
        with Client(running.address, timeout=60) as client:
            assert client.complete(text=canary, max_tokens=2, stop=[f"{canary} stops"]).usage.num_output_tokens == 2
            assert client.complete(chat=[("user", canary)], max_tokens=2, n=2).outputs
            stream = client.generate(text=canary, ignore_eos=True)
            next(iter(stream))
            stream.close()
            for wrong in ({"top_p": 7.0}, {"min_tokens": 9, "max_tokens": 3}, {"n": 10**6}):
                with pytest.raises(OctavoError) as caught:
                    client.complete(text=canary * 3, **wrong)  # type: ignore[arg-type]
                assert canary not in str(caught.value)
            with pytest.raises(OctavoError) as caught:
                client.complete(text=f"{canary} " * 200_000)
            assert canary not in str(caught.value)
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics") as answer:
            metrics = answer.read().decode()
        running.interrupt()
        assert running.end() == 0
    assert "octavo_requests_total" in metrics
    assert canary not in metrics
    told = "\n".join([*running.stdout, *running.stderr])
    assert '"event": "request"' in told
    assert canary not in told
