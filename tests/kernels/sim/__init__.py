"""The simulator: kernels' own source, compiled by g++ and run on CPU tensors."""

from tests.kernels.sim.build import SimulatorBuild
from tests.kernels.sim.launcher import Schedule, SimulatedFault, SimulatorLauncher
from tests.kernels.sim.memory import address_space, guarded

__all__ = ["Schedule", "SimulatedFault", "SimulatorBuild", "SimulatorLauncher", "address_space", "guarded"]
