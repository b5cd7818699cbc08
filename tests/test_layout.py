"""The rules on who imports whom, and on what lies where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imported_modules(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in the file it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
    return names


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]


def test_import_contracts_hold() -> None:
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_core_imports_the_standard_library_alone() -> None:
    foreign = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources("scheduler/core")
        for name in imported_modules(path)
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("scheduler.core")
    }
    assert foreign == set()


@pytest.mark.parametrize("module", ["asyncio", "logging", "os", "random", "socket", "threading", "time"])
def test_core_is_pure(module: str) -> None:
    assert [path.name for path in sources("scheduler/core") if module in imported_modules(path)] == []


def test_only_the_edges_import_the_wire_format() -> None:
    service = {"service.py", "messages.py", "request_stream.py", "validation.py"}
    edges = {f"scheduler/{name}" for name in ("wire.py", "server.py", "executor_client.py", *service)}
    edges |= {f"executor/{name}" for name in ("wire.py", "service.py", "server.py")}
    edges |= {f"proto/octavo/{name}" for name in ("blocks.py", "client.py", "request.py", "results.py")}
    knowing = {
        str(path.relative_to(ROOT))
        for path in sources("scheduler", "executor", "proto/octavo")
        if any(name.startswith("octavo.v1") for name in imported_modules(path))
    }
    assert knowing <= edges


def test_one_module_of_each_process_imports_opentelemetry() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in sources("scheduler", "executor", "proto/octavo")
        if any(name.startswith("opentelemetry") for name in imported_modules(path))
    }
    assert importing == {"scheduler/tracing.py", "executor/tracing.py"}


def test_the_command_line_imports_neither_process() -> None:
    imported = {name.partition(".")[0] for path in sources("proto/octavo/cli") for name in imported_modules(path)}
    assert imported.isdisjoint({"scheduler", "executor"})


def test_the_folder_of_kernels_is_no_package() -> None:
    """It would shadow NVIDIA's `cuda` for whoever starts Python at the root."""
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_the_readme_and_ci_name_the_same_test_command() -> None:
    command = "pip install -e '.[cpu,dev]' && pytest"
    assert f"\n    {command}" in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()
