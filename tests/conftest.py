"""What all tests share: one thread for torch, here and in the processes that tests start, and one real server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports torch. Small matrices on many threads are slower, and tests share a machine."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def no_logs() -> Iterator[None]:
    """For tests of what a command prints, where the server runs in the same process and would print its log between."""
    import structlog

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server of the demo model in float32: both processes, as `octavo serve` starts them."""
    from tests.e2e.servers import Running

    with Running("serve", "--port=0", "--dtype=float32", "--threads=1", "--kv-cache-memory=256M") as running:
        yield running.address
        running.interrupt()
        assert running.end() == 0
