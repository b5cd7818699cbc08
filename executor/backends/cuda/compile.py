"""Kernel sources to cubins for any architecture, with a cache on disk and the resources each kernel takes.

A cached cubin's name is the hash of everything it depends on: the text with headers inlined, the options, the
architecture and the compiler's version; so a cache is never stale and may be shared by processes. Works without driver
or device. Loading and launching are launch.py's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.backends.cuda import nvrtc
from executor.backends.cuda.sources import KernelSource, inlined

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
OPTIONS = ("-std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space")

_USAGE = re.compile(r"Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(?P<shared>\d+) bytes smem")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes: per thread (registers, spilled bytes) and per block (static shared memory)."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel for one architecture; `path` holds the cubin."""

    source: KernelSource
    arch: str
    path: Path
    resources: Resources

    @property
    def cubin_bytes(self) -> int:
        return self.path.stat().st_size


def parse_resources(log: str) -> Resources:
    """From the assembler's log of a program with one kernel."""
    usage, spills = _USAGE.search(log), _SPILLS.search(log)
    if usage is None or spills is None:
        raise nvrtc.NvrtcError(f"the log names no resources:\n{log}")
    shared = _SHARED.search(log)
    return Resources(
        registers=int(usage["registers"]),
        spill_bytes=int(spills["stores"]) + int(spills["loads"]),
        shared_bytes=int(shared["shared"]) if shared else 0,
    )


def default_cache() -> Path:
    """Where cubins are kept between runs."""
    return Path.home() / ".cache" / "octavo" / "cubins"


class KernelCompiler:
    """Compiles kernels, each once per cache directory."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or default_cache()

    def compile(self, source: KernelSource, arch: str, replaced: Mapping[str, str] | None = None) -> CompiledKernel:
        """The kernel for an architecture such as "90" or "90a". Raises NvrtcError with the log if it does not compile.

        `replaced` stands in for files of the sources, by name (see `sources.inlined`).
        """
        compiler = nvrtc.load()
        text = inlined(source.file, replaced)
        options = (*OPTIONS, *source.options, f"-arch=sm_{arch}")
        identity = "\0".join((text, *options, source.function, compiler.version))
        key = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        path = self._cache / f"{source.function}-sm_{arch}-{key}.cubin"
        record = path.with_suffix(".json")
        if path.is_file() and record.is_file():
            return CompiledKernel(source, arch, path, Resources(**json.loads(record.read_text())))
        compiled = compiler.compile(text, source.file, options)
        resources = parse_resources(compiled.log)
        self._cache.mkdir(parents=True, exist_ok=True)
        _write_whole(record, json.dumps(asdict(resources)).encode())
        _write_whole(path, compiled.cubin)
        return CompiledKernel(source, arch, path, resources)


def _write_whole(path: Path, content: bytes) -> None:
    """Other processes see the file complete or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(temporary).replace(path)
