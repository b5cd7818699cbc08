"""What all tests share: one thread for torch, here and in the processes that tests start."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports torch. Small matrices on many threads are slower, and tests share a machine."""
    os.environ["OMP_NUM_THREADS"] = "1"
