"""`octavo bench` against a server around a fake engine: what it sends, what it prints, and when it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path

import pytest
from octavo.bench import plot
from octavo.bench.measures import Record
from octavo.bench.traffic import Pace, Traffic
from octavo.bench.workloads import fixed
from octavo.cli.bench import bench, measure, progress, told
from octavo.cli.parser import build_parser
from octavo.cli.terminal import Failure
from octavo.client import AsyncClient

from scheduler.outputs import EndReason
from tests.services.fake_engine import FakeEngine, FakeTicket, hang
from tests.services.harness import Running, serving, until

pytestmark = pytest.mark.usefixtures("no_logs")

SMALL = ("--prompt-tokens", "8", "--output-tokens", "4", "--warmup", "0")


def one_by_one(ticket: FakeTicket) -> None:
    """A script: four tokens, one a millisecond."""
    loop = asyncio.get_running_loop()
    for number in range(1, 5):
        reason = EndReason.LENGTH if number == 4 else None
        loop.call_later(number / 1000, lambda reason=reason: ticket.put([5], reason=reason))  # type: ignore[misc]


def fail(ticket: FakeTicket) -> None:
    ticket.end_all(EndReason.ERROR, error="non-finite logits")


async def run(running: Running, *words: str) -> int:
    return await measure(build_parser("0").parse_args(["bench", *words, "--server", running.address]))


async def run_json(running: Running, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert await run(running, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


async def test_a_closed_loop_keeps_so_many_under_way() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        measuring = asyncio.create_task(run(running, *SMALL, "--concurrency", "3", "--requests", "5"))
        tickets = running.engine.tickets
        await until(lambda: len(tickets) == 3)
        await asyncio.sleep(0.05)
        assert len(tickets) == 3
        tickets[0].end_all(EndReason.LENGTH)
        await until(lambda: len(tickets) == 4)
        while not all(all(ticket.ended) for ticket in tickets) or len(tickets) < 5:
            for ticket in tickets:
                ticket.end_all(EndReason.LENGTH)
            await asyncio.sleep(0.01)
        assert await measuring == 0


async def test_an_open_loop_sends_whatever_is_under_way() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        measuring = asyncio.create_task(run(running, *SMALL, "--rate", "200", "--requests", "6"))
        await until(lambda: len(running.engine.tickets) == 6)
        for ticket in running.engine.tickets:
            ticket.end_all(EndReason.LENGTH)
        assert await measuring == 0


async def test_requests_ask_for_their_sizes_greedily_and_over_the_models_end() -> None:
    async with serving(FakeEngine(script=one_by_one)) as running:
        await run(running, *SMALL, "--requests", "1")
    submission = running.engine.tickets[0].submission
    assert (len(submission.prompt_token_ids), submission.max_tokens) == (8, 4)
    assert submission.sampling.temperature == 0
    assert submission.sampling.stop_token_ids == frozenset()


async def test_json_tells_throughput_and_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=one_by_one)) as running:
        found = await run_json(
            running, capsys, *SMALL, "--requests", "6", "--concurrency", "2", "--slo-ttft-ms", "60000"
        )
    assert (found["num_done"], found["num_output_tokens"], found["num_prompt_tokens"]) == (6, 24, 48)
    assert found["objective"] == {"ttft_ms": 60000, "itl_ms": None}
    assert found["goodput"]["share"] == 1  # type: ignore[index]
    assert found["kv"]["peak_used"] == pytest.approx(0.6)  # type: ignore[index]
    assert found["pace"] == "6 requests, 2 at once"
    assert found["ttft_ms"]["p50"] > 0  # type: ignore[index]


async def test_the_table_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=one_by_one)) as running:
        assert await run(running, *SMALL, "--requests", "3", "--slo-itl-ms", "60000") == 0
    out = capsys.readouterr().out
    names = [line[:17].strip() for line in out.splitlines() if line]
    assert names == [
        *("server", "workload", "time", "requests", "output tokens/s", "total tokens/s"),
        *("ms", "TTFT", "TPOT", "ITL"),
        *("KV blocks in use", "KV waste", "prefix hit rate", "preemptions", "goodput"),
    ]
    assert re.search(r"^requests +3 done \([\d.]+/s\), 0 failed$", out, re.MULTILINE)
    assert re.search(r"^goodput .* 100% with every ITL ≤ 60000 ms$", out, re.MULTILINE)


async def test_what_runs_when_the_time_is_up_is_cancelled_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=hang)) as running:
        found = await run_json(running, capsys, *SMALL, "--seconds", "0.3", "--concurrency", "2")
        await until(lambda: all(ticket.aborted for ticket in running.engine.tickets))
    assert (found["num_done"], found["num_errors"], found["num_unfinished"]) == (0, 0, 2)


async def test_a_run_that_is_stopped_keeps_what_there_is() -> None:
    async with serving(FakeEngine(script=one_by_one)) as running, AsyncClient(running.address) as client:
        stop = asyncio.Event()
        traffic = Traffic(client, fixed(range(10, 90), 0, 8, 4), Pace(concurrency=1, seconds=60))
        sending = asyncio.create_task(traffic.run(stop))
        await until(lambda: any(record.is_done for record in traffic.records))
        stop.set()
        await sending
    assert 0 < traffic.seconds < 60


async def test_errors_are_told_and_nothing_but_errors_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=fail)) as running:
        assert await run(running, *SMALL, "--requests", "3") == 1
    assert "error, 3 times: non-finite logits\n" in capsys.readouterr().out


async def test_a_file_of_prompts_is_sent_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('Hello world\n{"chat": "Hello", "max_tokens": 2}\n')
    async with serving() as running:
        assert await run(running, "--prompts", str(path), "--warmup", "0", "--output-tokens", "3") == 0
    assert [ticket.submission.max_tokens for ticket in running.engine.tickets] == [3, 2]


async def test_warm_up_requests_come_first_and_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(script=one_by_one)) as running:
        found = await run_json(running, capsys, *SMALL[:4], "--warmup", "2", "--requests", "3")
    assert len(running.engine.tickets) == 5
    assert found["num_done"] == 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--prompt-tokens", "250", "--output-tokens", "10"],
            "requests of 260 tokens, and the server takes 256 at most",
        ),
        (["--workload", "chat", "--output-tokens", "10"], "a workload has its own"),
        (["--prompts", "/nowhere"], "the prompts in /nowhere cannot be read"),
    ],
)
async def test_what_cannot_be_sent_is_refused_before_anything_is(words: list[str], why: str) -> None:
    async with serving() as running:
        with pytest.raises(Failure, match=why) as caught:
            await run(running, *words)
    assert caught.value.code == 2
    assert running.engine.tickets == []


async def test_without_a_server_it_says_so() -> None:
    with pytest.raises(Failure, match=r"no server at 127\.0\.0\.1:9; start one with `octavo serve`"):
        await measure(build_parser("0").parse_args(["bench", "--server", "127.0.0.1:9"]))


def test_a_picture_without_matplotlib_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Failure, match=r"--plot needs matplotlib: pip install -e '.\[bench\]'"):
        bench(build_parser("0").parse_args(["bench", "--plot", "out.png"]))


async def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.png"
    async with serving(FakeEngine(script=one_by_one)) as running:
        assert await run(running, *SMALL, "--requests", "3", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"picture in {path}" in capsys.readouterr().err


def test_tokens_are_spread_over_the_seconds_in_which_they_came() -> None:
    edges, rates = plot.tokens_per_second([Record(0.0, arrivals=[(0.0, 2), (59.5, 3), (60.0, 1)])], 0.0, 60.0)
    assert (edges[0], edges[-1], len(edges)) == (0, 60, len(rates) + 1)
    assert (rates[0], rates[-1], sum(rates)) == pytest.approx((2, 4, 6))


def test_progress_is_that_of_the_nearer_bound() -> None:
    traffic = Traffic(
        AsyncClientStandIn,  # type: ignore[arg-type]
        iter(()),
        Pace(concurrency=1, num_requests=4, seconds=100),
        records=[Record(0.0, arrivals=[(1.0, 20)], end=1.0), Record(0.0)],
    )
    assert progress(traffic, 2.0) == "[######..................] 1/4 requests, 2 s, 10 tokens/s"
    assert progress(traffic, 50.0).startswith("[############............] 1/4 requests, 50 s")


class AsyncClientStandIn:
    """Progress asks nothing of it."""


def test_a_pace_in_words() -> None:
    assert told(Pace(rate=2.5, seconds=10)) == "10 s, 2.5/s at random"
