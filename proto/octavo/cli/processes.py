"""The server's processes as children: started, heard, watched, and stopped.

Owns the children and one queue of what happens to them: what one wrote, the end of one, a signal that reached the
parent, and whatever else the caller posts. Knows nothing of models, flags or gRPC. Children run in sessions of
their own, so that a Ctrl-C in the terminal reaches the parent alone, and the parent decides what it means. After
`stop` none of them is left.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO

_PIPE_PATIENCE = 1.0  # seconds for the last lines of a dead child, whose pipe a grandchild may hold open


@dataclass(frozen=True, slots=True)
class Announced:
    """A child told its parent something: a line on its stdout."""

    child: str
    text: str


@dataclass(frozen=True, slots=True)
class Logged:
    """A child told people something: a line on its stderr."""

    child: str
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child is gone. `code` is negative where a signal ended it, as in subprocess."""

    child: str
    code: int

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        name = signal.Signals(-self.code).name
        return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


@dataclass(frozen=True, slots=True)
class Signalled:
    """The parent was asked to stop."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The server answers requests."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The work that the processes were started for is done."""

    code: int


Event = Announced | Logged | Exited | Signalled | Ready | Finished


class Processes:
    """Children by name, in the order of their start."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._children: dict[str, subprocess.Popen[str]] = {}
        self._gone: set[str] = set()  # those whose Exited was taken from the queue

    @property
    def running(self) -> tuple[str, ...]:
        """Children whose end has not been told, in the order of their start."""
        return tuple(name for name in self._children if name not in self._gone)

    def start(self, name: str, command: Sequence[str]) -> None:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._children[name] = child
        assert child.stdout is not None
        assert child.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(stream, kind, name), daemon=True)
            for stream, kind in ((child.stdout, Announced), (child.stderr, Logged))
        ]
        for thread in (*readers, threading.Thread(target=self._wait, args=(name, child, readers), daemon=True)):
            thread.start()

    def post(self, event: Event) -> None:
        """Puts an event in line; safe from threads and signal handlers."""
        self._events.put(event)

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event, or None after `timeout` seconds."""
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(event, Exited):
            self._gone.add(event.child)
        return event

    def signal(self, name: str, number: int) -> None:
        """Sends a signal; a child that is gone is left in peace."""
        self._children[name].send_signal(number)

    def stop(self, patience: float, unasked: float = 0.0) -> Iterator[Event]:
        """Stops what runs, the last started first, and yields the events meanwhile.

        Each child has `unasked` seconds to end of itself, is asked by SIGTERM then and has `patience` seconds. A second
        SIGTERM, and two seconds later SIGKILL, follow after that, or as soon as a `Signalled` comes: who asks twice
        does not want to wait.
        """
        for name in reversed(self.running):
            if name in self._gone:  # since the loop began
                continue
            asked = ((signal.SIGTERM, patience), (signal.SIGTERM, 2.0), (signal.SIGKILL, None))
            for number, seconds in ((None, unasked), *asked):
                if number is not None:
                    self.signal(name, number)
                if (yield from self._events_until_exit(name, seconds)):
                    break

    def _events_until_exit(self, name: str, seconds: float | None) -> Generator[Event, None, bool]:
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            event = self.next_event(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if event is None:
                return False
            yield event
            match event:
                case Exited(child) if child == name:
                    return True
                case Signalled():
                    return False

    def _read(self, stream: IO[str], kind: type[Announced] | type[Logged], name: str) -> None:
        with stream:
            for text in stream:
                self.post(kind(name, text.rstrip("\n")))

    def _wait(self, name: str, child: subprocess.Popen[str], readers: Sequence[threading.Thread]) -> None:
        code = child.wait()
        deadline = time.monotonic() + _PIPE_PATIENCE
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self.post(Exited(name, code))


@contextlib.contextmanager
def signals_as_events(processes: Processes) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into `Signalled` events, so that no signal interrupts half a shutdown."""

    def post(number: int, _frame: FrameType | None) -> None:
        processes.post(Signalled(number))

    previous = {number: signal.signal(number, post) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
