"""`python -m executor`: reads the command line, and runs the executor's process.

The only module that touches the environment. What torch and OpenMP read there is set before they are imported: waiting
threads sleep instead of spinning, for the scheduler's process wants a core as well; but not at once, since the end of
one product is microseconds from the start of the next. Everything that takes time is imported by functions, once an
interrupt is quiet.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.config import ExecutorConfig
    from executor.loaded import Loaded, Loader

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str], loader: Loader | None = None) -> int:
    """Runs the process and returns its exit code. `loader` stands in for the model in tests."""
    from executor.config import StartupError, parse_arguments

    config = parse_arguments(arguments, os.environ)
    if config.exit_with_parent:
        _exit_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # turns of the loop: some 10 microseconds
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    import uvloop

    from executor.log import configure_log
    from executor.server import serve

    configure_log(config.log_format, config.log_level)
    try:
        return uvloop.run(serve(config, loader or _load))
    except StartupError as error:
        print(f"octavo executor: {error}", file=sys.stderr)
        return 1


def _load(config: ExecutorConfig, device_name: str, progress: Callable[[str], None]) -> Loaded:
    if config.simulate_step_ms is not None:
        from executor.simulated import load_simulated

        return load_simulated(config, device_name, progress)
    from executor.loading import load

    return load(config, device_name, progress)


def _exit_with_parent() -> None:
    """The kernel kills this process when its parent ends, however that ends."""
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before the server listens to it, or while it is imported: nothing is begun, and nothing is to be said."""
    os._exit(128 + number)


def leave(code: int) -> None:
    """Threads that load or compute cannot be stopped, and must not meet an interpreter that is being torn down."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)
    leave(main(sys.argv[1:]))
