"""What happens where the library, or the level asked for, is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import torch

from executor.backends.cpu import platform
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.native import kernels, library
from executor.backends.cpu.native.library import Level, Library, NoLibrary, open_library
from tests.executor.native.factories import Span, Step


def missing() -> Library:
    raise NoLibrary("the native kernels were not built: the install found no C++ compiler")


def test_the_baseline_runs_everywhere() -> None:
    assert open_library().levels[0] == Level.BASELINE


def test_the_threads_are_those_of_torch() -> None:
    assert open_library().parallel is not None


def test_without_the_library_plain_torch_serves_and_the_log_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "open_library", missing)
    with structlog.testing.capture_logs() as log:
        opened = platform.open_platform("float32", deterministic=False)
    assert [(entry["log_level"], entry["reason"]) for entry in log] == [
        ("warning", "the native kernels were not built: the install found no C++ compiler")
    ]
    step = Step([Span(40, 7), Span(20)])
    backend = step.backend()
    assert (opened.backend.native_missing, backend.native_missing) == (log[0]["reason"], log[0]["reason"])
    step.assert_right(backend)


def test_a_folder_without_the_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(NoLibrary, match="no C\\+\\+ compiler"):
        open_library()


def test_a_level_that_this_cpu_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_library()
    monkeypatch.setattr(
        kernels, "open_library", lambda: Library(opened.calls, (Level.BASELINE, Level.AVX2), opened.parallel)
    )
    with pytest.raises(NoLibrary, match="does not run AVX512; it runs BASELINE, AVX2"):
        CpuBackend(torch.float32, level=Level.AVX512)
