"""Addresses of executors, from targets that are resolved again and again.

A target is host:port; a name may stand for many addresses, and for others a second later (a scaled service, a headless
one). It knows nothing of what listens there. A failed or empty answer changes nothing: that a name server is away is no
reason to drop an executor.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

RESOLVE_PERIOD = 1.0  # seconds
RESOLVE_TIMEOUT = 5.0

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
    """Yields the set of addresses whenever it changes."""

    def __init__(self, targets: Sequence[str], resolve: Resolve = resolve_name, period: float = RESOLVE_PERIOD) -> None:
        """Raises BadTarget."""
        self._targets = [split_target(target) for target in targets]
        self._resolve = resolve
        self._period = period
        self._answers: dict[tuple[str, int], frozenset[str]] = {}  # the last good one of each target

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Never ends; an address is "host:port" with a numeric host."""
        known: frozenset[str] | None = None
        while True:
            await asyncio.gather(*(self._ask(target) for target in self._targets))
            addresses = frozenset(address for answer in self._answers.values() for address in answer)
            if addresses != known:
                known = addresses
                yield addresses
            await asyncio.sleep(self._period)

    async def _ask(self, target: tuple[str, int]) -> None:
        host, port = target
        try:
            ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            self._answers[target] = frozenset([join_address(host, port)])
            return
        try:
            hosts = await asyncio.wait_for(self._resolve(host, port), RESOLVE_TIMEOUT)
        except (OSError, TimeoutError):
            return
        if hosts:
            self._answers[target] = frozenset(join_address(found, port) for found in hosts)
