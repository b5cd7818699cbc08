"""Options of the kernels' tests: `pytest tests/kernels -m full` runs the cases that a short run leaves out."""

from __future__ import annotations

import pytest
import torch

FULL = "full"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{FULL}: every combination of sizes and formats; not run unless -m names it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FULL in str(config.getoption("markexpr")):
        return
    left_out = [item for item in items if item.get_closest_marker(FULL)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(FULL)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
