"""Who calls: bearer tokens from a file, and an interceptor that lets nobody pass without one.

A line of the file is `TENANT TOKEN`, or `TENANT TOKEN admin`; in place of the token may stand `sha256:` and its digest
in hex. The tenant of a call is that of its token. What concerns all tenants (load, blocks, drain) takes a token marked
admin; health is open to all. The file is read again when it changes; one that cannot be used leaves the tokens before
it in force.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import grpc
import structlog

from scheduler.caller import Caller, current_caller
from scheduler.service import Context
from scheduler.statuses import NotPermitted, Unauthenticated, status_of

MIN_TOKEN_CHARACTERS = 16
ADMIN_METHODS = frozenset({"Drain", "GetLoad", "WatchLoad", "WatchBlocks"})
OPEN_SERVICES = ("/grpc.health.v1.",)
DIGEST = "sha256:"


class BadTokens(Exception):
    """A file of tokens that cannot be used; the message names the line, and never a token."""


class Tokens:
    """Those of a file."""

    def __init__(self, path: Path) -> None:
        """Raises BadTokens."""
        self._path = path
        self._known: list[tuple[bytes, Caller]] = []
        self._stamp: tuple[int, int, int] | None = None
        self._log = structlog.get_logger("authentication")
        self._refresh(first=True)

    def caller(self, token: str) -> Caller | None:
        """All are compared, whole and as digests: how long it takes tells nothing of them."""
        self._refresh()
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for known, caller in self._known:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _refresh(self, first: bool = False) -> None:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._known = read_tokens(self._path.read_text("utf-8"), str(self._path))
        except OSError as error:
            self._refuse(BadTokens(f"{self._path} cannot be read: {error.strerror}"), first)
        except (BadTokens, UnicodeDecodeError) as error:
            self._refuse(error if isinstance(error, BadTokens) else BadTokens(f"{self._path} is no text"), first)

    def _refuse(self, error: BadTokens, first: bool) -> None:
        if first:
            raise error
        self._log.warning("tokens_not_read", why=str(error))


def read_tokens(text: str, name: str) -> list[tuple[bytes, Caller]]:
    """Digests of the tokens, and whom each stands for. Raises BadTokens."""
    known: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) not in (2, 3) or words[2:] not in ([], ["admin"]):
            raise BadTokens(f"{name}, line {number}: not of the form TENANT TOKEN [admin]")
        digest = _digest(words[1])
        if digest is None:
            raise BadTokens(
                f"{name}, line {number}: a token has {MIN_TOKEN_CHARACTERS} characters at least, or is {DIGEST}HEX"
            )
        if digest in known:
            raise BadTokens(f"{name}, line {number}: the token of another line")
        known[digest] = Caller(words[0], is_admin=len(words) == 3)
    if not known:
        raise BadTokens(f"{name} holds no token")
    return list(known.items())


def _digest(word: str) -> bytes | None:
    if word.startswith(DIGEST):
        try:
            digest = bytes.fromhex(word.removeprefix(DIGEST))
        except ValueError:
            return None
        return digest if len(digest) == hashlib.sha256().digest_size else None
    return hashlib.sha256(word.encode()).digest() if len(word) >= MIN_TOKEN_CHARACTERS else None


class _Handler(Protocol):
    """What is used of a grpc.RpcMethodHandler, a named tuple."""

    request_streaming: bool
    response_streaming: bool

    def _replace(self, **fields: object) -> _Handler: ...


class Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sets `current_caller` for the handler, which runs in the same task, or puts a refusal in its place."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        method = str(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(OPEN_SERVICES):
            return handler
        try:
            current_caller.set(self._admit(method, handler_call_details.invocation_metadata or ()))
        except (Unauthenticated, NotPermitted) as error:
            return _refusing(handler, error)
        return handler

    def _admit(self, method: str, metadata: tuple[tuple[str, str | bytes], ...]) -> Caller:
        """Raises Unauthenticated or NotPermitted."""
        given = [str(value) for key, value in metadata if key == "authorization"]
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("a bearer token is needed: metadata `authorization: Bearer TOKEN`")
        caller = self._tokens.caller(token.strip())
        if caller is None:
            raise Unauthenticated("the bearer token is not known")
        name = method.rpartition("/")[2]
        if name in ADMIN_METHODS and not caller.is_admin:
            raise NotPermitted(f"{name} takes a token marked admin")
        return caller


def _refusing(handler: _Handler, error: Exception) -> _Handler:
    async def refuse(request: object, context: Context) -> None:
        status = status_of(error)
        await context.abort(status.code, status.message, status.trailing_metadata())

    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    return handler._replace(**{kind: refuse})
