"""The `octavo` command against a real server of the demo model: what comes out where, and with which exit code."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator

import pytest
from octavo.client import Client

from tests.e2e.servers import COMMAND, PATIENCE, Running, octavo, wait_until

QUESTION = "What is gravity?"
# What transformers' generate() answers, greedily, in float32; the closest two logits on its way differ by 0.02.
ANSWER = (
    "Gravity is a fundamental concept in physics that describes the curvature of spacetime caused by the presence of "
    "mass. It's a fundamental aspect of the universe that underlies the behavior of objects on Earth. In essence, "
    "gravity is the force that keeps objects from flying off the Earth's surface. It's a result of the way spacetime "
    "is curved by massive objects like stars and planets."
)
NOWHERE = "127.0.0.1:9"


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client


def number_running(client: Client) -> int:
    return sum(executor.num_running + executor.num_waiting for executor in client.load().executors)


def test_generate_prints_the_answer_on_stdout_and_the_timings_on_stderr(server: str) -> None:
    done = octavo("generate", QUESTION, "--temperature=0", f"--server={server}")
    assert done.returncode == 0
    assert done.stdout == ANSWER + "\n"
    assert done.stderr.startswith("octavo: 75 tokens in ")
    assert "tokens/s; prompt of 34 tokens" in done.stderr
    assert done.stderr.endswith("ended with STOP\n")


def test_a_raw_prompt_is_gone_on_with(server: str) -> None:
    raw = octavo("generate", "--raw", "One, two,", "--max-tokens=2", "--temperature=0", f"--server={server}")
    assert raw.stdout == " or three\n"
    assert "prompt of 4 tokens" in raw.stderr


def test_a_prompt_is_read_from_stdin(server: str) -> None:
    arguments = ["--temperature=0", "--max-tokens=4", f"--server={server}"]
    assert octavo("generate", "-", *arguments, stdin=QUESTION).stdout == "Gravity is a\n"


def test_a_stop_string_ends_the_answer(server: str) -> None:
    done = octavo("generate", QUESTION, "--stop=physics", "--temperature=0", f"--server={server}")
    assert done.stdout == ANSWER.partition("physics")[0] + "\n"


def test_several_outputs_are_printed_under_their_numbers(server: str) -> None:
    done = octavo("generate", QUESTION, "--n=3", "--seed=1", "--max-tokens=4", f"--server={server}")
    assert sorted(line[:4] for line in done.stdout.splitlines()) == ["[0] ", "[1] ", "[2] "]
    assert "12 tokens" in done.stderr


def test_one_seed_gives_one_answer(server: str) -> None:
    arguments = ["generate", QUESTION, "--seed=7", "--temperature=1", "--max-tokens=12", f"--server={server}"]
    assert octavo(*arguments).stdout == octavo(*arguments).stdout


def test_json_has_one_event_a_line(server: str) -> None:
    done = octavo(
        "generate", QUESTION, "--json", "--temperature=0", "--max-tokens=5", "--logprobs=2", f"--server={server}"
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["event"] == "started"
    assert events[0]["num_prompt_tokens"] == 34
    deltas = events[1:-1]
    assert {event["event"] for event in deltas} == {"delta"}
    assert ANSWER.startswith("".join(event["text"] for event in deltas))
    assert [len(entry["top"]) for event in deltas for entry in event["logprobs"]] == [2] * 5
    assert set(deltas[0]["logprobs"][0]["top"][0]) == {"token_id", "logprob", "text"}
    assert events[-1]["event"] == "finished"
    assert events[-1]["reason"] == "length"
    assert events[-1]["usage"]["num_output_tokens"] == 5


def test_ctrl_c_cancels_the_request(server: str, client: Client) -> None:
    with Running("generate", QUESTION, "--ignore-eos", f"--server={server}") as running:
        wait_until("the request runs", lambda: number_running(client) == 1)
        running.interrupt()
        assert running.end() == 130
        assert not any("Traceback" in line for line in running.stderr)
    wait_until("the request is gone from the server", lambda: number_running(client) == 0)


def test_a_broken_pipe_is_quiet_and_cancels_the_request(server: str, client: Client) -> None:
    command = [*COMMAND, "generate", QUESTION, "--ignore-eos", f"--server={server}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 128 + signal.SIGPIPE
    wait_until("the request is gone from the server", lambda: number_running(client) == 0)


@pytest.mark.parametrize(
    ("redirections", "stdin", "code", "words"),
    [
        ("<&-", b"", 2, "octavo: the prompt is empty\n"),
        ("", b"\xff\xfe", 2, "octavo: the prompt on stdin is not utf-8\n"),
        (">&-", b"One, two,", 0, "ended with LENGTH\n"),
        (">/dev/full", b"One, two,", 1, "octavo: stdout cannot be written: No space left on device\n"),
    ],
)
def test_streams_that_are_closed_full_or_no_text_end_in_a_sentence(
    server: str, redirections: str, stdin: bytes, code: int, words: str
) -> None:
    """Each was a trace."""
    command = shlex.join([*COMMAND, "generate", "-", "--raw", "--max-tokens=2", f"--server={server}"])
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        ["sh", "-c", f"exec {command} {redirections}"],
        input=stdin, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.decode().endswith(words)
    assert "Traceback" not in done.stderr.decode()


def test_a_full_disk_under_stderr_costs_the_words_alone(server: str) -> None:
    command = [*COMMAND, "generate", "--raw", "One, two,", "--max-tokens=2", "--temperature=0", f"--server={server}"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=PATIENCE, check=False)
    assert done.stdout == b" or three\n"
    assert done.returncode == 0


def test_bytes_that_are_no_text_leave_a_conversation_alone(server: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:surrogateescape"}
    done = subprocess.run(
        [*COMMAND, "chat", "--max-tokens=1", f"--server={server}"],
        input=b"\xff\nHi\n", capture_output=True, env=environment, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert b"octavo: the message ('user', '\\udcff') cannot be sent: " in done.stderr
    assert b"ended with LENGTH" in done.stderr


def test_a_timeout_is_told(server: str) -> None:
    done = octavo("generate", QUESTION, "--ignore-eos", "--timeout=0.5", f"--server={server}")
    assert done.returncode == 1
    assert done.stderr == "octavo: not done within 0.5 s\n"


def test_a_value_that_the_server_refuses_is_a_usage_error(server: str) -> None:
    done = octavo("generate", QUESTION, "--top-p=7", f"--server={server}")
    assert done.returncode == 2
    assert done.stderr == "octavo: sampling.top_p = 7.0: must be in (0, 1]\n"


def test_a_conversation_goes_on_where_it_was(server: str, client: Client) -> None:
    turns = f"{QUESTION}\nSay that again.\n"
    done = octavo("chat", "--temperature=0", "--max-tokens=4", f"--server={server}", stdin=turns)
    begun = [("user", QUESTION), ("assistant", "Gravity is a"), ("user", "Say that again.")]
    second = client.complete(chat=begun, temperature=0, max_tokens=4).text
    assert done.returncode == 0
    assert done.stdout == f"Gravity is a\n{second}\n"


def test_reset_forgets_the_conversation(server: str) -> None:
    turns = f"Hello.\n/reset\n{QUESTION}\n/exit\nnever read\n"
    done = octavo("chat", "--temperature=0", "--max-tokens=4", f"--server={server}", stdin=turns)
    assert done.stdout.splitlines()[1:] == ["Gravity is a"]


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(server: str, client: Client) -> None:
    with Running("chat", "--ignore-eos", f"--server={server}", stdin=subprocess.PIPE) as running:
        running.type(QUESTION)
        wait_until("the request runs", lambda: number_running(client) == 1)
        running.interrupt()
        running.wait_for(lambda: "octavo: stopped" in running.stderr)
        wait_until("the request is gone from the server", lambda: number_running(client) == 0)
        running.type("/exit")
        assert running.end() == 0
        assert not any("Traceback" in line for line in running.stderr)


def test_health_and_load_tell_of_the_server(server: str) -> None:
    health = octavo("health", f"--server={server}")
    assert (health.returncode, health.stdout) == (0, "SERVING\n")
    headings, executor, queue = octavo("load", f"--server={server}").stdout.splitlines()
    assert headings.split()[:4] == ["EXECUTOR", "STATE", "RUNNING", "WAITING"]
    assert executor.split()[1:4] == ["READY", "0", "0"]
    assert queue == "queue: 0 of 1024 requests, 0 tokens"


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["chat"], ["health"], ["load"], ["load", "--watch"], ["drain"], ["drain", "x:1"]]
)
def test_without_a_server_each_command_says_how_to_start_one(command: list[str]) -> None:
    done = octavo(*command, f"--server={NOWHERE}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"octavo: no server at {NOWHERE}; start one with `octavo serve`\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate", "x", "--tokens=3"], "unrecognized arguments: --tokens=3"),
        (["generate", "x", "--max-tokens=0"], "argument --max-tokens: 0 is less than 1"),
        (["generate", "x", "--max-tokens=many"], "argument --max-tokens: invalid integer value: 'many'"),
        (["generate", "x", "--timeout=-1"], "argument --timeout: -1 is not above 0"),
        (["generate", "x", "--chat", "--raw"], "argument --raw: not allowed with argument --chat"),
        (["generate", "x", "--raw", "--system=y"], "--system belongs to a conversation, and --raw asks for none"),
        (["serve", "--port=70000"], "--port '70000' is no port"),
        (["serve", "--port=²"], "--port '²' is no port"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(arguments: list[str], words: str) -> None:
    done = octavo(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help_load_neither_grpc_nor_torch() -> None:
    script = (
        "import sys; from octavo.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'grpc', 'torch', 'google.protobuf'} & set(sys.modules)))"
    )
    done = subprocess.run([COMMAND[0], "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert octavo("--version").stdout == "octavo 0.1.0\n"


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_an_empty_prompt_is_refused_before_anything_is_started(command: str) -> None:
    result = octavo(command, " ")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].endswith("the prompt is empty")
