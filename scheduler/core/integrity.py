"""Whether a core's state contradicts itself: what tests ask after every step, and nobody else."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from scheduler.core.request import Sequence, Status

if TYPE_CHECKING:
    from scheduler.core.scheduler import Scheduler


def check_integrity(core: Scheduler) -> None:
    """Raises AssertionError naming the contradiction. Reads the core's own state: it is the core's, moved aside."""
    alive = core._running + core._waiting
    assert core._running == sorted(core._running, key=_order)
    assert core._waiting == sorted(core._waiting, key=_order)
    assert {id(s) for s in alive} == {id(s) for s in core._sequences.values()}
    assert {id(b) for b in core._beams.values()} == {id(s.beam) for s in alive if s.beam is not None}
    assert core._seats_taken() <= core.config.max_num_seqs
    assert core._num_alone == sum(s.request.alone for s in alive)
    if any(step.alone for step in core._in_flight):
        assert len(core._in_flight) == 1, "something is in flight beside what must be computed alone"
    assert len(core._in_flight) <= core.config.pipeline_depth
    for s in alive:
        assert s.status is (Status.RUNNING if s in core._running else Status.WAITING)
        assert s.num_output_tokens + s.num_placeholders <= s.max_tokens
        assert s.num_computed_tokens <= s.num_tokens
        if s.status is Status.WAITING:
            assert not s.block_table
            assert not s.num_computed_tokens
            assert not s.on_executor
    _check_in_flight(core, alive)


def _check_in_flight(core: Scheduler, alive: list[Sequence]) -> None:
    rows = [row for step in core._in_flight for row in step.rows]
    in_flight = Counter(id(row.sequence) for row in rows)
    to_come = Counter(
        id(row.sequence)
        for row in rows
        if row.samples and row.sequence.beam is None and row.generation >= row.sequence.valid_from
    )
    for s in alive:
        assert s.num_in_flight == in_flight[id(s)], f"sequence {s.sequence_id} miscounts its plans in flight"
        assert s.num_placeholders == to_come[id(s)], f"sequence {s.sequence_id} miscounts its placeholders"
    pending = Counter(row.sequence.block_hashes[index] for row in rows for index in row.pending)
    core._kv.check_integrity(core._running, pending)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
