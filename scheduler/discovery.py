"""Addresses of executors, from targets that are resolved again and again.

A target is host:port; a name may stand for many addresses, and for others a second later (a scaled service, a headless
one). It knows nothing of what listens there. A failed or empty answer changes nothing: that a name server is away is no
reason to drop an executor.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

RESOLVE_PERIOD = 1.0  # seconds

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> addresses, IPv6 ones without brackets


class BadTarget(ValueError):
    """Not host:port."""


def split_target(target: str) -> tuple[str, int]:
    """("host", port); IPv6 hosts stand in brackets. Raises BadTarget."""
    host, _, port = target.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadTarget(f"{target!r}: an IPv6 address stands in brackets, as [::1]:50052")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadTarget(f"{target!r} is not HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve_name(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, in a stable order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(info[4][0]) for info in found})


class Discovery:
    """Yields the set of addresses whenever it changes. Each target is asked for on its own, and not again before it
    has answered: a name server that hangs delays nobody else, and occupies one thread."""

    def __init__(self, targets: Sequence[str], resolve: Resolve = resolve_name, period: float = RESOLVE_PERIOD) -> None:
        """Raises BadTarget."""
        self._targets = [split_target(target) for target in targets]
        self._resolve = resolve
        self._period = period
        self._answers: dict[tuple[str, int], frozenset[str]] = {}  # the last good one of each target

    async def changes(self) -> AsyncGenerator[frozenset[str], None]:
        """Never ends; an address is "host:port" with a numeric host. Close it when done."""
        answered = asyncio.Event()
        asking = [asyncio.create_task(self._keep_asking(target, answered)) for target in self._targets]
        known: frozenset[str] = frozenset()
        try:
            while True:
                await answered.wait()
                answered.clear()
                addresses = frozenset(address for answer in self._answers.values() for address in answer)
                if addresses != known:
                    known = addresses
                    yield addresses
        finally:
            for task in asking:
                task.cancel()

    async def _keep_asking(self, target: tuple[str, int], answered: asyncio.Event) -> None:
        host, port = target
        if is_numeric(host):
            self._answers[target] = frozenset([join_address(host, port)])
            answered.set()
            return
        while True:
            try:
                hosts = await self._resolve(host, port)
            except (OSError, UnicodeError):  # no answer; or no name that DNS could have
                hosts = ()
            if hosts:
                self._answers[target] = frozenset(join_address(found, port) for found in hosts)
                answered.set()
            await asyncio.sleep(self._period)


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
