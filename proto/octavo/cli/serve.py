"""`octavo serve`: a scheduler and an executor as children, from start to stop.

Owns when they are started, when they count as ready, and what the end of one means for the other: the server stands or
falls as a whole. The executor takes any free port and announces it; only then is the scheduler started. Flags are
passed on as they were given; what they mean is the processes' own business.
"""

from __future__ import annotations

import errno
import importlib.util
import signal
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.cli.connection import is_serving
from octavo.cli.flags import EXECUTOR, SCHEDULER, given
from octavo.cli.parser import DEFAULT_HOST, DEFAULT_PORT
from octavo.cli.processes import Announced, Exited, Finished, Logged, Processes, Ready, Signalled, signals_as_events
from octavo.cli.terminal import ExitCode, Failure, relay, say, write

_LISTENING = "octavo executor listening address="
_PROGRESS = "octavo executor progress "
_SCHEDULER_LOST_EXECUTOR = 3  # the scheduler's exit code, where --exit-on-executor-loss is given
_TERMINATED = -signal.SIGTERM  # exit code of a child that was asked to stop before it could listen
_POLL_SECONDS = 0.1
_LOSS_PATIENCE = 2.0  # seconds for a process that cannot go on without the one that is gone
_MARGIN = 5.0  # seconds beyond the grace period
_DEFAULT_GRACE = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, and how long to wait for its end."""

    executor: Sequence[str]  # its command
    scheduler: Callable[[str], Sequence[str]]  # its command, given the executor's address
    address: str  # where a client on this machine reaches the scheduler
    grace: float = _DEFAULT_GRACE  # seconds that streams have to finish, once a stop was asked for
    health: str | None = None  # where the scheduler says without TLS whether it serves; None: at `address`


class Work(Protocol):
    """What the server is started for. Neither call may block."""

    def begin(self, processes: Processes) -> None:
        """The server is ready. Work that ends posts `Finished`."""

    def stop(self) -> int:
        """Somebody asked to stop; returns the exit code, if both processes stop well."""


class Serving:
    """Until somebody asks to stop."""

    def __init__(self, address: str) -> None:
        self._address = address

    def begin(self, processes: Processes) -> None:
        write(f"octavo: ready at {self._address}\n")

    def stop(self) -> int:
        say("stopping; running requests may finish (a second Ctrl-C does not wait)")
        return ExitCode.OK


def serve(options: Namespace) -> int:
    plan = plan_of(options)
    say("starting; Ctrl-C stops the server")
    return run(plan, Serving(plan.address))


def plan_of(options: Namespace) -> Plan:
    """The plan that the flags ask for. Raises Failure where the port cannot be had: before a model is loaded for
    nothing, and before a foreign server on that port is mistaken for ours."""
    require_torch()
    host = options.host or DEFAULT_HOST
    port = _port(options.port)
    listen_on(host, port).close()
    if port == 0:
        with listen_on(host, 0) as probe:
            port = int(probe.getsockname()[1])
    own_port = [f"--host={host}", f"--port={port}", "--exit-on-executor-loss"]
    health = None
    if options.health_port is not None or options.tls_cert is not None:
        with listen_on(host, _port(options.health_port or "0")) as probe:
            health = int(probe.getsockname()[1])
        own_port.append(f"--health-port={health}")
    scheduler = [flag for flag in SCHEDULER if flag.name not in ("--host", "--port", "--health-port")]
    return Plan(
        executor=module("executor", "--port=0", "--exit-with-parent", *given(EXECUTOR, options)),
        scheduler=lambda executor: module(
            "scheduler", f"--executors={executor}", "--exit-with-parent", *own_port, *given(scheduler, options)
        ),
        address=_address(host, port),
        health=None if health is None else _address(host, health),
        grace=_grace(options.grace_period),
    )


def require_torch() -> None:
    """Raises Failure where the executor could not run at all."""
    if importlib.util.find_spec("torch") is None:
        raise Failure("the executor needs torch, which is not installed: pip install -e '.[cpu]' in the checkout")


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs an installed package, and none of the same name in the current folder."""
    return [sys.executable, "-P", "-m", name, *arguments]


def listen_on(host: str, port: int) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host.strip("[]"), port))
    except OSError as error:
        probe.close()
        if error.errno == errno.EADDRINUSE:
            raise Failure(f"port {port} is taken; stop what listens there, or choose another with --port") from None
        raise Failure(f"cannot listen on {host}: {error.strerror}") from None
    return probe


def run(plan: Plan, work: Work, ready: Callable[[str], bool] = is_serving) -> int:
    """Runs the server until it is asked to stop, its work is `Finished`, or one of its processes ends.

    Returns the exit code; by then no process is left.
    """
    processes = Processes()
    over = threading.Event()

    def start_scheduler(executor: str) -> None:
        processes.start("scheduler", plan.scheduler(executor))
        threading.Thread(
            target=_post_when_ready, args=(processes, plan.health or plan.address, ready, over), daemon=True
        ).start()

    with signals_as_events(processes):
        processes.start("executor", plan.executor)
        try:
            return _run_until_over(plan, processes, start_scheduler, work)
        finally:
            over.set()


def _run_until_over(
    plan: Plan,
    processes: Processes,
    start_scheduler: Callable[[str], None],
    work: Work,
) -> int:
    is_ready = False
    while True:
        match processes.next_event():
            case Announced("executor", text) if text.startswith(_LISTENING):
                start_scheduler(text.removeprefix(_LISTENING))
            case Announced("executor", text) if text.startswith(_PROGRESS):
                say(text.removeprefix(_PROGRESS))
            case Logged(text=text):
                relay(text)
            case Ready():
                is_ready = True
                work.begin(processes)
            case Finished(code):
                return _stop(processes, plan.grace + _MARGIN, code)
            case Signalled():
                return _stop(processes, plan.grace + _MARGIN, work.stop())
            case Exited() as loss:
                ends_of_itself = is_ready and loss.child == "executor"  # the scheduler does then, and says why
                _stop(processes, _LOSS_PATIENCE, ExitCode.FAILURE, _LOSS_PATIENCE if ends_of_itself else 0.0)
                words = _words(loss)  # last, where a reader looks first
                say(f"the server has stopped: {words}" if is_ready else f"the server did not start: {words}")
                return ExitCode.USAGE if loss.code == ExitCode.USAGE else ExitCode.FAILURE


def _stop(processes: Processes, patience: float, code: int, unasked: float = 0.0) -> int:
    for event in processes.stop(patience, unasked):
        match event:
            case Logged(text=text):
                relay(text)
            case Signalled():
                code = ExitCode.INTERRUPTED
            case Exited() as end if end.code not in (0, _TERMINATED):
                say(_words(end))
                code = code or ExitCode.FAILURE
    return code


def _words(end: Exited) -> str:
    if end.child == "scheduler" and end.code == _SCHEDULER_LOST_EXECUTOR:
        return "the scheduler lost its executor and stopped"
    return f"the {end.child} {end.how}"


def _post_when_ready(processes: Processes, address: str, ready: Callable[[str], bool], over: threading.Event) -> None:
    while not ready(address):
        if over.wait(_POLL_SECONDS):
            return
    processes.post(Ready())


def _port(text: str | None) -> int:
    if text is None:
        return DEFAULT_PORT
    if not text.isdecimal() or int(text) > 65535:
        raise Failure(f"--port {text!r} is no port, which is a number below 65536", ExitCode.USAGE)
    return int(text)


def _grace(text: str | None) -> float:
    """What the processes will make of it; if it is no number, they say so."""
    try:
        return _DEFAULT_GRACE if text is None else float(text)
    except ValueError:
        return _DEFAULT_GRACE


def _address(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host).strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
