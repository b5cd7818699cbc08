"""One scheduler's stream, as the event loop sees it: what goes out, what is unanswered, and how it ends.

Owns the queue of outgoing items; the stream's writer takes from it, everybody else puts. All methods run on the event
loop. Knows neither grpc nor protobuf: service.py turns items into messages. After `end` nothing more is written.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from executor.lease import Holder
from executor.plan import InvalidPlan, StepResult
from executor.step_thread import Ticket

MAX_UNANSWERED = 16  # plans that are read ahead; a pipeline is 2 or 3 deep


class Cause(enum.Enum):
    """Why a stream ends."""

    CLOSED = "the scheduler closed the stream"
    INVALID_MESSAGE = "a message that no correct scheduler sends"
    STEP_FAILED = "a step failed as a whole"
    TAKEN_OVER = "a higher session of the same scheduler took over"
    STOPPING = "this executor stops"


@dataclass(frozen=True, slots=True)
class Ending:
    """The last item of a session."""

    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The step thread has left every earlier plan: Ready."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Time for a heartbeat."""


@dataclass(frozen=True, slots=True)
class DrainNotice:
    grace_seconds: float


Item = Opened | Beat | DrainNotice | StepResult | Ending


class Session:
    """From Hello to the end of the stream."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.ticket = Ticket()
        self.last_step_id = 0
        self.num_pending = 0  # plans received and not yet answered
        self._room = asyncio.Semaphore(MAX_UNANSWERED)
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._beat_waits = False
        self._input_ended = False
        self._ended = False

    async def next_item(self) -> Item:
        item = await self._items.get()
        if isinstance(item, Beat):
            self._beat_waits = False
        return item

    def opened(self) -> None:
        self._put(Opened())

    def beat(self) -> None:
        """At most one waits: a scheduler that does not read gets one when it does, not a heap."""
        if not self._beat_waits:
            self._beat_waits = True
            self._put(Beat())

    def notify_drain(self, grace_seconds: float) -> None:
        self._put(DrainNotice(grace_seconds))

    async def received(self, step_id: int) -> None:
        """Takes in the next plan, waiting while too many are unanswered. Raises InvalidPlan if it is out of order."""
        if step_id != self.last_step_id + 1:
            raise InvalidPlan(f"step_id {step_id} follows {self.last_step_id}: steps count from 1, one by one")
        await self._room.acquire()
        self.last_step_id = step_id
        self.num_pending += 1

    def answered(self, answer: StepResult | Exception) -> None:
        """A plan's result, or what it raised: that ends the session."""
        self.num_pending -= 1
        self._room.release()
        if isinstance(answer, StepResult):
            self._put(answer)
            self._end_if_complete()
        elif isinstance(answer, InvalidPlan):
            self.end(Cause.INVALID_MESSAGE, str(answer))
        else:
            self.end(Cause.STEP_FAILED, f"a step failed: {type(answer).__name__}: {answer}")

    def input_ended(self) -> None:
        """The scheduler sends no more; what it sent is still answered."""
        self._input_ended = True
        self._end_if_complete()

    def end(self, cause: Cause, message: str) -> None:
        """The first end counts. Plans that wait are dropped; the one that runs finishes unheard."""
        if self._ended:
            return
        self.ticket.closed = True
        self._put(Ending(cause, message))
        self._ended = True

    def _end_if_complete(self) -> None:
        if self._input_ended and self.num_pending == 0:
            self.end(Cause.CLOSED, Cause.CLOSED.value)

    def _put(self, item: Item) -> None:
        if not self._ended:
            self._items.put_nowait(item)
