"""The kernels' sources: where they lie, and one text a kernel with the project's headers inlined.

A `KernelSource` names a function, its file and the constants it is specialised by; it is what a compiler and a launcher
are given. Knows nothing of compilers. The inlined text is what is hashed and compiled, so that an edited header can
never run a stale binary; NVIDIA's own headers stay includes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_INCLUDE = re.compile(r'^#include "(?P<name>[\w./]+)"\s*$')


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One specialised kernel: an extern "C" function of a file in cuda/, and its -D constants in a fixed order."""

    function: str
    file: str
    defines: tuple[tuple[str, str | int], ...] = ()

    @property
    def name(self) -> str:
        """As printed and looked up: function[CONSTANT=value,...]."""
        constants = ",".join(f"{key}={value}" for key, value in self.defines)
        return f"{self.function}[{constants}]" if constants else self.function

    @property
    def options(self) -> tuple[str, ...]:
        """The constants as compiler options, the same for every compiler."""
        return tuple(f"-D{key}={value}" for key, value in self.defines)


def kernel(function: str, file: str, **defines: str | int) -> KernelSource:
    """A KernelSource written as a call: kernel("merge_states", "merge_states.cu", SCALAR="bf16", HEAD_SIZE=128)."""
    return KernelSource(function, file, tuple(defines.items()))


def source_directory() -> Path:
    """Of the .cu files: inside the installed package, or beside it in a checkout."""
    executor = Path(__file__).resolve().parent.parent.parent
    for directory in (executor / "kernels", executor.parent / "cuda"):
        if (directory / "ptx.cuh").is_file():
            return directory
    raise FileNotFoundError(f"no kernel sources in {executor / 'kernels'} or {executor.parent / 'cuda'}")


def inlined(file: str, replaced: Mapping[str, str] | None = None) -> str:
    """The file's text with each of the project's headers put in once, at its first include.

    `replaced` gives other texts for some files, by name: tests compile deliberate mistakes that way.
    """
    directory = source_directory()
    done: set[str] = set()

    def lines(name: str) -> list[str]:
        done.add(name)
        text = (replaced or {}).get(name) or (directory / name).read_text()
        result = [f'#line 1 "{name}"']
        for number, line in enumerate(text.splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                result.append("" if line.strip() == "#pragma once" else line)
            elif include["name"] not in done:
                result += [*lines(include["name"]), f'#line {number + 1} "{name}"']
            else:
                result.append("")
        return result

    return "\n".join(lines(file)) + "\n"
