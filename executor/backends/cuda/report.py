"""`octavo kernels`: compiles the whole catalogue for given architectures and tells what each kernel takes.

Needs the compiler's packages, no GPU and no driver. Ends with code 1 if a kernel spills registers or does not compile:
both are faults of the sources, and the table says which. Cubins come from and go to the cache that the executor uses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from executor.backends.cuda import nvrtc
from executor.backends.cuda.catalog import catalog
from executor.backends.cuda.compile import ARCHITECTURES, KernelCompiler
from executor.backends.cuda.sources import KernelSource

HEADERS = ("kernel", "arch", "registers", "spills", "shared", "cubin")


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel on one architecture. The numbers are 0 where it does not compile."""

    kernel: str
    arch: str  # "90"
    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads
    shared_bytes: int  # per block, static
    cubin_bytes: int
    failure: str | None = None  # the compiler's log

    @property
    def is_fault(self) -> bool:
        return self.failure is not None or self.spill_bytes > 0

    def row(self) -> dict[str, str | int]:
        """As --json prints it."""
        names = ("kernel", "arch", "registers", "spill_bytes", "shared_bytes", "cubin_bytes")
        row = {name: getattr(self, name) for name in names}
        return row if self.failure is None else {**row, "failure": self.failure}


def report(
    kernels: Sequence[KernelSource], architectures: Sequence[str], compiler: KernelCompiler, threads: int = 1
) -> list[KernelReport]:
    """Every kernel on every architecture, in that order."""

    def one(case: tuple[KernelSource, str]) -> KernelReport:
        source, arch = case
        try:
            compiled = compiler.compile(source, arch)
        except nvrtc.NvrtcError as error:
            return KernelReport(source.name, arch, 0, 0, 0, 0, str(error))
        used = compiled.resources
        return KernelReport(
            source.name, arch, used.registers, used.spill_bytes, used.shared_bytes, compiled.cubin_bytes
        )

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, [(source, arch) for source in kernels for arch in architectures]))


def table(reports: Sequence[KernelReport]) -> str:
    """Columns for people; bytes, and registers per thread."""
    rows = [
        (entry.kernel, entry.arch, "does not compile", "", "", "")
        if entry.failure is not None
        else (
            entry.kernel,
            entry.arch,
            str(entry.registers),
            str(entry.spill_bytes),
            str(entry.shared_bytes),
            str(entry.cubin_bytes),
        )
        for entry in reports
    ]
    return _aligned([HEADERS, *rows])


SUMMARY_HEADERS = ("function", "arch", "variants", "registers", "spills", "shared", "cubin")


def summary(reports: Sequence[KernelReport]) -> str:
    """One line for each function and architecture, over its specialisations: the least and the most of each number."""
    groups: dict[tuple[str, str], list[KernelReport]] = {}
    for entry in reports:
        groups.setdefault((entry.kernel.partition("[")[0], entry.arch), []).append(entry)
    rows = [
        (
            function,
            arch,
            str(len(entries)),
            _range([entry.registers for entry in entries]),
            str(sum(entry.spill_bytes for entry in entries)),
            _range([entry.shared_bytes for entry in entries]),
            _range([entry.cubin_bytes for entry in entries]),
        )
        for (function, arch), entries in groups.items()
    ]
    return _aligned([SUMMARY_HEADERS, *rows])


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    kernels = [source for source in catalog() if options.kernel in source.name]
    if not kernels:
        print(f"octavo kernels: no kernel's name holds {options.kernel!r}", file=sys.stderr)
        return 1
    try:
        nvrtc.load()
    except nvrtc.NvrtcError as error:
        print(f"octavo kernels: {error}", file=sys.stderr)
        return 1
    reports = report(kernels, options.arch, KernelCompiler(options.cache), len(os.sched_getaffinity(0)))
    if options.json:
        print(json.dumps([entry.row() for entry in reports], indent=1))
    else:
        print(summary(reports) if options.summary else table(reports))
    for entry in reports:
        if entry.failure is not None:
            print(f"octavo kernels: {entry.kernel} for sm_{entry.arch}: {entry.failure}", file=sys.stderr)
    faults = [entry for entry in reports if entry.is_fault]
    if faults:
        spills = sum(entry.spill_bytes > 0 for entry in faults)
        print(f"octavo kernels: {len(faults) - spills} do not compile, {spills} spill registers", file=sys.stderr)
    return 1 if faults else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo kernels",
        description="Compiles every kernel for the architectures given, and prints what each takes. Needs no GPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch",
        type=_architectures,
        default=ARCHITECTURES,
        metavar="NUMBERS",
        help=f"architectures, as 80,90; default {','.join(ARCHITECTURES)}",
    )
    parser.add_argument("--kernel", default="", metavar="TEXT", help="only kernels whose name holds TEXT")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON list of rows instead of a table")
    form.add_argument("--summary", action="store_true", help="one line for each function, over its specialisations")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="where cubins are kept; default ~/.cache/octavo/cubins"
    )
    return parser


def _architectures(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().removeprefix("sm_") for name in text.split(","))
    for name in names:
        if not name.rstrip("abcdef").isdigit():
            raise argparse.ArgumentTypeError(f"{name!r} is no architecture; write it as 90, several as 80,90")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
