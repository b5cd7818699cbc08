"""Memory that is left, read from a proc and a sys of our own."""

from __future__ import annotations

from pathlib import Path

from executor.memory import available_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(gib: int, cgroup: str) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {gib << 20} kB\n", "proc/self/cgroup": cgroup}


def v2(directory: str, limit: str, used: int, droppable: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{directory}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": str(used),
        f"{base}/memory.stat": f"anon 1\ninactive_file {droppable}\n",
    }


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    root = write(tmp_path, {**machine(8, "0::/app\n"), **v2("app", "max\n", GIB)})
    assert available_memory(root) == 8 * GIB


def test_a_cgroups_limit_counts_less_what_is_used_and_cannot_be_dropped(tmp_path: Path) -> None:
    root = write(tmp_path, {**machine(8, "0::/app\n"), **v2("app", f"{4 * GIB}\n", 2 * GIB, GIB)})
    assert available_memory(root) == 3 * GIB


def test_a_limit_higher_up_counts_too(tmp_path: Path) -> None:
    files = {**machine(8, "0::/pod/app\n"), **v2("pod/app", "max", GIB), **v2("pod", str(2 * GIB), GIB)}
    assert available_memory(write(tmp_path, files)) == GIB


def test_inside_a_container_the_mounts_root_is_the_cgroup(tmp_path: Path) -> None:
    root = write(tmp_path, {**machine(8, "0::/host/path\n"), **v2("", str(2 * GIB), GIB)})
    assert available_memory(root) == GIB


def test_the_old_hierarchy_is_read_too(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/app"
    files = {
        **machine(8, "3:cpu:/app\n5:memory:/app\n"),
        f"{base}/memory.limit_in_bytes": str(4 * GIB),
        f"{base}/memory.usage_in_bytes": str(GIB),
        f"{base}/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    assert available_memory(write(tmp_path, files)) == 3 * GIB + GIB // 2


def test_a_cgroup_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = write(tmp_path, {**machine(8, "0::/app\n"), **v2("app", str(GIB), 2 * GIB)})
    assert available_memory(root) == 0
