"""Models that the tests of this folder share, made or fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.model.resolve import resolve_model
from tests.executor.model.factories import CONFIGS, TinyModel, create_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where a user's models lie too: the demo model is fetched once a machine."""
    return Path.home() / ".cache" / "octavo"


@pytest.fixture(scope="session")
def demo_directory(cache_dir: Path) -> Path:
    return resolve_model("smollm2", cache_dir, print).directory


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    return {kind: create_tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in CONFIGS}
