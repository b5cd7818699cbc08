"""The K/V budget on machines and in containers of all kinds, as their files tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.backends.base import KVCacheSpec, OutOfMemory
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.memory import SystemFiles, available_memory, kv_cache_blocks

MIB = 1 << 20


def machine(tmp_path: Path, membership: str | None = None, available: int = 1000 * MIB) -> SystemFiles:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available // 1024} kB\n")
    if membership is not None:
        (tmp_path / "proc/self/cgroup").write_text(membership)
    return SystemFiles(tmp_path / "proc", tmp_path / "cgroup")


def group(files: SystemFiles, path: str, **contents: object) -> None:
    directory = files.cgroup / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in contents.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == 1000 * MIB


def test_a_version_2_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    files = machine(tmp_path, "0::/app\n")
    group(files, "app", memory__max=300 * MIB, memory__current=120 * MIB)
    assert available_memory(files) == 180 * MIB


def test_a_version_2_parents_limit_counts(tmp_path: Path) -> None:
    files = machine(tmp_path, "0::/pod/app\n")
    group(files, "pod/app", memory__max="max", memory__current=10 * MIB)
    group(files, "pod", memory__max=200 * MIB, memory__current=150 * MIB)
    assert available_memory(files) == 50 * MIB


def test_no_limit_leaves_the_machine(tmp_path: Path) -> None:
    files = machine(tmp_path, "0::/app\n")
    group(files, "app", memory__max="max", memory__current=120 * MIB)
    assert available_memory(files) == 1000 * MIB


def test_cached_files_do_not_count_as_used(tmp_path: Path) -> None:
    files = machine(tmp_path, "0::/app\n")
    stat = f"anon 1\ninactive_file {90 * MIB}"
    group(files, "app", memory__max=300 * MIB, memory__current=120 * MIB, memory__stat=stat)
    assert available_memory(files) == 270 * MIB


def test_a_version_1_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    files = machine(tmp_path, "5:cpu,cpuacct:/app\n4:memory:/app\n")
    group(files, "memory/app", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=100 * MIB)
    assert available_memory(files) == 200 * MIB


def test_in_a_container_the_groups_path_is_the_hosts_and_its_files_stand_at_the_root(tmp_path: Path) -> None:
    files = machine(tmp_path, "4:memory:/docker/0123\n")
    group(files, "memory", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=100 * MIB)
    assert available_memory(files) == 200 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = machine(tmp_path, "0::/app\n")
    group(files, "app", memory__max=100 * MIB, memory__current=120 * MIB)
    assert available_memory(files) == 0


def test_blocks_fill_a_share_of_what_is_available(tmp_path: Path) -> None:
    assert kv_cache_blocks(3 * MIB, share=0.5, files=machine(tmp_path)) == 166


def test_blocks_fill_the_memory_asked_for(tmp_path: Path) -> None:
    assert kv_cache_blocks(3 * MIB, memory=100 * MIB, files=machine(tmp_path)) == 33


def test_more_memory_than_there_is_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"cache of 1\.953 GiB was asked for, but only 1000 MiB are available"):
        kv_cache_blocks(MIB, memory=2000 * MIB, files=machine(tmp_path))


def test_a_budget_below_two_blocks_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="takes 2 MiB, but the budget is 1 MiB"):
        kv_cache_blocks(MIB, memory=MIB, files=machine(tmp_path))


def test_a_cache_beyond_all_memory_is_out_of_memory() -> None:
    spec = KVCacheSpec(1, 1 << 40, 8, 16, 128, torch.float32)
    with pytest.raises(OutOfMemory, match=r"blocks needs 1\.311e\+05 TiB"):
        CpuBackend().allocate_kv_cache(spec)
