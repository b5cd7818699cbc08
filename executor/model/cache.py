"""Directories that are made once and then only read, safely against other processes that want the same one.

A directory is built beside its place, under a lock, and renamed into it: whoever sees it sees it whole.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Returns `directory`, after `build(empty directory)` has filled it if it did not exist."""
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():  # built by another process while this one waited
            return directory
        prefix = f".{directory.name}.partial-"
        for dead in directory.parent.glob(prefix + "*"):  # of a process that died: the lock is ours
            shutil.rmtree(dead, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return directory
