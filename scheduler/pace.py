"""How long a stream waits between two messages while the event loop is behind.

To tell a client of a token costs several times what the token costs otherwise. While the loop keeps up, each token goes
out at once. When it runs late, streams pause between messages, the longer the later it is, and the tokens that come
meanwhile go out as one message: so results are read, plans are made and calls are taken in time. It knows nothing of
streams; they ask for `pause`.
"""

from __future__ import annotations

import asyncio

TICK = 0.05  # seconds between two looks at the clock
LATE = 0.03  # later than this, the loop is behind
LEAST = 0.05  # the first pause
MOST = 1.0


class Pace:
    """Without `run`, there is no pause."""

    def __init__(self) -> None:
        self.pause = 0.0  # seconds

    async def run(self) -> None:
        """Watches the event loop, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(TICK)
            self.note(loop.time() - before - TICK)

    def note(self, late: float) -> None:
        """The loop came so many seconds late."""
        if late > LATE:
            self.pause = min(MOST, max(LEAST, self.pause * 1.2))
        elif self.pause:
            self.pause = self.pause * 0.97 if self.pause > LEAST else 0.0
