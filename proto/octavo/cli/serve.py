"""`octavo serve` and `octavo demo`: a scheduler and an executor as children, from start to stop.

Owns when they are started, when they count as ready, and what the end of one means for the other: the server stands
or falls as a whole. Flags are passed on as they were given; what they mean is the processes' own business.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.cli.health import is_serving
from octavo.cli.processes import Exited, Finished, Line, Processes, Ready, Signalled, signals_as_events
from octavo.cli.terminal import ExitCode, Failure, relay, say

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.1
_LOSS_PATIENCE = 2.0  # seconds for a process that cannot go on without the one that is gone
_TERMINATED = -signal.SIGTERM  # exit code of a child that was asked to stop before it could listen
_MARGIN = 5.0  # seconds beyond the grace period


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. The argument lists are the users' flags; addresses are added here."""

    scheduler: Sequence[str]
    executor: Sequence[str]
    host: str
    port: int
    grace: float  # seconds that streams have to finish, once a stop was asked for

    @property
    def address(self) -> str:
        """Where a client on this machine reaches the server."""
        host = {"0.0.0.0": LOOPBACK, "::": "::1", "[::]": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raises Failure where the port is taken: before a model is loaded for nothing, and before a foreign server on
    that port is mistaken for this one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Failure(f"port {port} is taken; stop what listens there, or choose another with --port") from None
            raise Failure(f"cannot listen on {host}:{port}: {error.strerror}") from None


def module(name: str, *arguments: str) -> list[str]:
    """Runs an installed package, and none of the same name in the current folder."""
    return [sys.executable, "-P", "-m", name, *arguments]


def start(plan: Plan, processes: Processes) -> None:
    executor_port = str(free_port())
    where = ["--host", plan.host, "--port", str(plan.port), "--executors", f"{LOOPBACK}:{executor_port}"]
    processes.start("executor", module("executor", "--exit-with-parent", "--host", LOOPBACK, "--port", executor_port,
                                       *plan.executor))  # fmt: skip
    processes.start("scheduler", module("scheduler", "--exit-with-parent", *where, *plan.scheduler))


def run(
    plan: Plan,
    on_ready: Callable[[Processes], None],
    show: Callable[[Line], bool] = lambda line: True,
    launch: Callable[[Plan, Processes], None] = start,
    ready: Callable[[str], bool] = is_serving,
) -> int:
    """Runs the server until it is asked to stop, its work is `Finished`, or one of its processes ends.

    `on_ready` is called once; it must not block. Lines of the processes for which `show` is true are passed on.
    Returns the exit code; by then no process is left.
    """
    processes = Processes()
    over = threading.Event()
    with signals_as_events(processes):
        launch(plan, processes)
        threading.Thread(target=_post_when_ready, args=(processes, plan.address, ready, over), daemon=True).start()
        try:
            return _run_until_over(plan, processes, on_ready, show)
        finally:
            over.set()


def _run_until_over(
    plan: Plan, processes: Processes, on_ready: Callable[[Processes], None], show: Callable[[Line], bool]
) -> int:
    while True:
        match processes.next_event():
            case Line() as line if show(line):
                relay(line.text)
            case Ready():
                on_ready(processes)
            case Finished(code):
                return _stop(processes, plan.grace + _MARGIN, code, show)
            case Signalled():
                say("stopping; running requests may finish (a second Ctrl-C does not wait)")
                return _stop(processes, plan.grace + _MARGIN, ExitCode.OK, show)
            case Exited() as loss:
                say(f"the {loss.child} {loss.how}; the server stops")
                _stop(processes, _LOSS_PATIENCE, ExitCode.FAILURE, show)
                return ExitCode.USAGE if loss.code == ExitCode.USAGE else ExitCode.FAILURE


def _stop(processes: Processes, patience: float, code: int, show: Callable[[Line], bool]) -> int:
    for event in processes.stop(patience):
        match event:
            case Line() as line if show(line):
                relay(line.text)
            case Exited() as end if end.code not in (0, _TERMINATED):
                say(f"the {end.child} {end.how}")
                code = code or ExitCode.FAILURE
    return code


def _post_when_ready(processes: Processes, address: str, ready: Callable[[str], bool], over: threading.Event) -> None:
    while not ready(address):
        if over.wait(_POLL_SECONDS):
            return
    processes.post(Ready())
