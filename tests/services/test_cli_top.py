"""`octavo top`: the lines it shows, and that it gives the terminal back."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from octavo.blocks import BlockMap, Inspection, RunningSequence, StepInfo
from octavo.cli.inside import CACHED, FREE, SHARED, Rates, clip, lines_of, map_lines, painted, spark
from octavo.cli.parser import build_parser
from octavo.cli.top import top
from octavo.client import ExecutorLoad, ExecutorState, Load, WaitingRequests

from scheduler.outputs import WaitingRequests as Waiting
from tests.services.fake_engine import FakeEngine, hang
from tests.services.harness import Running, serving

pytestmark = pytest.mark.usefixtures("no_logs")


def make_map(**overrides: object) -> BlockMap:
    """Two outputs of one prompt share block 1; block 4 keeps a prefix; 5 is free."""
    first = RunningSequence(7, 7, "ask", "acme", 0, 0, 17, 19, 18, 0, 2, 0)
    blocks = BlockMap(
        target="here:1",
        block_size=16,
        sequences=(first, replace(first, sequence_id=8, index=1, num_preemptions=2)),
        holders=(0, 1, 1, 2, 0, 0),
        ref_counts=(0, 2, 1, 1, 0, 0),
        num_filled=(0, 16, 2, 15, 16, 0),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_sampled_tokens=100,
        steps=(StepInfo(1, 0, 1, 17, 1, 0, 0, 0.25), StepInfo(2, 2, 0, 0, 0, 0, 1, None)),
    )
    return replace(blocks, **overrides)  # type: ignore[arg-type]


def make_inspection(*maps: BlockMap, seconds: float = 1.0, waiting: tuple[WaitingRequests, ...] = ()) -> Inspection:
    loads = tuple(
        ExecutorLoad(m.target, "i", ExecutorState.READY, "", 2, 0, len(m.holders) - 1, 2, 40, 10, 3, 1, 2) for m in maps
    )
    return Inspection(seconds, "tiny", Load(loads, len(waiting), 70, 9, waiting, draining=False), maps)


def text_of(seen: Inspection, rates: Rates | None = None, width: int = 120) -> list[str]:
    return [painted(line, colour=False).rstrip() for line in lines_of(seen, rates or Rates({}), width)]


def test_the_map_tells_free_cached_shared_and_how_full() -> None:
    [line] = map_lines(make_map(), 80)
    assert painted(line, colour=False) == f"{SHARED}▁█{CACHED}{FREE}"
    assert len({style for text, style in line if text in f"{SHARED}▁█"}) == 1, "one prompt, one colour"


def test_a_map_that_is_too_large_shows_the_most_frequent_of_neighbours() -> None:
    one = make_map(holders=(0, *[1] * 3000, *[0] * 3000), ref_counts=(0, *[1] * 3000, *[0] * 3000))
    lines = map_lines(replace(one, num_filled=(0, *[16] * 3000, *[0] * 3000)), 80)
    text = "".join(painted(line, colour=False) for line in lines)
    assert text == "█" * 300 + FREE * 300


def test_a_table_tells_what_each_executor_does() -> None:
    before, now = make_map(num_sampled_tokens=50), make_map()
    rates = Rates.between(make_inspection(before, seconds=1.0), make_inspection(now, seconds=3.0))
    lines = text_of(make_inspection(now), rates)
    assert lines[0] == "octavo tiny   25 tokens/s   2 run   0 wait"
    assert lines[3].split() == ["here:1", "READY", "2/8", "0", "25", "250.0", "0/64", "2", "60%", "25%", "3"]


def test_each_class_that_waits_has_its_reason() -> None:
    waiting = (WaitingRequests("acme", -1, 1, "no free block"),)
    assert "  1 of acme at priority -1: no free block" in text_of(make_inspection(make_map(), waiting=waiting))


def test_sequences_are_named_with_what_they_hold() -> None:
    lines = text_of(make_inspection(make_map()))
    assert "  ■ acme / ask [0],  prompt 17, 0 cached,  output 2,  2 blocks" in lines
    assert "  ■ acme / ask [1],  prompt 17, 0 cached,  output 2,  2 blocks,  preempted 2 times" in lines


def test_an_executor_that_has_not_joined_says_why() -> None:
    away = ExecutorLoad("there:2", "", ExecutorState.REFUSED, "another model", 0, 0, 0, 0, 0, 0, 0, 0, 0)
    seen = Inspection(1.0, "", Load((away,), 0, 0, 9, (), draining=False), ())
    assert "there:2: another model" in text_of(seen)


def test_no_line_is_longer_than_the_terminal_is_wide() -> None:
    seen = make_inspection(make_map(), waiting=(WaitingRequests("x" * 200, 0, 1, "y" * 200),))
    assert max(len(line) for line in text_of(seen, width=60)) == 60


def test_what_clients_call_themselves_cannot_steer_the_terminal() -> None:
    assert clip([("a\x1b[2Jb", "")], 80) == [("a?[2Jb", "")]
    assert clip([("漢字漢字", "1")], 5) == [("漢字", "1")]


def test_bars_are_measured_against_the_largest() -> None:
    assert spark([0, 1, 4, 8]) == " ▁▄█  at most 8"
    assert spark([0, 0]) == "    none"


async def test_once_prints_one_picture(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = (Waiting("acme", 0, 2, "no free block"),)
    async with serving(FakeEngine(script=hang, waiting=waiting)) as running:
        options = build_parser("0").parse_args(["top", "--once", "--server", running.address])
        assert await asyncio.to_thread(top, options) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("octavo tiny   0 tokens/s   2 run   2 wait")
    assert f"{SHARED}▁▁{CACHED}{FREE * 6}" in out.splitlines()
    assert "  2 of acme at priority 0: no free block" in out.splitlines()
    assert "\x1b" not in out


async def in_a_terminal(running: Running, keys: bytes | None) -> tuple[int, bytes]:
    """Runs it in a terminal until it has shown a picture, and then types; None: Ctrl-C. Returns its code and output."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "octavo.cli", "top", "--interval", "0.1", "--server", running.address]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, start_new_session=True)  # noqa: ASYNC220
    os.close(theirs)

    def drive() -> tuple[int, bytes]:
        written, asked, deadline = b"", False, time.monotonic() + 120
        while time.monotonic() < deadline:
            ready, _, _ = select.select([ours], [], [], 0.1)
            try:
                written += os.read(ours, 65536) if ready else b""
            except OSError:  # the other side is closed
                break
            if b"tiny" in written and not asked:
                asked = True
                if keys is None:
                    process.send_signal(signal.SIGINT)
                else:
                    os.write(ours, keys)
            if not ready and process.poll() is not None:
                break
        return process.wait(timeout=60), written

    try:
        return await asyncio.to_thread(drive)
    finally:
        if process.poll() is None:
            process.kill()
        os.close(ours)


@pytest.mark.parametrize(("keys", "code"), [(b"q", 0), (None, 130)])
async def test_it_leaves_when_told_to_and_gives_the_terminal_back(keys: bytes | None, code: int) -> None:
    async with serving(FakeEngine(script=hang)) as running:
        ended, written = await in_a_terminal(running, keys)
    assert ended == code
    assert written.startswith(b"\x1b[?1049h")
    assert written.endswith(b"\x1b[?25h\x1b[?1049l")
    assert b"here:1" in written
