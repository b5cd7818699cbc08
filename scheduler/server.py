"""The scheduler's process: listens, serves until told to stop, and drains.

Owns the order of things. Start: listen, then the engine, then readiness. Stop on the first SIGTERM or SIGINT:
NOT_SERVING, new requests UNAVAILABLE, running streams finish within the grace period, exit code 0; a second signal
exits at once. Loss of the only executor, where the configuration says so: streams end with the reason, exit code 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from octavo.tls import ServerFiles, server_credentials
from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2_grpc import add_GenerationServicer_to_server

from scheduler.authentication import Authenticate, Tokens
from scheduler.config import SchedulerConfig
from scheduler.inspection import Inspector
from scheduler.malformed import RefuseMalformed
from scheduler.outputs import ExecutorLost, ServingEngine, TicketT
from scheduler.pace import Pace
from scheduler.readiness import Readiness
from scheduler.request_stream import Log
from scheduler.service import GenerationService
from scheduler.web import WebServer

if TYPE_CHECKING:
    from scheduler.tracing import Tracing

LAST_WORDS_SECONDS = 2.0  # for streams to end, once nothing more will come
PARENT_POLL_SECONDS = 0.5
MAX_PENDING_CALLS = 100_000  # that have arrived and were not looked at yet
MAX_PENDING_SECONDS = 3600  # until they are; a client has its own deadline


class ExitCode(enum.IntEnum):
    """Of the process. argparse's own 2 means a bad flag."""

    OK = 0
    FAILURE = 1
    EXECUTOR_LOST = 3


class CannotListen(Exception):
    """The address cannot be listened on; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When a connection that says nothing is given up, and its requests with it."""

    silence_ms: int = 30_000  # before it is asked
    patience_ms: int = 10_000  # for the answer


class Server:
    """Everything around one engine on one event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: ServingEngine[TicketT],
        keepalive: Keepalive | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._log: Log = structlog.get_logger("server")
        self._run_engine = engine.run
        metrics = engine.metrics
        self._pace = Pace()
        inspector = Inspector(engine.inspect)
        service = GenerationService(
            engine,
            metrics,
            queue_timeout=config.queue_timeout,
            stall_timeout=config.stall_timeout,
            max_tenant_requests=config.max_tenant_requests,
            share_prefixes=config.share_prefixes,
            pace=self._pace,
            inspector=inspector,
            tracing=tracing,
            on_drain=self.stop,
        )
        self._service = service
        self._readiness = Readiness(engine, service, on_tick=lambda: metrics.refresh(engine.load(), self._pace.pause))
        self._tracing = tracing
        self.web: WebServer | None = None
        if config.http_port is not None:
            self.web = WebServer(metrics, inspector, self._pace, config.host, config.http_port, names=config.http_names)
        self._stop = asyncio.Event()
        self.port = 0  # listened on, once `start` returned
        options = _channel_options(config, keepalive or Keepalive())
        interceptors: list[grpc.aio.ServerInterceptor] = [RefuseMalformed()]
        if config.tokens_file is not None:
            interceptors.insert(0, Authenticate(Tokens(config.tokens_file)))
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._credentials = _credentials(config, self._log)
        self.health_port = 0
        self._health_server: grpc.aio.Server | None = None
        if config.health_port is not None:
            self._health_server = grpc.aio.server(options=options)
            health_pb2_grpc.add_HealthServicer_to_server(self._readiness.servicer, self._health_server)
        add_GenerationServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._readiness.servicer, self._server)
        if config.reflection:
            names = [
                generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ]
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens. Raises CannotListen."""
        config = self._config
        self.port = _bind(self._server, config.host, config.port, self._credentials)
        if self._health_server is not None:
            self.health_port = _bind(self._health_server, config.host, config.health_port or 0)
            await self._health_server.start()
        if self.web is not None:
            await self._start(self.web)
        await self._server.start()
        self._log.info("listening", host=config.host, port=self.port, tls=self._credentials is not None)
        if config.tokens_file is not None and self._credentials is None and not _is_local(config.host):
            self._log.warning("tokens_in_clear", why="whoever is on the way can read them; see --tls-cert")

    async def _start(self, web: WebServer) -> None:
        try:
            await web.start()
        except OSError as error:
            raise CannotListen(f"cannot serve HTTP on port {web.port}: {error.strerror}") from error
        self._log.info("serving_http", url=web.url)

    def stop(self) -> None:
        """Begins the drain."""
        self._stop.set()

    async def run(self) -> ExitCode:
        """From after `start` to the end of the process's work."""
        pace = asyncio.create_task(self._pace.run(), name="pace")
        readiness = asyncio.create_task(self._readiness.run())
        engine = asyncio.create_task(self._run_engine())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({engine, stop, readiness}, return_when=asyncio.FIRST_COMPLETED)
            code = ExitCode.OK
            if not (engine.done() or readiness.done()):
                await self._drain()
            if engine.done() or readiness.done():  # or meanwhile: a loss is told, whoever asked to stop
                code = await self._fail(engine, readiness)
        finally:
            for task in (pace, readiness, engine, stop):
                task.cancel()
            await asyncio.gather(pace, readiness, engine, stop, return_exceptions=True)
            await self._server.stop(LAST_WORDS_SECONDS)
            if self._health_server is not None:
                await self._health_server.stop(None)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            if self.web is not None:
                await self.web.stop()
        self._log.info("stopped", code=int(code))
        return code

    async def _drain(self) -> None:
        self._log.info("draining", grace_seconds=self._config.grace_period)
        self._service.drain()
        await self._readiness.update()
        if not await self._idle_within(self._config.grace_period):
            self._log.warning("grace_period_over")
            self._service.abort_all()
            await self._idle_within(LAST_WORDS_SECONDS)

    async def _fail(self, engine: asyncio.Task[None], readiness: asyncio.Task[None]) -> ExitCode:
        """The engine is gone, and has ended its streams with the reason; or a task died of a fault of ours."""
        error = (engine if engine.done() else readiness).exception()
        if isinstance(error, ExecutorLost):
            self._log.error("executor_lost", why=error.reason)
        else:
            self._log.error("internal_error", exc_info=error)
        self._service.drain()
        if not readiness.done():
            await self._readiness.update()
        await self._idle_within(LAST_WORDS_SECONDS)
        return ExitCode.EXECUTOR_LOST if isinstance(error, ExecutorLost) else ExitCode.FAILURE

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._service.wait_idle()
            return True
        return False


async def serve(config: SchedulerConfig, engine: ServingEngine[TicketT], tracing: Tracing | None = None) -> ExitCode:
    """A whole life of the process, signals included."""
    server = Server(config, engine, tracing=tracing)
    stop_with_signals(server.stop)
    await server.start()
    parent = asyncio.create_task(_stop_with_parent(server.stop)) if config.exit_with_parent else None
    try:
        return await server.run()
    finally:
        if parent is not None:
            parent.cancel()


def stop_with_signals(stop: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT stops in good order, the second at once."""
    loop = asyncio.get_running_loop()
    stopping = False

    def on_signal(number: int) -> None:
        nonlocal stopping
        if stopping:
            os._exit(128 + number)
        stopping = True
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def _stop_with_parent(stop: Callable[[], None]) -> None:
    """An orphan's parent is another process."""
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(PARENT_POLL_SECONDS)  # there is no event to wait for
    structlog.get_logger("server").warning("parent_gone")
    stop()


def _credentials(config: SchedulerConfig, log: Log) -> grpc.ServerCredentials | None:
    """What clients are shown; None: no TLS. Raises BadTLSFiles."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_credentials(
        ServerFiles(config.tls_cert, config.tls_key, config.tls_client_ca),
        lambda error: log.warning("certificates_not_read", why=str(error)),
    )


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """The port it listens on. Raises CannotListen."""
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        if credentials is None:
            bound = int(server.add_insecure_port(address))
        else:
            bound = int(server.add_secure_port(address, credentials))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise CannotListen(f"cannot listen on {address}: the port is taken, or the address is not this machine's")
    return bound


def _is_local(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", "[::1]")


def _channel_options(config: SchedulerConfig, keepalive: Keepalive) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
        ("grpc.keepalive_time_ms", keepalive.silence_ms),
        ("grpc.keepalive_timeout_ms", keepalive.patience_ms),
        # A ping that is on its way already serves as keepalive, with a bound of its own: 60 s by default.
        ("grpc.http2.ping_timeout_ms", keepalive.patience_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping as often as every 10 s.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A burst is refused by the queue's bounds, with a reason and a time to come back; beyond this one, from 1000
        # calls on or after 30 s of a loop that is late, gRPC itself would cancel some with neither.
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ]
