"""The plan being made, and what the core must remember of it until it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.core.plan import Copy, Fork, NewSequence, TableUpdate
from scheduler.core.request import Sequence

NO_BLOCKS = range(0)


class Row(NamedTuple):
    """One row of a plan in flight; forks are rows that compute nothing."""

    sequence: Sequence
    sequence_id: int
    generation: int
    start: int
    end: int  # [start, end) was computed
    samples: bool
    pending: range  # block indices that this row fills
    parent_id: int | None = None  # of a fork


class Step(NamedTuple):
    step_id: int
    rows: list[Row]
    alone: bool  # of a request that must be computed alone


@dataclass(slots=True)
class Draft:
    """The plan being made."""

    budget: int  # tokens left
    alone: bool  # of a request that must be computed alone
    new: list[NewSequence] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    row_sequences: list[int] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    preempted: bool = False
