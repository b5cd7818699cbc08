"""What the command line writes, and how it fails.

Answers go to stdout and nothing else does, so that they can be piped; words about them go to stderr. A `Failure` is
one sentence that a user can act on, with the exit code that goes with it; it is printed without a traceback.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys


class ExitCode(enum.IntEnum):
    """0 is success; the rest of the table stands in the README."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INTERRUPTED = 130  # 128 + SIGINT
    BROKEN_PIPE = 141  # 128 + SIGPIPE


class Failure(Exception):
    """A sentence for the user, and the exit code."""

    def __init__(self, sentence: str, code: int = ExitCode.FAILURE) -> None:
        super().__init__(sentence)
        self.code = code


def say(sentence: str) -> None:
    """Tells the user something about the work, on stderr."""
    relay(f"octavo: {sentence}")


def relay(text: str) -> None:
    """Passes a line of a child on, on stderr. Where it finds no place, the work goes on without it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Part of an answer, on stdout, visible at once. Raises Failure where it finds no place, as on a full disk."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise Failure(f"stdout cannot be written: {error.strerror}") from None


def open_missing_streams() -> None:
    """Gives the process the standard streams that it was started without, as by `<&-`, empty ones.

    Else the next files and connections would take their numbers, and what is written to stderr would end there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def leave_at_interrupt() -> None:
    """Makes a Ctrl-C end the process at once, and with it the connection, which cancels what was asked for.

    No KeyboardInterrupt: raised while modules are imported or objects collected, it would be swallowed.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(ExitCode.INTERRUPTED))


def abandon_stdout() -> None:
    """After a write that failed: lets the interpreter's own last flush fail nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
