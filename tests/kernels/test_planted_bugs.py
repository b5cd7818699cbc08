"""The tests of the tests: each deliberate mistake in a kernel's source is caught, and by more than its compiler."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from executor.backends.cuda.sources import source_directory
from tests.kernels.planted import PlantedBug
from tests.kernels.sim import SimulatorBuild

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("planted_*.py"))
MODULES = [importlib.import_module(f"{__package__}.{family}") for family in FAMILIES]
BUGS: list[PlantedBug] = [bug for module in MODULES for bug in module.BUGS]
MORE_BUGS: list[PlantedBug] = [bug for module in MODULES for bug in getattr(module, "MORE_BUGS", ())]


@pytest.mark.parametrize(
    "bug", [*BUGS, *(pytest.param(bug, marks=pytest.mark.full) for bug in MORE_BUGS)], ids=lambda bug: bug.name
)
def test_is_caught(bug: PlantedBug) -> None:
    bug.check(SimulatorBuild())  # the case is right without the bug
    reason = bug.caught(SimulatorBuild(replaced=bug.planted()))
    assert reason is not None, f"{bug.name}: nothing noticed"


def test_names_tell_bugs_apart() -> None:
    names = [bug.name for bug in [*BUGS, *MORE_BUGS]]
    assert len(set(names)) == len(names)
    assert len(BUGS) >= 20


def test_every_source_has_a_bug() -> None:
    sources = {path.name for path in source_directory().glob("*.cu")}
    assert sources - {bug.file for bug in [*BUGS, *MORE_BUGS]} == set()
