"""`octavo load` and `octavo drain` against a server around a fake engine: what is printed, and when it ends."""

from __future__ import annotations

import asyncio

import pytest
from octavo.cli.parser import build_parser
from octavo.cli.status import drain, show_load
from octavo.cli.terminal import Failure

from scheduler.outputs import WaitingRequests
from scheduler.server import ExitCode
from tests.services.fake_engine import FakeEngine, hang
from tests.services.harness import Running, serving, until

pytestmark = pytest.mark.usefixtures("no_logs")


async def run(running: Running, *words: str) -> int:
    options = build_parser("0").parse_args([*words, "--server", running.address])
    return await asyncio.to_thread(drain if options.command == "drain" else show_load, options)


async def test_load_tells_why_each_class_of_requests_waits(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = (WaitingRequests("a", 0, 2, "no free block"), WaitingRequests("b", -1, 1, "later"))
    async with serving(FakeEngine(script=hang, waiting=waiting)) as running:
        assert await run(running, "load") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("waiting:")] == [
        "waiting: 2 of a at priority 0 (no free block)",
        "waiting: 1 of b at priority -1 (later)",
    ]


async def test_load_can_be_watched_until_the_scheduler_stops(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=hang)) as running:
        watching = asyncio.create_task(run(running, "load", "--watch", "0.1"))
        printed = ""

        def num_tables() -> int:
            nonlocal printed
            printed += capsys.readouterr().out
            return printed.count("EXECUTOR")

        await until(lambda: num_tables() >= 3)
        assert await run(running, "drain") == 0
        assert await running.over is ExitCode.OK
        assert await watching == 0
    printed += capsys.readouterr().out
    assert "the scheduler drains\n" in printed
    assert "\ndraining: no new requests are taken\n" in printed


async def test_drain_of_an_executor_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=hang)) as running:
        assert await run(running, "drain", "here:1") == 0
        with pytest.raises(Failure, match="no executor 'there:2' has joined; there are here:1"):
            await run(running, "drain", "there:2")
    assert "executor here:1 drains\n" in capsys.readouterr().out
    assert running.engine.drained_executors == ["here:1"]
