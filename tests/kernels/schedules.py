"""Runs a launch under every schedule of the simulator: results must not depend on which warp or copy comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.kernels.sim import Schedule, SimulatorBuild, SimulatorLauncher

EVERY_SCHEDULE = [(schedule, eager) for schedule in Schedule for eager in (False, True)]


def identical_on_every_schedule(
    run: Callable[[SimulatorLauncher], Sequence[torch.Tensor]], build: SimulatorBuild | None = None
) -> Sequence[torch.Tensor]:
    """`run` launches and returns what was written; the same bits under 3 orders and 2 ways of copying, or it fails."""
    first: Sequence[torch.Tensor] | None = None
    for schedule, eager in EVERY_SCHEDULE:
        results = run(SimulatorLauncher(schedule, eager, 7, build))
        if first is None:
            first = results
        for left, right in zip(first, results, strict=True):
            same = torch.equal(left.view(torch.uint8), right.view(torch.uint8))
            assert same, f"{schedule.name}, {'eager' if eager else 'lazy'} copies: other bits"
    assert first is not None
    return first
