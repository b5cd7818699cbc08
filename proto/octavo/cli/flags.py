"""The flags of the two processes, as far as the front door must know them: names, where they go, one line each.

This is the one table of them. `octavo serve` and `octavo demo` accept those marked `serve` and pass them on; README.md
prints the table; tests/test_flags.py compares it with the --help of both processes. Values are checked by the process
that gets them.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    metavar: str | None  # None: a switch
    help: str
    serve: bool = True  # `octavo serve` passes it on

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    def given(self, values: Namespace) -> list[str]:
        """The arguments that say again what the user said."""
        value = getattr(values, self.key)
        if value is None or value is False:
            return []
        return [self.name] if value is True else [self.name, value]


EXECUTOR: tuple[Flag, ...] = ()
SCHEDULER: tuple[Flag, ...] = ()
