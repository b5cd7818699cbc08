"""A step that was launched, as the step thread sees it: whether its result is there, and the result.

Where a device computes, a launch returns before the step has run, so that the next one can be prepared meanwhile. A
runner that computes where it is called has the result at once: `Finished`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from executor.plan import StepResult


class Launched(Protocol):
    """One step; collected once, and in the order of launches."""

    def is_ready(self) -> bool:
        """Whether `collect` would return without waiting for the device."""

    def collect(self) -> StepResult:
        """Waits for the step. Raises what the device raised."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that is over when its launch returns."""

    result: StepResult

    def is_ready(self) -> bool:
        return True

    def collect(self) -> StepResult:
        return self.result
