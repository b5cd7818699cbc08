"""`octavo bench` as a user runs it, against a real server, and a Ctrl-C on its way."""

from __future__ import annotations

import json

from octavo.client import Client

from tests.e2e.servers import Running, octavo, wait_until

SMALL = ("--prompt-tokens=16", "--warmup=1")


def test_bench_prints_one_object(server: str) -> None:
    done = octavo("bench", *SMALL, "--output-tokens=200", "--requests=3", "--json", f"--server={server}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["num_done"], found["num_output_tokens"], found["num_prompt_tokens"]) == (3, 600, 48)
    assert 0 < found["kv"]["peak_used"] < 1


def test_ctrl_c_prints_what_there_is(server: str) -> None:
    endless = ("--output-tokens=2000", "--seconds=600", "--concurrency=1", "--seed=1")
    with Client(server) as client, Running("bench", *SMALL[:1], "--warmup=0", *endless, f"--server={server}") as run:

        def num_running() -> int:
            return sum(executor.num_running for executor in client.load().executors)

        wait_until("it runs", lambda: num_running() > 0)
        run.interrupt()
        assert run.end() == 130
        assert any(line.startswith("requests") and line.endswith("1 cut off") for line in run.stdout)
        wait_until("its request ends", lambda: num_running() == 0)
