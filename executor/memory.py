"""How much memory this process may still take: the machine's, or less where a cgroup says so.

A container's limit is not in /proc/meminfo; a KV cache sized without it is killed long after the start. Page cache that
can be dropped counts as free.
"""

from __future__ import annotations

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes. `root` is where proc and sys are mounted."""
    return max(0, min(_machine(root), *_cgroup_limits(root)))


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def _cgroup_limits(root: Path) -> list[int]:
    """What is left in this process' cgroup and in each above it; at least one number, so that min has two."""
    left = [1 << 62]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left.extend(_left_along(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left.extend(_left_along(base, path, *names))
    return left


def _left_along(base: Path, path: str, limit: str, usage: str, droppable: str) -> list[int]:
    directory = base / path.lstrip("/")
    # Inside a container the path may name a directory of the host; the mount's own root is then the cgroup.
    directories = [directory, *directory.parents] if directory.is_dir() else [base]
    left: list[int] = []
    for each in directories:
        if base in (each, *each.parents):
            found = _left_in(each, limit, usage, droppable)
            if found is not None:
                left.append(found)
    return left


def _left_in(directory: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        bound = (directory / limit).read_text().strip()
        used = int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such controller here
    if bound == "max":
        return None
    return int(bound) - used + int(stat.get(droppable, 0))
