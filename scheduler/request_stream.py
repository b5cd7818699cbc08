"""One accepted request between the engine's ticket and the client's stream.

Two tasks: the pump takes the engine's news as they come, so that a stop string ends its output at once, however slow
the client is; the writer sends what is pending, and pauses where the loop is behind (pace.py). They share the outputs,
whose pending news merge. A client that takes no message for `stall_timeout` seconds has its request aborted; its stream
then still ends properly, should it read on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic

import structlog
from octavo.v1 import generation_pb2 as pb

from scheduler import messages
from scheduler.core.plan import PromptLogprobs
from scheduler.detokenizer import Pieces
from scheduler.metrics import Metrics
from scheduler.output import Output
from scheduler.outputs import OutputEvent, ServingEngine, Submission, TicketT
from scheduler.pace import Pace

Log = structlog.typing.FilteringBoundLogger
Send = Callable[[pb.GenerateResponse], Awaitable[None]]

# Bounds a merged message: about a megabyte, at some 30 bytes for each log probability and its text.
MAX_MESSAGE_ENTRIES = 32768


class RequestStream(Generic[TicketT]):
    """Lives from the engine's acceptance to the last Finished."""

    def __init__(
        self,
        engine: ServingEngine[TicketT],
        ticket: TicketT,
        submission: Submission,
        outputs: Sequence[Output],
        pieces: Pieces,
        metrics: Metrics,
        log: Log,
        *,
        arrived: float,
        stall_timeout: float,
        on_stall: Callable[[], None],
        pace: Pace,
    ) -> None:
        """`arrived`: when the call came, on the monotonic clock. `on_stall` ends the request of a client that has
        read nothing for `stall_timeout` seconds."""
        self.outputs = outputs
        self._engine = engine
        self._ticket = ticket
        self._submission = submission
        self._pieces = pieces
        self._metrics = metrics
        self._log = log
        self._arrived = arrived
        self._stall_timeout = stall_timeout
        self._on_stall = on_stall
        self._pace = pace
        self._news = asyncio.Event()
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._last_token: list[float | None] = [None] * len(outputs)
        sampling = submission.sampling
        self._max_tokens = MAX_MESSAGE_ENTRIES // (2 + (sampling.logprobs or 0))
        self._max_prompt_entries = MAX_MESSAGE_ENTRIES // (2 + (sampling.prompt_logprobs or 0))

    async def run(self, send: Send) -> None:
        """Sends everything until each output had its Finished. Raises what the engine raises."""
        pump = asyncio.create_task(self._pump())
        pump.add_done_callback(lambda _: self._news.set())
        finished: set[int] = set()
        try:
            while len(finished) < len(self.outputs):
                await self._news.wait()
                self._news.clear()
                over = pump.done()
                for message in self._take(finished):
                    await self._send(send, message)
                if self._pace.pause and not over:
                    await asyncio.sleep(self._pace.pause)
                if over:
                    pump.result()
                    assert len(finished) == len(self.outputs), "a ticket ends after the last finish"
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(self) -> None:
        async for batch in self._ticket:
            for event in batch:
                self._take_in(event)
            self._news.set()

    def _take_in(self, event: OutputEvent) -> None:
        output = self.outputs[event.index]
        if event.prompt_logprobs is not None:
            self._prompt_logprobs.append(event.prompt_logprobs)
        if event.token_ids:
            self._measure(event)
        if output.take_in(event):
            self._engine.finish(self._ticket, output.index, output.num_tokens)

    def _take(self, finished: set[int]) -> Iterator[pb.GenerateResponse]:
        """What is pending now, taken at the moment when it can be sent."""
        while self._prompt_logprobs:
            news = self._prompt_logprobs.pop(0)
            prompt = self._submission.prompt_token_ids
            yield from messages.prompt_logprobs(news, prompt, self._pieces, self._max_prompt_entries)
        for output in self.outputs:
            while (delta := output.take_delta(self._max_tokens)) is not None:
                yield messages.delta(delta, self._pieces)
            if output.end is not None and output.index not in finished:
                finished.add(output.index)
                yield messages.finished(output.end, self._submission)

    async def _send(self, send: Send, message: pb.GenerateResponse) -> None:
        timer = asyncio.get_running_loop().call_later(self._stall_timeout, self._abort_stalled)
        try:
            await send(message)
        finally:
            timer.cancel()

    def _abort_stalled(self) -> None:
        self._log.warning("client_stalled", seconds=self._stall_timeout)
        self._on_stall()

    def _measure(self, event: OutputEvent) -> None:
        now = time.monotonic()  # uvloop's own clock counts whole milliseconds
        before = self._last_token[event.index]
        if before is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token_latency.observe((now - before) / len(event.token_ids))
        self._last_token[event.index] = now
