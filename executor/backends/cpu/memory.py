"""How many K/V blocks this machine's memory holds, and this process may take.

Owns the reading of /proc/meminfo and of the control groups, versions 1 and 2: a container's limit counts as much as the
machine's memory. Cached file pages that the kernel would drop do not count as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor.backends.base import OutOfMemory
from executor.sizes import format_bytes

DEFAULT_SHARE = 0.5  # of what is available once the weights are loaded
MIN_BLOCKS = 2  # the null block and one to use


@dataclass(frozen=True, slots=True)
class SystemFiles:
    """Where the kernel tells about memory."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


def kv_cache_blocks(
    bytes_per_block: int,
    memory: int | None = None,
    share: float = DEFAULT_SHARE,
    files: SystemFiles = SystemFiles(),
) -> int:
    """Blocks that fit into `memory` bytes, or into a share of what is available.

    Raises OutOfMemory, naming both sizes, where `memory` exceeds what is available or holds less than two blocks.
    """
    available = available_memory(files)
    if memory is not None and memory > available:
        raise OutOfMemory(
            f"a K/V cache of {format_bytes(memory)} was asked for, but only {format_bytes(available)} are available"
        )
    budget = int(available * share) if memory is None else memory
    if budget < MIN_BLOCKS * bytes_per_block:
        raise OutOfMemory(
            f"the smallest K/V cache, {MIN_BLOCKS} blocks, takes {format_bytes(MIN_BLOCKS * bytes_per_block)}, but "
            f"the budget is {format_bytes(budget)}"
        )
    return budget // bytes_per_block


def available_memory(files: SystemFiles = SystemFiles()) -> int:
    """Bytes that this process may still take: the machine's, or what its control groups leave if that is less."""
    return max(0, min([_machine(files), *_cgroups(files)]))


def _machine(files: SystemFiles) -> int:
    for line in (files.proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OutOfMemory(f"{files.proc / 'meminfo'} does not tell MemAvailable")


def _cgroups(files: SystemFiles) -> Iterator[int]:
    """What each limit above this process leaves."""
    membership = files.proc / "self" / "cgroup"
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = files.cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = files.cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = root / path.lstrip("/")
        # In a container the path is often the host's, and what is mounted at the root is the container's own group.
        for level in (directory, *directory.parents):
            yield from _left(level, *names)
            if level == root:
                break


def _left(directory: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[int]:
    limit, usage = _number(directory / limit_name), _number(directory / usage_name)
    if limit is not None and usage is not None:
        yield limit - usage + _reclaimable(directory / "memory.stat", reclaimable_name)


def _number(path: Path) -> int | None:
    """None for no file, and for "max", no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0
