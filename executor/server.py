"""The executor's process: one gRPC server from start to stop, and the model that comes in while it serves.

Owns the order of things: listen, load on a thread, warm up, be ready, drain, stop. Health answers from the first
moment: `liveness` is SERVING while the event loop turns, `octavo.v1.Executor` and "" once a warm-up step succeeded and
until a drain begins. Lines to stdout tell the process that started this one: listening, progress, ready. Nothing here
imports torch, which takes seconds: the thread that loads does.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from octavo.tls import BadTLSFiles, ServerFiles, server_credentials
from octavo.v1 import executor_pb2, executor_pb2_grpc

from executor.config import ExecutorConfig, StartupError, format_address
from executor.identity import OnlyFrom
from executor.loaded import Loaded, Loader
from executor.service import ExecutorService, ServiceOptions
from executor.step_thread import StepThread

if TYPE_CHECKING:
    from executor.tracing import Tracing

SERVICE = executor_pb2.DESCRIPTOR.services_by_name["Executor"].full_name
LIVENESS = "liveness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LAST_WORDS = 1.0  # seconds for statuses to reach the peers at the end


async def serve(config: ExecutorConfig, loader: Loader) -> int:
    """Runs until a signal or the scheduler ends it; returns the exit code. Raises StartupError."""
    return await _Process(config, loader).run()


class _Process:
    def __init__(self, config: ExecutorConfig, loader: Loader) -> None:
        self._config = config
        self._loader = loader
        self._log = structlog.get_logger("executor")
        # Until the device is opened, which tells its name.
        self._device_name = {"cpu": f"cpu ({platform.processor() or platform.machine()})"}.get(
            config.device, config.device
        )
        incarnation = uuid.uuid4().hex
        self._tracing = _open_tracing(config.otlp_endpoint, incarnation)
        self._service = ExecutorService(
            ServiceOptions(model_name=config.model, device=self._device_name, incarnation=incarnation), self._tracing
        )
        self._health = health.aio.HealthServicer()
        self._steps: StepThread | None = None

    async def run(self) -> int:
        self._listen_to_signals()
        config = self._config
        options = _server_options(config.max_message_bytes)
        only = [] if config.scheduler_name is None else [OnlyFrom(config.scheduler_name)]
        server = grpc.aio.server(interceptors=only, options=options)
        executor_pb2_grpc.add_ExecutorServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._set_health(ready=False)
        await self._health.set(LIVENESS, _SERVING)
        address = format_address(config.host, _bind(server, config.address, _credentials(config)))
        servers = [server]
        if config.health_port is not None:
            servers.append(grpc.aio.server(options=options))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, servers[-1])
            _bind(servers[-1], format_address(config.host, config.health_port))
        for each in servers:
            await each.start()
        _announce(f"listening address={address}")
        try:
            await self._serve(address)
        finally:
            await asyncio.gather(*(each.stop(_LAST_WORDS) for each in servers))
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        return 0

    async def _serve(self, address: str) -> None:
        stop = asyncio.create_task(self._service.drain_requested.wait())
        loading = asyncio.create_task(self._load())
        await asyncio.wait({stop, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()  # the thread is a daemon; nothing of it must be kept
            return
        loaded = loading.result()
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._steps = StepThread(loaded.runner, _future_setter(failed))
        self._steps.start()
        self._service.serve(loaded.model, self._steps)
        await self._set_health(ready=True)
        self._log.info("ready", address=address, model=loaded.model.name, num_blocks=loaded.model.limits.num_blocks)
        _announce(f"ready address={address}")
        ends: set[asyncio.Future[Exception] | asyncio.Task[bool]] = (
            {stop} if loaded.survives_failed_steps else {stop, failed}
        )
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            await self._leave_broken_device(failed.result())
        named = self._service.drain_grace_seconds
        await self._drain(self._config.grace_period if named is None else named)
        self._steps.stop(_LAST_WORDS)

    async def _leave_broken_device(self, error: Exception) -> NoReturn:
        """The session has ended with the reason; another process must take the device over. Raises StartupError."""
        await self._set_health(ready=False)
        await asyncio.wait({asyncio.create_task(self._service.session_ended())}, timeout=_LAST_WORDS)
        raise StartupError(f"a step failed, and the device cannot be trusted after it: {type(error).__name__}: {error}")

    async def _load(self) -> Loaded:
        """On a daemon thread: a signal must be able to end the process in the middle of it."""
        outcome: Future[Loaded] = Future()
        outcome.set_running_or_notify_cancel()  # from here on the thread alone settles it

        def run() -> None:
            try:
                outcome.set_result(self._loader(self._config, self._device_name, _announce_progress))
            except StartupError as error:
                outcome.set_exception(error)
            except BaseException as error:
                self._log.error("loading failed", exc_info=error)
                outcome.set_exception(StartupError(f"the model could not be loaded: {type(error).__name__}: {error}"))

        threading.Thread(target=run, name="load", daemon=True).start()
        return await asyncio.wrap_future(outcome)

    async def _drain(self, grace: float) -> None:
        """Lets the open session finish, for so long."""
        await self._set_health(ready=False)
        self._log.info("draining", grace_seconds=grace)
        self._service.notify_drain(grace)
        try:
            async with asyncio.timeout(grace):
                await self._service.session_ended()
        except TimeoutError:
            self._log.warning("the grace period passed with a session open", grace_seconds=grace)
            self._service.end_session(f"this executor stopped {grace:g} s after it was asked to")
            await asyncio.wait({asyncio.create_task(self._service.session_ended())}, timeout=_LAST_WORDS)

    async def _set_health(self, ready: bool) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first one asks to stop; from then on the system's own handling applies, which ends the process."""
        self._service.request_drain()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)


def _open_tracing(endpoint: str | None, incarnation: str) -> Tracing | None:
    """Raises StartupError."""
    if endpoint is None:
        return None
    try:
        from executor.tracing import open_tracing
    except ModuleNotFoundError as error:
        raise StartupError("--otlp-endpoint needs OpenTelemetry: pip install 'octavo[otel]'") from error
    return open_tracing(endpoint, incarnation)


def _future_setter(future: asyncio.Future[Exception]) -> Callable[[Exception], None]:
    """For another thread; the first one counts."""
    loop = asyncio.get_running_loop()

    def set_result(error: Exception) -> None:
        if not future.done():
            future.set_result(error)

    def tell(error: Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends as it is
            loop.call_soon_threadsafe(set_result, error)

    return tell


def _server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # or two executors share a port, and neither is told
        # The lease: a silent peer's stream ends within 10 s (see lease.py).
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),  # a ping on the way already serves as keepalive, with this bound
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Schedulers ping every 30 s, in long prefills too.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _credentials(config: ExecutorConfig) -> grpc.ServerCredentials | None:
    """None: no TLS. Raises StartupError."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    log = structlog.get_logger("executor")
    try:
        return server_credentials(
            ServerFiles(config.tls_cert, config.tls_key, config.tls_client_ca),
            lambda error: log.warning("certificates not read", reason=str(error)),
        )
    except BadTLSFiles as error:
        raise StartupError(str(error)) from None


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise StartupError(
            f"cannot listen on {address}: the port is taken, or the address is not one of this machine"
        ) from error
    return int(port)


def _announce_progress(line: str) -> None:
    _announce(f"progress {line}")


def _announce(line: str) -> None:
    """For the parent process; the log is elsewhere. A parent that reads no more is no reason to fail."""
    with contextlib.suppress(OSError):
        print(f"octavo executor {line}", file=sys.stdout, flush=True)
