"""NVIDIA's run-time compiler, called through ctypes: text in, a cubin and the assembler's log out.

Needs the wheels of nvrtc and of the runtime's headers, or an installed toolkit; no driver, no device and no CuPy, so
that every architecture is compiled and checked on any machine. Owns finding the library and its headers; keeps no
cache (compile.py does).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


class NvrtcError(Exception):
    """The compiler is missing or refused a program; holds its log."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one program became."""

    cubin: bytes
    log: str


def _wheel_directories() -> list[Path]:
    return [Path(entry) / "nvidia" for entry in sys.path if (Path(entry) / "nvidia").is_dir()]


def _candidates(pattern: str) -> list[Path]:
    """Files that match below the wheels' directory, then below the usual place of a toolkit."""
    found: list[Path] = []
    for wheels in _wheel_directories():
        found += sorted(wheels.glob(f"*/{pattern}"))
    return (
        found + sorted(Path("/usr/local/cuda").glob(pattern)) + sorted(Path("/usr/local/cuda").glob(f"*/*/{pattern}"))
    )


class Nvrtc:
    """The loaded library. Methods may be called from any thread."""

    def __init__(self, library: Path, headers: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.headers = headers
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "version")
        self.version = f"{major.value}.{minor.value}"

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> Compiled:
        """Compiles one program to a cubin. Raises NvrtcError with the compiler's log."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), name.encode(), ctypes.c_int(0), None, None
            ),
            name,
        )
        try:
            given = [*options, f"-I{self.headers}"]
            array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
            status: int = self._library.nvrtcCompileProgram(program, ctypes.c_int(len(given)), array)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise NvrtcError(f"{name} does not compile:\n{log}")
            return Compiled(self._read(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        """All bytes that the library counts: a binding that strips a "trailing zero" cuts a cubin short by one."""
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw[: size.value]

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            raise NvrtcError(f"nvrtc, {what}: {self._library.nvrtcGetErrorString(status).decode()}")


@lru_cache(maxsize=1)
def load() -> Nvrtc:
    """The library of this environment. Raises NvrtcError naming what to install."""
    libraries = _candidates("lib/libnvrtc.so.1[0-9]") + _candidates("lib64/libnvrtc.so.1[0-9]")
    headers = [path.parent for path in _candidates("include/cuda_fp16.h")]
    if not libraries or not headers:
        missing = "libnvrtc" if not libraries else "the CUDA headers (cuda_fp16.h)"
        raise NvrtcError(f"{missing} not found: install octavo[cuda12] or octavo[cuda13]")
    return Nvrtc(libraries[0], headers[0])
