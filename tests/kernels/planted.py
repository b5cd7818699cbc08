"""A planted bug: one mistake in a shipped source, and the check of a case that must catch it.

A family lists its own in tests/kernels/planted_<family>.py as `BUGS`; test_planted_bugs.py runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from executor.backends.cuda.sources import source_directory
from tests.kernels.sim import SimulatedFault, SimulatorBuild


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """`old`, found once in `file`, becomes `new`. `check` runs a case on what a build makes of the sources, and raises
    AssertionError for wrong values (or SimulatedFault comes out of it)."""

    name: str
    file: str
    old: str
    new: str
    check: Callable[[SimulatorBuild], object]

    def planted(self) -> dict[str, str]:
        """The file's text with the bug, by name."""
        text = (source_directory() / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its old text is {found} times in {self.file}")
        return {self.file: text.replace(self.old, self.new)}

    def caught(self, build: SimulatorBuild) -> str | None:
        """How the check failed on a build of the planted sources; None if it did not. A source that does not compile
        raises, for that is no catch."""
        try:
            self.check(build)
        except (AssertionError, SimulatedFault) as error:
            return str(error) or type(error).__name__
        return None
