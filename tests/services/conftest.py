"""The demo model's own tokenizer, fetched and converted once for all tests and for the user's own runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from executor.model.demo import demo_model
from scheduler.tokenizer import TOKENIZER_FILES


@pytest.fixture(scope="session")
def smollm2_files() -> Mapping[str, bytes]:
    """By name, as an executor would send them."""
    folder = demo_model(Path.home() / ".cache" / "octavo", lambda line: print(line, file=sys.stderr))
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
