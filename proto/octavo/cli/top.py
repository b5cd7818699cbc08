"""`octavo top`: the inside of a running server, live in a terminal; `q` or Ctrl-C leaves.

Three sources of events, the server, the keyboard and the signal, meet in one queue that the main thread reads, so that
the terminal is always given back as it was found. Where stdout is no terminal, one picture is printed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import termios
import threading
import tty
from argparse import Namespace
from collections.abc import Iterator

from octavo.cli.connection import connected
from octavo.cli.inside import Rates, lines_of, painted
from octavo.cli.terminal import ExitCode, write
from octavo.client import Client, Inspection, OctavoError

_FIRST_SECONDS = 0.5  # between the two moments that --once needs for a rate
_RATE_MOMENTS = 3  # a rate is that since so many pictures ago
_ENTER = "\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _LINE_END, _REST = "\x1b[H", "\x1b[K\r\n", "\x1b[J"

Event = Inspection | Exception | int | None  # news, what went wrong, the exit code of who leaves, the end of the stream


def top(options: Namespace) -> int:
    with connected(options) as client:
        if options.once or not sys.stdout.isatty():
            return _print_once(client)
        return _Screen(client, options.interval).run()


def _print_once(client: Client) -> int:
    watch = client.watch_blocks(_FIRST_SECONDS)
    before = next(watch)
    now = next(watch, before)
    watch.close()  # type: ignore[attr-defined]
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines_of(now, Rates.between(before, now), shutil.get_terminal_size((120, 24)).columns):
        write(painted(line, colour=colour).rstrip() + "\n")
    return ExitCode.OK


class _Screen:
    """What is shown, and until when."""

    def __init__(self, client: Client, interval: float) -> None:
        self._client = client
        self._interval = interval
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._moments: list[Inspection] = []

    def run(self) -> int:
        for work in (self._watch, self._listen):
            threading.Thread(target=work, daemon=True).start()
        previous = signal.signal(signal.SIGINT, lambda number, frame: self._events.put(ExitCode.INTERRUPTED))
        try:
            with _taken_over():
                while True:
                    match self._events.get():
                        case Inspection() as seen:
                            self._show(seen)
                        case int(code):
                            return code
                        case Exception() as error:
                            raise error
                        case None:
                            return ExitCode.OK
        finally:
            signal.signal(signal.SIGINT, previous)

    def _watch(self) -> None:
        try:
            for seen in self._client.watch_blocks(self._interval):
                self._events.put(seen)
            self._events.put(None)
        except (OctavoError, ValueError) as error:  # ValueError: the connection was closed, since somebody left
            self._events.put(error)

    def _listen(self) -> None:
        while key := os.read(sys.stdin.fileno(), 1):  # no buffer, whose lock the interpreter's end would wait for
            if key in b"qQ":
                self._events.put(ExitCode.OK)
                return

    def _show(self, seen: Inspection) -> None:
        self._moments = [*self._moments[-_RATE_MOMENTS:], seen]
        before = self._moments[0] if len(self._moments) > 1 else None
        columns, rows = shutil.get_terminal_size()
        lines = lines_of(seen, Rates.between(before, seen), columns)
        if len(lines) >= rows:
            lines = [*lines[: rows - 2], [("the terminal shows no more; q leaves", "2")]]
        colour = "NO_COLOR" not in os.environ
        write(_HOME + "".join(painted(line, colour=colour) + _LINE_END for line in lines) + _REST)


@contextlib.contextmanager
def _taken_over() -> Iterator[None]:
    """The whole terminal: keys come at once and unseen. Given back whatever happens."""
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    settings = None if keyboard is None else termios.tcgetattr(keyboard)
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
        write(_ENTER)
        yield
    finally:
        write(_LEAVE)
        if keyboard is not None and settings is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)
