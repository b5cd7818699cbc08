"""`octavo generate` against a server around a fake engine: what is said of answers that fail, wait or come at once."""

from __future__ import annotations

import asyncio

import pytest
from octavo.cli import answer
from octavo.cli.generate import generate
from octavo.cli.parser import build_parser
from octavo.cli.terminal import Failure

from scheduler.outputs import EndReason
from tests.services.fake_engine import FakeEngine, FakeTicket, hang, text_ids
from tests.services.fake_engine import answer as answering
from tests.services.harness import Running, serving, until

pytestmark = pytest.mark.usefixtures("no_logs")


async def run(running: Running, *words: str) -> int:
    options = build_parser("0").parse_args(["generate", "--raw", *words, "--server", running.address])
    return await asyncio.to_thread(generate, options)


async def test_a_server_without_executors_yet_is_told_as_such() -> None:
    async with serving(FakeEngine(model=None, ready=False)) as running:
        with pytest.raises(Failure, match="none has joined yet; its model may still be loading: try again, or see"):
            await run(running, "Hello")


async def test_a_wait_that_was_too_long_says_for_what_and_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    script = answering(reason=EndReason.TIMEOUT, error="no executor takes requests")
    async with serving(FakeEngine(script=script)) as running:
        assert await run(running, "Hello") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "octavo: output 0 ended with TIMEOUT: no executor takes requests; see `octavo load`"
    )


async def test_who_waits_for_a_first_token_is_told_where_to_look(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "_PATIENCE", 0.01)
    engine = FakeEngine(script=hang)
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "no token after 0.01 s; `octavo load` says what runs" in told

    async with serving(engine) as running:
        waiting = asyncio.create_task(run(running, "Hello"))
        await until(lambda: bool(engine.tickets) and is_told())
        engine.tickets[0].put(text_ids("Hi"), reason=EndReason.STOP)
        assert await waiting == 0


async def test_an_error_in_a_stream_is_told_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def script(ticket: FakeTicket) -> None:
        ticket.put(text_ids("Hello"))

    async with serving(FakeEngine(script=script)) as running:
        with pytest.raises(Failure, match=r"not done within 2 s"):
            await run(running, "Hi", "--timeout=2")
    assert capsys.readouterr().out == "Hello\n"


@pytest.mark.parametrize(("decode_seconds", "has_rate"), [(0.0, True), (60.0, False)])
async def test_tokens_that_come_at_once_have_no_rate(
    decode_seconds: float, has_rate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = answering(*text_ids("Hello world"), decode_seconds=decode_seconds)
    async with serving(FakeEngine(script=script)) as running:
        assert await run(running, "Hi") == 0
    assert ("tokens/s" in capsys.readouterr().err) is has_rate


async def test_tenant_and_priority_go_with_the_request() -> None:
    async with serving(FakeEngine()) as running:
        assert await run(running, "Hi", "--tenant=a", "--priority=-2") == 0
    submission = running.engine.tickets[0].submission
    assert (submission.tenant, submission.priority) == ("a", -2)


async def test_log_probabilities_need_json() -> None:
    async with serving(FakeEngine()) as running:
        with pytest.raises(Failure, match="--logprobs is printed with --json only"):
            await run(running, "Hi", "--logprobs=2")
