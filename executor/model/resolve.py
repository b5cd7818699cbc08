"""From what a user calls a model to a local directory in Hugging Face's form.

In this order: `smollm2` (the demo model), a directory, a .gguf file, a hub id. Only this module decides among them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from executor.model import demo, gguf
from executor.model.cache import build_once
from executor.model.errors import NO_PLACE, BrokenModel, ModelNotFound, UnusableCache

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_TIMEOUT = 10.0  # seconds for the first answer


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that lies on this machine."""

    name: str  # what clients are told
    directory: Path
    made_in: Path | None = None  # part of the cache that is made again once it is deleted; None: the user's own model

    def complaint(self, error: BrokenModel) -> str:
        """The error as a sentence for the user, with what can be done about it."""
        return f"{error}; delete {self.made_in} to fetch it again" if self.made_in else str(error)


def resolve_model(model: str, cache_dir: Path, progress: Callable[[str], None]) -> ResolvedModel:
    """Finds, fetches or converts the model; `progress` hears of what takes time.

    Raises ModelNotFound with everything that was tried, UnsupportedModel, BrokenModel, or UnusableCache.
    """
    if model == demo.NAME:
        directory = demo.demo_model(cache_dir, progress)
        return ResolvedModel("SmolLM2-135M-Instruct", directory, made_in=directory)
    path = _expanded(model)
    if model and _is(path, Path.is_dir):  # the empty name is no name of the working directory
        if not (path / "config.json").is_file():
            raise BrokenModel(f"the directory {path} holds no config.json")
        return ResolvedModel(path.resolve().name, path.resolve())
    if path.suffix == ".gguf" and _is(path, Path.is_file):
        directory = _converted(path.resolve(), cache_dir, progress)
        return ResolvedModel(path.stem, directory, made_in=directory)
    if HUB_ID.fullmatch(model):
        directory = _from_hub(model, cache_dir, progress)
        # The files of a snapshot are links; what they lead to lies beside the snapshots.
        return ResolvedModel(model, directory, made_in=cache_dir / "hub" / f"models--{model.replace('/', '--')}")
    raise ModelNotFound(
        f"no model {model!r}: it is not {demo.NAME!r}, not a directory, not a .gguf file, and not a hub id (owner/name)"
    )


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # there is no such user
        return Path(model)


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    """Whether the path is of the kind, as far as can be seen: a name too long, or in a closed place, is not."""
    try:
        return kind(path)
    except OSError:
        return False


def _converted(path: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The converted file's directory; a file that changes is another one."""
    status = path.stat()
    identity = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{gguf.CONVERSION}".encode()).hexdigest()
    return build_once(
        cache_dir / f"{path.stem}-{identity[:16]}", lambda directory: gguf.convert(path, directory, progress)
    )


def _from_hub(model: str, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    place = cache_dir / "hub"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableCache(cache_dir, error) from error
    progress(f"fetching {model} from the hub")
    try:
        directory = snapshot_download(model, cache_dir=place, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT)
    except Exception as error:  # the hub's client raises its own, its transport's and the file system's
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            raise UnusableCache(cache_dir, error) from error
        raise ModelNotFound(
            f"no model {model!r}: it is not {demo.NAME!r}, not a directory, not a .gguf file, and the hub did not "
            f"give it ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    return Path(directory)
