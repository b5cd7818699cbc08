"""`python -m executor.model.pip_child PARENT DIRECTORY REQUIREMENT`: one wheel into a directory, by pip, which ends
with the process that started it.

The kernel kills it when the thread that started it ends, and with it every thread of a process that is killed itself;
pip's own temporary files lie in the directory as well, so that whoever clears that away has cleared away all.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import tempfile

_PR_SET_PDEATHSIG = 1
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")


def command(directory: str, requirement: str) -> list[str]:
    """What the parent runs."""
    return [sys.executable, "-m", "executor.model.pip_child", str(os.getpid()), directory, requirement]


def main(parent: int, directory: str, requirement: str) -> None:
    """Exits with pip's code."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        sys.exit(1)
    tempfile.tempdir = directory
    sys.argv = ["pip", "download", *_OPTIONS, "--dest", directory, requirement]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
