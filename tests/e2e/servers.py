"""The `octavo` command as a user runs it: in a process of its own, in a session of its own, as in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

COMMAND = [sys.executable, "-m", "octavo.cli"]
PATIENCE = 120.0  # seconds: the first start fetches and converts the demo model


def octavo(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"it did not come about that {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Running:
    """A command that runs; killed with its children at the end of the block, if it has not ended by then."""

    def __init__(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in self._lines]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        children = self.children()
        if self.process.poll() is None:
            self.process.kill()
        for pid in children.values():  # that their parent's death takes them along is under test
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.end()

    @property
    def stdout(self) -> list[str]:
        return self._lines["stdout"]

    @property
    def stderr(self) -> list[str]:
        return self._lines["stderr"]

    @property
    def address(self) -> str:
        """Of a server; waits until it is ready."""
        ready = "octavo: ready at "
        self.wait_for(lambda: any(line.startswith(ready) for line in self.stdout))
        return next(line for line in self.stdout if line.startswith(ready)).removeprefix(ready)

    def children(self) -> dict[str, int]:
        """Process ids of scheduler and executor, as far as they run."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_text().split("\0")
            except (OSError, IndexError, ValueError):
                continue
            if parent == self.process.pid and "-m" in words:
                found[words[words.index("-m") + 1]] = int(entry.name)
        return found

    def interrupt(self) -> None:
        """A Ctrl-C in the terminal reaches all that runs in the foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def type(self, line: str) -> None:
        """Into its stdin, which must be a pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until something holds, or the process has ended."""
        wait_until(f"{self.process.args} did what was expected", lambda: holds() or self.process.poll() is not None)
        assert holds(), "\n".join([*self.stdout, *self.stderr])

    def end(self) -> int:
        """The exit code, once it has ended and all that it wrote is read."""
        code = self.process.wait(PATIENCE)
        if self.process.stdin is not None:
            self.process.stdin.close()
        for reader in self._readers:
            reader.join()
        return code

    def _read(self, name: str) -> None:
        with getattr(self.process, name) as stream:
            for line in stream:
                self._lines[name].append(line.rstrip("\n"))
