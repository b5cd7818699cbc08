"""What an installed package holds: every kernel source, and every package of the tree."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_kernel_source_is_package_data() -> None:
    patterns = SETUPTOOLS["package-data"]["executor.kernels"]
    assert SETUPTOOLS["package-dir"]["executor.kernels"] == "cuda"
    left_out = [path.name for path in (ROOT / "cuda").iterdir() if not any(fnmatch(path.name, p) for p in patterns)]
    assert left_out == []


def test_every_package_is_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts).removeprefix("proto.")
        for folder in ("executor", "scheduler", "proto/octavo")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(SETUPTOOLS["packages"]) == found | {"executor.kernels"}
