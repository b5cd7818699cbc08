"""A peer in a comparison: a script of peers/, run by a Python of its own, which may hold other versions of everything.

Owns the process and its children. Between its turns they are stopped by a signal: what waits by spinning would take a
core from the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.versus.system import Outcome, Task, outcome_of

SCRIPTS = Path(__file__).resolve().parent / "peers"
_PATIENCE = 60.0  # seconds to end in
_LAST_WORDS = 4000  # characters of a dead peer's log


class PeerFailed(Exception):
    """It did not start, or it ended; the message holds the end of its log."""


class PeerProcess:
    """Told by its first line that it is ready."""

    def __init__(self, command: Sequence[str], log: IO[str]) -> None:
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            self.name = str(self._read()["name"])
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def answer(self, task: Task) -> Outcome:
        """Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task._asdict()) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        fields = self._read()
        return outcome_of(task, fields["seconds"], [[(at, count) for at, count in one] for one in fields["arrivals"]])

    def end(self) -> None:
        self.resume()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        fields: dict[str, Any] = json.loads(line)
        return fields

    def _failure(self) -> PeerFailed:
        self._log.seek(0)
        return PeerFailed(f"it ended; the last it wrote:\n{self._log.read()[-_LAST_WORDS:].strip()}")

    def _signal(self, number: int) -> None:
        for pid in family(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def peer_process(python: Path, script: str, *arguments: str) -> Iterator[PeerProcess]:
    """Started, ready and paused; ended at the end. Raises PeerFailed."""
    with tempfile.TemporaryFile("w+") as log:
        peer = PeerProcess([str(python), str(SCRIPTS / script), *arguments], log)
        peer.pause()
        try:
            yield peer
        finally:
            peer.end()


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
