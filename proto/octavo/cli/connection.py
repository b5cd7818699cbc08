"""A client for a command: connected to the server that the user named, its errors turned into sentences.

The client library, and gRPC with it, is imported by whoever imports this module.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from typing import TypedDict

from octavo.cli.terminal import ExitCode, Failure
from octavo.client import (
    AccessDenied,
    BadTLSFiles,
    Client,
    ClientFiles,
    InvalidRequest,
    OctavoError,
    QueueFull,
    ServerUnavailable,
)

_PATIENCE = 1.0  # seconds for an answer to "are you ready?"


class Access(TypedDict):
    """What clients show and trust, by their keywords."""

    tls: ClientFiles | None
    tls_name: str | None
    token: str | None


def access_of(options: Namespace) -> Access:
    """From flags, the token also from the environment. Raises Failure."""
    files = ClientFiles(options.tls_ca, options.tls_cert, options.tls_key)
    tls = options.tls or options.tls_name is not None or files != ClientFiles()
    token: str | None = os.environ.get("OCTAVO_TOKEN")
    if options.token_file is not None:
        try:
            token = options.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(f"{options.token_file} cannot be read: {error}", ExitCode.USAGE) from None
    return {"tls": files if tls else None, "tls_name": options.tls_name, "token": token or None}


@contextlib.contextmanager
def connected(options: Namespace) -> Iterator[Client]:
    """A client of the server that the flags name, whose failures become `Failure`."""
    try:
        with Client(options.server, timeout=options.timeout, **access_of(options)) as client:
            yield client
    except OctavoError as error:
        raise failure(error, options.server) from None
    except BadTLSFiles as error:
        raise Failure(str(error), ExitCode.USAGE) from None


def failure(error: OctavoError, address: str) -> Failure:
    match error:
        case ServerUnavailable() if "CERTIFICATE_VERIFY_FAILED" in str(error) or "Hostname Verification" in str(error):
            return Failure(f"the certificate of {address} is not one to trust; see --tls-ca and --tls-name")
        case ServerUnavailable() if "WRONG_VERSION_NUMBER" in str(error):
            return Failure(f"the server at {address} speaks no TLS")
        case AccessDenied():
            return Failure(f"{error}; see --token-file")
        case ServerUnavailable() if "failed to connect" in str(error) and "Socket closed" in str(error):
            return Failure(f"{address} closes connections that are not encrypted: see --tls")
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
