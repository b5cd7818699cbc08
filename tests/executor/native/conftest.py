"""Threads of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
