"""`python -m tests.soak.counted FILE MODULE FLAGS…`: runs a process of Octavo's that counts its Python objects.

On SIGUSR1 it collects garbage, gives back what the allocator keeps for later, so that resident memory is what is held,
and appends the number of live objects to FILE: from a thread, wherever the loop stands.
"""

from __future__ import annotations

import ctypes
import gc
import runpy
import signal
import sys
import threading
from pathlib import Path


def count_on_signal(path: Path) -> None:
    libc = ctypes.CDLL(None)

    def count() -> None:
        while signal.sigwait({signal.SIGUSR1}):
            gc.collect()
            libc.malloc_trim(0)
            with path.open("a") as file:
                file.write(f"{len(gc.get_objects())}\n")

    # Blocked here, so in all threads to come: only `sigwait` sees it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=count, name="count", daemon=True).start()


if __name__ == "__main__":
    file, module, *flags = sys.argv[1:]
    count_on_signal(Path(file))
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
