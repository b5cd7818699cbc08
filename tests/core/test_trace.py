"""The same inputs make the same plans: today, on this machine, as when the trace was recorded."""

from __future__ import annotations

import itertools
import json
from collections import Counter

from tests.core.factories import create_core
from tests.core.trace import PATH, SETTINGS, apply, record


def test_a_recorded_trace_replays_exactly():
    core = create_core(itertools.count(10_000).__next__, **SETTINGS)
    for number, (call, argument, answer) in enumerate(json.loads(PATH.read_text())):
        assert apply(core, call, argument) == answer, f"call {number}: {call}"
    assert not core.has_work


def test_the_trace_holds_every_call_and_every_part_of_a_plan():
    calls = json.loads(PATH.read_text())
    assert set(Counter(call for call, _, _ in calls)) == {"add", "abort", "finish", "schedule", "update"}
    plans = [answer for call, _, answer in calls if call == "schedule" and answer is not None]
    for part in ("finished", "preempted", "new", "tokens", "tables", "copies", "row_sequences", "forks"):
        assert any(plan[part] for plan in plans), part
    assert any(argument["errors"] for call, argument, _ in calls if call == "update")
    assert any(argument["candidates"] for call, argument, _ in calls if call == "update")


def test_two_runs_are_equal():
    assert record(seed=3, num_calls=150) == record(seed=3, num_calls=150)
