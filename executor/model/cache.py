"""Directories that are made once and then only read, safely against other processes that want the same one.

A directory is built beside its place, under a lock, and renamed into it: whoever sees it sees it whole. The sizes of
its files are recorded in it; where they are others later, somebody or a broken disk took something away, and it is
built again. A directory without a record was made by others, and is taken as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

from executor.model.errors import UnusableCache

RECORD = ".sizes.json"  # in each directory built: {relative path: size in bytes}


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Returns `directory`, after `build(empty directory)` has filled it if it is not there, or no longer whole.

    Raises UnusableCache where the file system refuses; other errors of `build` go through.
    """
    try:
        if not _is_whole(directory):
            _build(directory, build)
    except OSError as error:
        raise UnusableCache(directory.parent, error) from error
    return directory


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_whole(directory):  # built by another process while this one waited
            return
        prefix = f".{directory.name}.partial-"
        for dead in directory.parent.glob(prefix + "*"):  # of a process that died: the lock is ours
            shutil.rmtree(dead, ignore_errors=True)
        partial = directory.parent / f"{prefix}{uuid.uuid4().hex}"
        partial.mkdir()
        try:
            build(partial)
            _finish(partial)
            if directory.is_dir():  # who reads it still has its files open
                directory.rename(partial.with_name(f"{prefix}{uuid.uuid4().hex}"))
            partial.rename(directory)
        finally:
            for left in directory.parent.glob(prefix + "*"):
                shutil.rmtree(left, ignore_errors=True)


def _finish(directory: Path) -> None:
    """Gives each file the mode that the umask gives, whatever its library thought of it, and records its size."""
    mode = stat.S_IMODE(directory.stat().st_mode) & 0o666  # a new directory has every bit that the umask leaves
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(mode)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    (directory / RECORD).write_text(json.dumps(sizes))


def _is_whole(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    try:
        sizes = json.loads((directory / RECORD).read_text())
        return all(os.stat(directory / name).st_size == size for name, size in sizes.items())
    except FileNotFoundError as missing:
        return missing.filename == str(directory / RECORD) and any(directory.iterdir())
    except (ValueError, AttributeError):
        return False
