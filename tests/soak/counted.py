"""`python -m tests.soak.counted FILE MODULE FLAGS…`: runs a process of Octavo's that counts its Python objects.

On SIGUSR1 it collects garbage and appends the number of live objects to FILE, from a thread, wherever its loop stands.
"""

from __future__ import annotations

import gc
import runpy
import signal
import sys
import threading
from pathlib import Path


def count_on_signal(path: Path) -> None:
    def count() -> None:
        while signal.sigwait({signal.SIGUSR1}):
            gc.collect()
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
