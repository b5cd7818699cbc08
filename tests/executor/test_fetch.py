"""`octavo fetch`: what an executor needs lies in the cache afterwards, and what is wrong is one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from executor.backends.cpu.backend import CpuBackend
from executor.fetch import main, parse_arguments
from executor.model import fingerprint
from executor.model.loader import load_model
from tests.executor.model.factories import create_tiny_model


def test_it_prints_the_directory_and_leaves_the_hash_of_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = create_tiny_model(tmp_path / "model")
    capsys.readouterr()
    assert main([str(model.directory), f"--cache-dir={tmp_path / 'cache'}"], {}) == 0
    assert capsys.readouterr().out == f"{model.directory}\n"
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    monkeypatch.setattr(fingerprint, "_digest", lambda weights: pytest.fail("an executor computes it again"))
    loaded = load_model(model.directory, CpuBackend(), tmp_path / "cache")
    assert loaded.tensors_digest == remembered.read_text()


def test_a_model_that_is_not_there_ends_it_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing", f"--cache-dir={tmp_path}"], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo fetch: no model 'nothing': ")
    assert captured.err.count("\n") == 1


def test_a_broken_model_ends_it_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = create_tiny_model(tmp_path / "model")
    (weights,) = model.directory.glob("*.safetensors")
    weights.write_bytes(b"\0" * 64)
    capsys.readouterr()
    assert main([str(model.directory), f"--cache-dir={tmp_path / 'cache'}"], {}) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("octavo fetch: ")
    assert weights.name in captured.err


def test_without_arguments_it_is_the_demo_model_and_the_cache_of_executors() -> None:
    config = parse_arguments([], {"XDG_CACHE_HOME": "/caches"})
    assert (config.model, config.cache_dir) == ("smollm2", Path("/caches/octavo"))


def test_the_command_line_starts_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "octavo.cli", "fetch", "nothing", f"--cache-dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("octavo fetch: no model 'nothing': ")
