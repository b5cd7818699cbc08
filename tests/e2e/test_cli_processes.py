"""What becomes of a pair of processes when one ends, fails, or is asked to stop. The children here are scripts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from octavo.cli.processes import Event, Exited, Finished, Line, Processes, Signalled
from octavo.cli.serve import Plan, run

OBEDIENT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True)\n"
SLEEP = "time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def plan(grace: float = 30.0) -> Plan:
    return Plan(scheduler=(), executor=(), host="127.0.0.1", port=1, grace=grace)


class Pair:
    """Two scripts in the places of executor and scheduler, and what was seen of them."""

    def __init__(self, executor: str = OBEDIENT + SLEEP, scheduler: str = OBEDIENT + SLEEP) -> None:
        self.scripts = {"executor": executor, "scheduler": scheduler}
        self.processes: Processes | None = None

    def launch(self, _plan: Plan, processes: Processes) -> None:
        self.processes = processes
        for name, script in self.scripts.items():
            processes.start(name, [sys.executable, "-c", script])
        up: set[str] = set()
        others: list[Event] = []
        while up != set(self.scripts):
            match processes.next_event(timeout=30):
                case Line(child, "up"):
                    up.add(child)
                case None:
                    raise AssertionError(f"only {up} came up")
                case event:
                    others.append(event)
        for event in others:
            processes.post(event)

    def run(self, on_ready: Callable[[Processes], None] = lambda processes: None, grace: float = 30.0) -> int:
        return run(plan(grace), on_ready, launch=self.launch, ready=lambda address: True)


@pytest.fixture
def clean_handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_both_and_the_exit_is_clean(number: int, clean_handlers: None) -> None:
    pair = Pair()
    assert pair.run(lambda processes: os.kill(os.getpid(), number)) == 0
    assert pair.processes is not None
    assert pair.processes.running == ()


def test_finished_work_stops_both_and_gives_its_exit_code(clean_handlers: None) -> None:
    assert Pair().run(lambda processes: processes.post(Finished(3))) == 3


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_killed_child_takes_the_other_along(victim: str, capfd: pytest.CaptureFixture[str]) -> None:
    pair = Pair()
    assert pair.run(lambda processes: processes.signal(victim, signal.SIGKILL)) == 1
    assert pair.processes is not None
    assert pair.processes.running == ()
    assert f"octavo: the {victim} was killed by SIGKILL" in capfd.readouterr().err


def test_a_child_that_fails_at_start_has_its_words_shown(capfd: pytest.CaptureFixture[str]) -> None:
    failing = "import sys; print('up', flush=True); sys.exit('no model of that name')"
    assert Pair(executor=failing).run() == 1
    shown = capfd.readouterr().err.splitlines()
    assert "no model of that name" in shown
    assert "octavo: the executor exited with code 1; the server stops" in shown


def test_a_bad_flag_found_by_a_child_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert Pair(scheduler="print('up', flush=True); raise SystemExit(2)").run() == 2
    assert "octavo: the scheduler exited with code 2" in capfd.readouterr().err


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    pair = Pair(scheduler=STUBBORN)

    def stop_twice(processes: Processes) -> None:
        processes.post(Signalled(signal.SIGINT))
        processes.post(Signalled(signal.SIGINT))

    assert pair.run(stop_twice) == 1
    assert pair.processes is not None
    assert pair.processes.running == ()


def test_children_do_not_get_the_terminals_signals() -> None:
    """A Ctrl-C reaches the parent's process group; a child in it would stop before the parent decides."""
    processes = Processes()
    processes.start("child", [sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid(), flush=True)"])
    assert processes.next_event(timeout=30) == Line("child", "True")
    assert processes.next_event(timeout=30) == Exited("child", 0)


def test_the_end_of_a_child_is_told_although_a_grandchild_holds_its_pipe() -> None:
    script = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    )
    processes = Processes()
    processes.start("child", [sys.executable, "-c", script])
    events = [processes.next_event(timeout=30), processes.next_event(timeout=30)]
    assert events[1] == Exited("child", 0)
    assert isinstance(events[0], Line)
    os.kill(int(events[0].text), signal.SIGKILL)


def test_both_children_stop_although_both_end_at_once() -> None:
    processes = Processes()
    for name in ("executor", "scheduler"):
        processes.start(name, [sys.executable, "-c", "print('up', flush=True)"])
    time.sleep(0.5)
    told = [event.child for event in processes.stop(patience=30.0) if isinstance(event, Exited)]
    assert sorted(told) == ["executor", "scheduler"] or processes.running == ()
