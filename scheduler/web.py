"""The scheduler's HTTP port: what it serves, to whom, and under which headers.

One application on the process's own event loop, for people and for Prometheus; it changes nothing. It asks nobody who
they are, so a browser must not become a bridge to it: names that anybody can point at this machine (DNS rebinding) and
pages of other sites are refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.exposition import choose_encoder

from scheduler.inspection import Inspector
from scheduler.metrics import Metrics
from scheduler.pace import Pace
from scheduler.viewers import Viewers

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Server": "octavo",
}
# Names that no stranger can register.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".cluster.local", ".home.arpa", ".test")
PAGE_FOLDER = Path(__file__).parent / "page"
PAGE = (
    ("/", "index.html", "text/html"),
    ("/page.css", "page.css", "text/css"),
    ("/page.js", "page.js", "text/javascript"),
    ("/icon.svg", "icon.svg", "image/svg+xml"),
)
KEEPALIVE_SECONDS = 15.0  # of a connection that asks for nothing
SHUTDOWN_SECONDS = 1.0


class WebServer:
    """Serves `host:port` between `start` and `stop`; with port 0, whichever `port` then names."""

    def __init__(
        self, metrics: Metrics, inspector: Inspector, pace: Pace, host: str, port: int, *, names: bool = False
    ) -> None:
        """`names`: the page shows request ids and tenants."""
        self._host = host.strip("[]")
        self.port = port
        self._app = web.Application(middlewares=[self._guard])
        self._metrics = metrics
        self._measuring = asyncio.Lock()
        self._app.router.add_get("/metrics", self._expose)
        self._app.router.add_get("/healthz", _healthz)
        self.viewers = Viewers(inspector, pace, names=names, headers=HEADERS)
        self._app.router.add_get("/events", self.viewers.serve)
        for path, file, content_type in PAGE:
            self._app.router.add_get(path, _file(PAGE_FOLDER / file, content_type))
        self._app.on_shutdown.append(self._end_streams)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """For a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    async def start(self) -> None:
        """Raises OSError where the port is taken."""
        self._runner = web.AppRunner(
            self._app, access_log=None, logger=_logger(),
            keepalive_timeout=KEEPALIVE_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS,
        )  # fmt: skip
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _end_streams(self, app: web.Application) -> None:
        self.viewers.close()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _expose(self, request: web.Request) -> web.Response:
        """In the form that is asked for. With many executors the text takes tens of milliseconds: beside the loop, and
        one at a time."""
        encode, content_type = choose_encoder(",".join(request.headers.getall("Accept", [])))
        async with self._measuring:
            text = await asyncio.to_thread(encode, self._metrics.registry)
        response = web.Response(body=text, headers={"Content-Type": content_type})
        response.enable_compression()
        return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses strangers' names and pages, and sets the headers of all answers but streams, which set their own."""
        response: web.StreamResponse
        if not is_private_name(request.headers.get("Host", ""), self._host):
            response = web.Response(status=421, text="ask by address, or by a name of the private network\n")
        elif is_foreign(request):
            response = web.Response(status=403, text="other sites' pages are not answered\n")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:  # no such path or method
                response = web.Response(status=error.status, text=f"{error.reason}\n")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response


def _logger() -> logging.Logger:
    """aiohttp's own would log an error with its trace for every sender of bytes that are no HTTP, or too many."""
    logger = logging.getLogger("aiohttp.server.octavo")
    logger.addFilter(_is_fault_of_ours)
    return logger


def _is_fault_of_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _file(path: Path, content_type: str) -> Handler:
    """Read once: the page is a few files of some kilobytes."""
    body = path.read_bytes()

    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return serve


async def _healthz(request: web.Request) -> web.Response:
    """The event loop turns; whether requests would run is the health service's to say, over gRPC."""
    return web.Response(text="ok\n")


def is_private_name(host: str, own: str) -> bool:
    """The Host header is an address, the configured name, or one that resolves in private networks alone."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.lower().removesuffix(".")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        labels = name.split(".")
        return bool(name) and (name == own.lower() or len(labels) == 1 or f".{name}".endswith(PRIVATE_SUFFIXES))
    return True


def is_foreign(request: web.Request) -> bool:
    """A browser asks on behalf of another site's page. To follow a link from there is fine."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    return site in ("cross-site", "same-site") and request.headers.get("Sec-Fetch-Mode") != "navigate"
