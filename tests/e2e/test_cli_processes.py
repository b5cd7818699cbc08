"""What becomes of a pair of processes when one ends, fails, or is asked to stop. The children here are scripts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from octavo.cli.demo import Answer
from octavo.cli.processes import Announced, Exited, Finished, Logged, Processes, Signalled
from octavo.cli.serve import Plan, require_torch, run
from octavo.cli.terminal import ExitCode, Failure

LISTENING = "print('octavo executor listening address=127.0.0.1:1', flush=True)\n"
OBEDIENT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
UP = "print('up', file=sys.stderr, flush=True)\n"
SLEEP = "time.sleep(60)"


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


class Work:
    """Does what a test wants once the server is ready."""

    def __init__(self, begin: Callable[[Processes], None]) -> None:
        self.begin = begin

    def stop(self) -> int:
        return 0


class Pair:
    """Two scripts in the places of executor and scheduler."""

    def __init__(
        self,
        executor: str = OBEDIENT + LISTENING + SLEEP,
        scheduler: str = OBEDIENT + UP + SLEEP,
        grace: float = 30.0,
    ) -> None:
        self.plan = Plan(script(executor), lambda address: [*script(scheduler), address], "127.0.0.1:1", grace)
        self.processes: Processes | None = None

    def fail_to_start(self) -> int:
        """Runs both, of which neither is ever ready."""
        return run(self.plan, Work(lambda processes: pytest.fail("it was ready")), ready=lambda address: False)

    def run(self, then: Callable[[Processes], None]) -> int:
        """Runs both; once both are up, does what is wanted."""

        def begin(processes: Processes) -> None:
            self.processes = processes
            assert processes.next_event(timeout=30) == Logged("scheduler", "up")
            then(processes)

        return run(self.plan, Work(begin), ready=lambda address: True)

    def assert_gone(self) -> None:
        assert self.processes is not None
        assert self.processes.running == ()


@pytest.fixture
def clean_handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_both_and_the_exit_is_clean(number: int, clean_handlers: None) -> None:
    pair = Pair()
    assert pair.run(lambda processes: os.kill(os.getpid(), number)) == 0
    pair.assert_gone()


def test_a_demo_that_is_stopped_between_two_calls_ends_without_a_traceback() -> None:
    answer = Answer("127.0.0.1:1", "What?", 1)
    assert answer.stop() == answer._run() == ExitCode.INTERRUPTED


def test_finished_work_stops_both_and_gives_its_exit_code(clean_handlers: None) -> None:
    pair = Pair()
    assert pair.run(lambda processes: processes.post(Finished(3))) == 3
    pair.assert_gone()


def test_the_scheduler_is_told_where_the_executor_listens(capfd: pytest.CaptureFixture[str]) -> None:
    assert Pair(scheduler="import sys; sys.exit(f'executor at {sys.argv[1]}')").fail_to_start() == 1
    assert "executor at 127.0.0.1:1" in capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_killed_child_takes_the_other_along(victim: str, capfd: pytest.CaptureFixture[str]) -> None:
    pair = Pair()
    assert pair.run(lambda processes: processes.signal(victim, signal.SIGKILL)) == 1
    pair.assert_gone()
    reason = f"octavo: the server has stopped: the {victim} was killed by SIGKILL, perhaps for want of memory"
    assert capfd.readouterr().err.splitlines()[-1] == reason


def test_a_child_that_fails_at_start_has_its_words_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert Pair(executor="import sys; sys.exit('no model of that name')").fail_to_start() == 1
    assert capfd.readouterr().err.splitlines() == [
        "no model of that name",
        "octavo: the server did not start: the executor exited with code 1",
    ]


def test_a_bad_flag_found_by_a_child_is_a_usage_error() -> None:
    assert Pair(executor="raise SystemExit(2)").fail_to_start() == 2


def test_progress_is_shown_while_loading(capfd: pytest.CaptureFixture[str]) -> None:
    progress = "print('octavo executor progress loading weights', flush=True); raise SystemExit(1)"
    assert Pair(executor=LISTENING + progress, scheduler=OBEDIENT + SLEEP).fail_to_start() == 1
    assert "octavo: loading weights" in capfd.readouterr().err.splitlines()


def test_a_child_that_ignores_sigterm_is_killed_by_whoever_asks_twice() -> None:
    pair = Pair(scheduler=STUBBORN + UP + SLEEP)

    def stop_twice(processes: Processes) -> None:
        processes.post(Signalled(signal.SIGINT))
        processes.post(Signalled(signal.SIGINT))

    assert pair.run(stop_twice) == ExitCode.INTERRUPTED
    pair.assert_gone()


def test_children_do_not_get_the_terminals_signals() -> None:
    """A Ctrl-C reaches the parent's process group; a child in it would stop before the parent decides."""
    processes = Processes()
    processes.start("child", script("import os; print(os.getpgrp() == os.getpid(), flush=True)"))
    assert processes.next_event(timeout=30) == Announced("child", "True")
    assert processes.next_event(timeout=30) == Exited("child", 0)


def test_the_end_of_a_child_is_told_although_a_grandchild_holds_its_pipe() -> None:
    grandchild = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    processes = Processes()
    processes.start("child", script(f"import subprocess, sys; print({grandchild}.pid)"))
    match [processes.next_event(timeout=30), processes.next_event(timeout=30)]:
        case [Announced("child", pid), Exited("child", 0)]:
            os.kill(int(pid), signal.SIGKILL)
        case other:
            pytest.fail(f"heard {other}")


def test_stopping_children_that_have_ended_waits_for_nothing() -> None:
    processes = Processes()
    for name in ("executor", "scheduler"):
        processes.start(name, script("pass"))
    ended = [event for event in processes.stop(patience=60.0) if isinstance(event, Exited)]
    assert sorted(event.child for event in ended) == ["executor", "scheduler"]
    assert list(processes.stop(patience=60.0)) == []


def test_without_torch_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Failure, match=r"the executor needs torch, which is not installed: pip install -e '\.\[cpu\]' in"
    ):
        require_torch()
