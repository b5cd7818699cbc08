"""A client for a command: connected to the server that the user named, its errors turned into sentences.

The client library, and gRPC with it, is imported by whoever imports this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from octavo.cli.terminal import ExitCode, Failure
from octavo.client import Client, InvalidRequest, OctavoError, QueueFull, ServerUnavailable

_PATIENCE = 1.0  # seconds for an answer to "are you ready?"


@contextlib.contextmanager
def connected(address: str, timeout: float | None = None) -> Iterator[Client]:
    """A client whose failures become `Failure`."""
    try:
        with Client(address, timeout=timeout) as client:
            yield client
    except OctavoError as error:
        raise failure(error, address) from None


def failure(error: OctavoError, address: str) -> Failure:
    match error:
        case ServerUnavailable() if "failed to connect" in str(error):
            return Failure(f"no server at {address}; start one with `octavo serve`")
        case ServerUnavailable() if "Socket closed" in str(error) or "Connection reset" in str(error):
            return Failure(f"the server at {address} went away")
        case ServerUnavailable() if "none has joined yet" in str(error):
            return Failure(f"{error}; its model may still be loading: try again, or see `octavo load`")
        case InvalidRequest():
            return Failure(str(error), ExitCode.USAGE)
        case QueueFull():
            return Failure(f"{error}; try again in {error.retry_after:.1f} s")
    return Failure(str(error))


def is_serving(address: str) -> bool:
    """A server at the address would run a request now."""
    with Client(address) as client:
        try:
            return client.health(timeout=_PATIENCE)
        except OctavoError:
            return False
