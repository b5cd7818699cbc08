"""Kernel sources to shared libraries for the CPU, by g++, cached by the hash of all that goes in.

Owns the build directory. A library holds one kernel; the runtime is a library of its own that all of them link to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from executor.backends.cuda.sources import KernelSource, inlined

HERE = Path(__file__).resolve().parent
DEFAULT_DIRECTORY = HERE.parent.parent.parent / "build" / "cusim"

# No contraction: a result must not depend on what g++ fuses. Warnings are NVRTC's business.
OPTIONS = ("-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w")
UNDEFINED_BEHAVIOUR = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")


class SimulatorBuild:
    """Builds on demand. `replaced` stands in for source files by name; `sanitize` adds traps on undefined behaviour."""

    def __init__(
        self, directory: Path = DEFAULT_DIRECTORY, replaced: Mapping[str, str] | None = None, sanitize: bool = False
    ) -> None:
        self._directory = directory
        self._replaced = replaced
        self._options = OPTIONS + (UNDEFINED_BEHAVIOUR if sanitize else ())

    def kernel(self, source: KernelSource) -> Path:
        """The library of one kernel."""
        text = inlined(source.file, self._replaced) + f"\nCUSIM_EXPORT({source.function})\n"
        command = (*self._options, *source.options, f"-I{HERE / 'include'}", "-include", "cusim.h")
        link = (str(self.runtime), f"-Wl,-rpath,{self._directory}")
        return self._build(source.function, text, command, link)

    @cached_property
    def runtime(self) -> Path:
        """The library that runs blocks."""
        return self._build(
            "runtime", (HERE / "runtime.cpp").read_text(), (*OPTIONS, "-O2", f"-I{HERE / 'include'}"), ()
        )

    def _build(self, name: str, text: str, options: tuple[str, ...], link: tuple[str, ...]) -> Path:
        identity = "\0".join((self._environment, text, *options, *(Path(part).name for part in link)))
        key = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        library = self._directory / f"lib{name}-{key}.so"
        if library.is_file():
            return library
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            unit, built = Path(scratch) / f"{name}.cpp", Path(scratch) / library.name
            unit.write_text(text)
            named = (f"-Wl,-soname,{library.name}", "-o", str(built))
            command = ["g++", *options, str(unit), *link, *named]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{name} does not compile for the simulator:\n{done.stderr[:4000]}")
            os.replace(built, library)
        return library

    @cached_property
    def _environment(self) -> str:
        """What the machine and the simulator's own headers add to a library's identity."""
        if shutil.which("g++") is None:
            raise RuntimeError("the simulator needs g++, version 11 or later")
        version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
        cpuinfo = Path("/proc/cpuinfo")
        model = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))][:1]
        headers = [path.read_text() for path in sorted((HERE / "include").iterdir())]
        return "\0".join((version, platform.machine(), *model, *headers))
