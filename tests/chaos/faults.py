"""What befalls executors, and how each comes back.

A fault marks its place as broken until the executor serves again; the next one waits until at least two places are
whole and serve, so something is left to go on with.
"""

from __future__ import annotations

import asyncio
import enum
import random
import signal
import time
from dataclasses import dataclass, field

from octavo.client import AsyncClient

from tests.chaos.processes import Farm, Place, serving

FROZEN = 4.0  # seconds: longer than it takes to be found dead
BLINK = 1.0  # shorter


class Fault(enum.Enum):
    KILL = "kill -9"
    STOP_KILL = "SIGSTOP, then SIGKILL"
    STOP_CONTINUE = "SIGSTOP, then SIGCONT"
    BLINK = "SIGSTOP for 1 s"
    TERMINATE = "SIGTERM and restart"


@dataclass(slots=True)
class Injector:
    """Breaks executors, one after another."""

    farm: Farm
    client: AsyncClient
    kinds: tuple[Fault, ...] = tuple(Fault)
    seed: int = 0
    counts: dict[Fault, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of executors that did not come back
    _recoveries: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, seconds: float, period: float) -> None:
        """Faults of all kinds in turn, about every `period` seconds; returns when all executors are back."""
        r = random.Random(self.seed)
        until = time.monotonic() + seconds
        queue: list[Fault] = []
        while time.monotonic() < until:
            next_at = time.monotonic() + period
            if not queue:
                queue = r.sample(self.kinds, len(self.kinds))
            place = r.choice(await self._whole())
            self.strike(queue.pop(), place)
            await asyncio.sleep(max(0, min(next_at, until) - time.monotonic()))
        await self.settled()

    def strike(self, fault: Fault, place: Place) -> None:
        """The signal is sent when this returns; the executor comes back by itself."""
        assert place.child is not None
        assert not place.broken
        place.broken = True
        self.counts[fault] = self.counts.get(fault, 0) + 1
        place.child.signal(_FIRST_SIGNAL[fault])
        recovery = asyncio.create_task(self._recover(fault, place))
        self._recoveries.add(recovery)
        recovery.add_done_callback(self._recoveries.discard)

    async def settled(self) -> None:
        await asyncio.gather(*self._recoveries)

    async def _whole(self) -> list[Place]:
        """Places that serve; waits until they are two."""
        while True:
            known = await serving(self.client)
            whole = [place for place in self.farm.places if not place.broken and place.address in known]
            if len(whole) >= 2:
                return whole
            await asyncio.sleep(0.2)

    async def _recover(self, fault: Fault, place: Place) -> None:
        child = place.child
        assert child is not None
        try:
            if fault in (Fault.STOP_CONTINUE, Fault.BLINK):
                await asyncio.sleep(BLINK if fault is Fault.BLINK else FROZEN)
                child.signal(signal.SIGCONT)
                place.broken = False
                return
            if fault is Fault.STOP_KILL:
                await asyncio.sleep(FROZEN)
                child.signal(signal.SIGKILL)
            code = await child.wait()
            if fault is Fault.TERMINATE and code != 0:
                self.failures.append(f"{place.name} ended with {code} after SIGTERM")
            await child.kill()
            await self.farm.start_executor(place)
        except (AssertionError, TimeoutError) as error:
            self.failures.append(f"{place.name} did not come back after {fault.value}: {error!r}")


_FIRST_SIGNAL = {
    Fault.KILL: signal.SIGKILL,
    Fault.STOP_KILL: signal.SIGSTOP,
    Fault.STOP_CONTINUE: signal.SIGSTOP,
    Fault.BLINK: signal.SIGSTOP,
    Fault.TERMINATE: signal.SIGTERM,
}
