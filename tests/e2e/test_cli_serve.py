"""`octavo serve` and `octavo demo` with the real processes: starts that succeed, starts that fail, and ends."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.e2e.servers import Running, is_alive, octavo, wait_until
from tests.e2e.test_cli import ANSWER, QUESTION

SMALL = ("--port=0", "--dtype=float32", "--threads=1", "--kv-cache-memory=64M")


def test_demo_streams_the_models_answer() -> None:
    done = octavo("demo", QUESTION, "--max-tokens=32", *SMALL[1:])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert ANSWER.startswith(done.stdout.rstrip("\n"))
    words = done.stderr.splitlines()
    assert "octavo: loading weights" in words
    assert any(line.startswith("octavo: ready after ") for line in words)
    assert words[-1].startswith("octavo: 32 tokens in ")
    assert all(line.startswith("octavo: ") for line in words), "no log of the processes"


def test_ctrl_c_stops_the_demo_in_the_middle_of_its_answer() -> None:
    with Running("demo", "Name three uses of a paper clip.", "--max-tokens=2000", *SMALL[1:]) as running:
        running.wait_for(lambda: any("ready after" in line for line in running.stderr))
        children = running.children()
        running.interrupt()
        assert running.end() == 130
        assert sorted(children) == ["executor", "scheduler"]
        assert not any(is_alive(pid) for pid in children.values())
        assert not any("Traceback" in line for line in running.stderr)


def test_serve_answers_and_ends_well_at_sigterm() -> None:
    with Running("serve", *SMALL) as running:
        done = octavo("generate", QUESTION, "--temperature=0", "--max-tokens=4", f"--server={running.address}")
        assert done.stdout == "Gravity is a\n"
        children = running.children()
        running.process.terminate()
        assert running.end() == 0
        assert not any(is_alive(pid) for pid in children.values())


def test_a_running_answer_is_finished_before_the_server_stops() -> None:
    with Running("serve", *SMALL) as running:
        arguments = ["--temperature=0", f"--server={running.address}", "--stop=. It"]
        with Running("generate", QUESTION, *arguments) as answer:
            wait_until("the answer begins", lambda: "1" in octavo("load", arguments[1]).stdout.splitlines()[1].split())
            running.interrupt()
            assert answer.end() == 0
            assert answer.stdout == [ANSWER.partition(". It")[0]]
        assert running.end() == 0


def test_ctrl_c_while_loading_stops_at_once() -> None:
    with Running("serve", *SMALL) as running:
        running.wait_for(lambda: "octavo: loading weights" in running.stderr)
        running.interrupt()
        assert running.end() == 0
        assert running.stdout == []


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_killed_process_ends_the_server_with_the_reason(victim: str) -> None:
    with Running("serve", *SMALL) as running:
        assert running.address
        children = running.children()
        os.kill(children[victim], signal.SIGKILL)
        assert running.end() == 1
        assert not any(is_alive(pid) for pid in children.values())
        told = "\n".join(running.stderr)
        assert running.stderr[-1].startswith(f"octavo: the server has stopped: the {victim} was killed by SIGKILL")
        assert {"executor": "executor_lost", "scheduler": "session ended"}[victim] in told, "the other one says so"
        assert "Traceback" not in told


def test_the_death_of_the_command_itself_leaves_no_process() -> None:
    with Running("serve", *SMALL) as running:
        assert running.address
        children = running.children()
        running.process.kill()
        wait_until("both processes end", lambda: not any(is_alive(pid) for pid in children.values()))


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = octavo("serve", f"--port={port}")
    assert done.returncode == 1
    assert done.stderr == f"octavo: port {port} is taken; stop what listens there, or choose another with --port\n"


def test_an_unknown_model_is_told() -> None:
    done = octavo("serve", "--port=0", "--model=no-such-model")
    assert done.returncode == 1
    assert "octavo executor: no model 'no-such-model'" in done.stderr
    assert done.stderr.splitlines()[-1] == "octavo: the server did not start: the executor exited with code 1"
    assert "Traceback" not in done.stderr


def test_memory_that_is_not_there_is_told() -> None:
    done = octavo("serve", "--port=0", "--kv-cache-memory=1000T")
    assert done.returncode == 1
    assert "octavo executor: a K/V cache of " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--dtype=float8", "octavo executor: error: argument --dtype: invalid choice: 'float8'"),
        ("--pipeline-depth=9", "error: argument --pipeline-depth: invalid choice: 9"),
    ],
)
def test_a_bad_value_of_a_flag_of_either_process_is_a_usage_error(flag: str, words: str) -> None:
    done = octavo("serve", "--port=0", flag)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize("process", ["scheduler", "executor"])
def test_a_process_alone_is_started_with_its_own_flags(process: str) -> None:
    done = octavo(process, "--help")
    assert done.returncode == 0
    assert "--exit-with-parent" in done.stdout
