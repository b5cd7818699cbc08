"""What the health service says, and the watchdog behind it.

The Generation service, and "" with it, is SERVING while an executor is ready, the tokenizer is loaded, nothing is
stalled and no drain has begun. `liveness` is SERVING as long as the event loop answers at all: the only name that a
liveness probe may use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic

import structlog
from grpc_health.v1 import health, health_pb2

from scheduler.outputs import NoExecutor, ServingEngine, TicketT
from scheduler.request_stream import Log
from scheduler.service import GenerationService

READINESS_NAMES = ("", "octavo.v1.Generation")
LIVENESS_NAME = "liveness"
TICK_SECONDS = 1.0


class Readiness(Generic[TicketT]):
    """Keeps the health service true to the engine's state."""

    def __init__(
        self,
        engine: ServingEngine[TicketT],
        service: GenerationService[TicketT],
        on_tick: Callable[[], None],
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        """`on_tick` is called about every `tick_seconds`."""
        self.servicer = health.aio.HealthServicer()
        self._engine = engine
        self._service = service
        self._on_tick = on_tick
        self._tick_seconds = tick_seconds
        self._log: Log = structlog.get_logger("readiness")
        self._updating = asyncio.Lock()
        self._why: str | None = "not started"  # None: ready

    async def run(self) -> None:
        """Until cancelled."""
        await self._set(LIVENESS_NAME, serving=True)
        await self._publish()
        while True:
            await self.update()
            self._on_tick()
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_seconds):
                    await self._engine.wait_change()

    async def update(self) -> None:
        """Publishes the state where it changed, and logs why."""
        async with self._updating:  # an older state must not be published after a newer one
            why = await self._why_not_ready()
            if why == self._why:
                return
            was_ready, self._why = self._why is None, why
            await self._publish()
            if why is None:
                self._log.info("ready", model=self._engine.model.name if self._engine.model else None)
            else:
                # A start and a drain are in order; what was ready and no longer is, is not.
                log = self._log.warning if was_ready and not self._service.draining else self._log.info
                log("not_ready", why=why)

    async def _why_not_ready(self) -> str | None:
        if self._service.draining:
            return "draining"
        if not self._engine.ready:
            return "no executor is ready"
        try:
            await self._service.prepare()
        except NoExecutor as error:
            return str(error)
        return self._engine.stalled()

    async def _publish(self) -> None:
        for name in READINESS_NAMES:
            await self._set(name, serving=self._why is None)

    async def _set(self, name: str, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self.servicer.set(name, status.SERVING if serving else status.NOT_SERVING)
