"""What an onlooker sees of the scheduler at one moment: load, block maps, and the latest steps of each executor.

Values, and the one place that makes them for all onlookers: they are made when somebody looks, and those who look at
about the same time see the same ones. There is no text of prompts or answers in them, and no token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler.core.block_map import BlockMap
from scheduler.outputs import Load
from scheduler.step_log import StepRecord

FRESH_SECONDS = 0.1
SHARE_OF_LOOP = 0.01  # of the event loop's time, that looking may take


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a running sequence is; names are the client's own words."""

    request_id: str
    tenant: str
    index: int  # of the request's outputs


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """An executor that has joined."""

    target: str
    block_map: BlockMap
    owners: tuple[Owner | None, ...]  # of block_map.holders; None: it ends just now
    max_num_seqs: int
    max_num_batched_tokens: int
    num_sampled_tokens: int  # since it joined
    steps: tuple[StepRecord, ...]  # the latest, the oldest first


@dataclass(frozen=True, slots=True)
class Inspection:
    """See the module."""

    seconds: float  # of a monotonic clock
    model: str  # name; "" before the first executor
    load: Load
    executors: tuple[ExecutorView, ...]  # by target

    def without_names(self) -> Inspection:
        """Without the words that clients chose. Requests keep their number, outputs their place."""
        return replace(
            self,
            load=replace(self.load, waiting=tuple(replace(w, tenant="") for w in self.load.waiting)),
            executors=tuple(
                replace(e, owners=tuple(o and replace(o, request_id="", tenant="") for o in e.owners))
                for e in self.executors
            ),
        )


class Inspector:
    """Looks on behalf of all."""

    def __init__(self, inspect: Callable[[], Inspection], clock: Callable[[], float] = time.monotonic) -> None:
        self._inspect = inspect
        self._clock = clock
        self._latest: tuple[float, Inspection] | None = None
        self._cost = 0.0

    def look(self) -> Inspection:
        """Now, or as somebody else saw it less than FRESH_SECONDS ago."""
        began = self._clock()
        if self._latest is None or began - self._latest[0] >= FRESH_SECONDS:
            self._latest = (began, self._inspect())
            self._cost = self._clock() - began
        return self._latest[1]

    def pause(self, wanted: float, spent: float = 0.0) -> float:
        """Seconds to wait before the next look, so that looking, and what the onlooker himself has spent on it, keeps
        to its share of the loop's time."""
        return max(wanted, max(self._cost, spent) / SHARE_OF_LOOP)
