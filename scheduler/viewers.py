"""Those who look at the page: one picture for all of them, made only while there is somebody.

Nobody is waited for. A viewer that has not taken its frame by the next one misses it, one that takes none for
STALL_SECONDS is dropped, and there are at most MAX_VIEWERS. Pictures keep to a hundredth of the event loop's time, and
come more rarely while the loop is late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog
from aiohttp import web

from scheduler.frame import frame_of
from scheduler.inspection import Inspector
from scheduler.pace import Pace
from scheduler.request_stream import Log

MAX_VIEWERS = 32
TICK_SECONDS = 0.25
LATE_FACTOR = 8.0  # ticks last so many times the pause that streams make
STALL_SECONDS = 10.0
RETRY_SECONDS = 5
STREAM_HEADERS = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}  # a proxy must not hold frames back


class _Viewer:
    """Holds one frame at most."""

    def __init__(self) -> None:
        self._frame: bytes | None = None
        self._news = asyncio.Event()

    def offer(self, frame: bytes | None) -> None:
        """None ends it."""
        self._frame = frame
        self._news.set()

    async def next(self) -> bytes | None:
        await self._news.wait()
        self._news.clear()
        return self._frame


class Viewers:
    def __init__(
        self,
        inspector: Inspector,
        pace: Pace,
        *,
        names: bool,
        headers: Mapping[str, str],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`names`: frames hold request ids and tenants, the words of clients."""
        self._inspector = inspector
        self._pace = pace
        self._names = names
        self._headers = headers
        self._stall_seconds = stall_seconds
        self._log: Log = structlog.get_logger("page")
        self._viewers: set[_Viewer] = set()
        self._ticking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._viewers)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answers GET /events, until the viewer leaves, is dropped, or `close`."""
        if len(self._viewers) >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} viewers look already\n"
            return web.Response(status=503, text=text, headers={"Retry-After": str(RETRY_SECONDS)})
        viewer = _Viewer()
        self._viewers.add(viewer)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick(), name="page")
        try:
            return await self._stream(request, viewer)
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    async def _stream(self, request: web.Request, viewer: _Viewer) -> web.StreamResponse:
        response = web.StreamResponse(headers={**self._headers, **STREAM_HEADERS})
        try:
            await response.prepare(request)
            while (frame := await viewer.next()) is not None:
                async with asyncio.timeout(self._stall_seconds):
                    await response.write(frame)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # what it has not taken is not kept for it
        except ConnectionError:
            pass  # it left
        return response

    async def _tick(self) -> None:
        try:
            await self._show()
        except Exception as error:  # a fault of ours: nobody may be left before a picture that stands still
            self._log.error("picture failed", exc_info=error)
            self.close()

    async def _show(self) -> None:
        while True:
            began = time.monotonic()
            seen = self._inspector.look()
            frame = frame_of(seen if self._names else seen.without_names())
            for viewer in self._viewers:
                viewer.offer(frame)
            spent = time.monotonic() - began
            await asyncio.sleep(self._pause(spent))

    def _pause(self, spent: float) -> float:
        return max(self._inspector.pause(TICK_SECONDS, spent), LATE_FACTOR * self._pace.pause)

    def close(self) -> None:
        """Ends all streams."""
        for viewer in self._viewers:
            viewer.offer(None)
