"""TLS from files that may be replaced while a process runs: what a server shows, what a client trusts and shows.

Certificates are renewed by writing new files; every connection made after that uses them, and none is restarted for it.
Files that cannot be used leave those before them in force, since a renewal writes one file after the other; at the
start they are an error.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

_Stamp = tuple[tuple[int, int, int] | None, ...]


class BadTLSFiles(Exception):
    """Files that TLS cannot use; the message is a sentence that names them."""


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """PEM files of a server."""

    cert: Path  # its certificate, and those between it and the root
    key: Path
    client_ca: Path | None = None  # roots of clients' certificates; None: clients show none


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """PEM files of a client."""

    ca: Path | None = None  # roots of servers' certificates; None: the system's
    cert: Path | None = None  # its own, where the server asks for one
    key: Path | None = None


def server_credentials(
    files: ServerFiles, tell: Callable[[BadTLSFiles], None] = lambda error: None
) -> grpc.ServerCredentials:
    """Read anew for each connection where they have changed; `tell` hears, on a thread of gRPC's, of files that cannot
    be used. Raises BadTLSFiles at the start."""
    paths = (files.cert, files.key, files.client_ca)
    stamp = _stamp(paths)
    first = _server_configuration(files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal stamp
        now = _stamp(paths)
        if now == stamp:
            return None
        stamp = now
        try:
            return _server_configuration(files)
        except BadTLSFiles as error:
            tell(error)
            return None

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=files.client_ca is not None)


class ClientCredentials:
    """Of connections that are made now."""

    def __init__(self, files: ClientFiles) -> None:
        """Raises BadTLSFiles."""
        self._files = files
        self._paths = (files.ca, files.cert, files.key)
        self._stamp = _stamp(self._paths)
        self._current = _channel_credentials(files)

    def current(self) -> grpc.ChannelCredentials:
        """The same object for as long as the files are the same, or cannot be used."""
        now = _stamp(self._paths)
        if now != self._stamp:
            self._stamp = now
            with contextlib.suppress(BadTLSFiles):  # a connection that fails with the old ones says so
                self._current = _channel_credentials(self._files)
        return self._current


def _server_configuration(files: ServerFiles) -> grpc.ServerCertificateConfiguration:
    _check_pair(files.cert, files.key)
    roots = None if files.client_ca is None else _roots(files.client_ca)
    return grpc.ssl_server_certificate_configuration(((files.key.read_bytes(), files.cert.read_bytes()),), roots)


def _channel_credentials(files: ClientFiles) -> grpc.ChannelCredentials:
    roots = None if files.ca is None else _roots(files.ca)
    if files.cert is None and files.key is None:
        return grpc.ssl_channel_credentials(roots)
    if files.cert is None or files.key is None:
        raise BadTLSFiles("a certificate needs its key, and a key its certificate")
    _check_pair(files.cert, files.key)
    return grpc.ssl_channel_credentials(roots, files.key.read_bytes(), files.cert.read_bytes())


def _check_pair(cert: Path, key: Path) -> None:
    for path in (cert, key):
        _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise BadTLSFiles(f"{cert} and {key} are no certificate and its key: {error}") from None


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the key is encrypted")


def _roots(path: Path) -> bytes:
    pem = _read(path)
    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise BadTLSFiles(f"{path} holds no certificates: {error}") from None
    return pem


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadTLSFiles(f"{path} cannot be read: {error.strerror}") from None


def _stamp(paths: tuple[Path | None, ...]) -> _Stamp:
    """Differs once a file was replaced, through a link too."""

    def of(path: Path | None) -> tuple[int, int, int] | None:
        try:
            status = path.stat() if path is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)

    return tuple(of(path) for path in paths)
