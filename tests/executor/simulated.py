"""The CUDA backend where there is no GPU: the kernels' own source on CPU tensors, by the simulator's launcher."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from executor.backends.cuda.backend import CudaBackend
from tests.kernels.sim.launcher import SimulatorLauncher

NUM_SMS = 4  # few, so that short sequences are split too


class SimulatedBackend(CudaBackend):
    """Its cache can be reached as that of the CPU backend, for tests to poison and compare."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, *, deterministic: bool = False, num_sms: int = NUM_SMS
    ) -> None:
        super().__init__(SimulatorLauncher(), torch.device("cpu"), dtype, num_sms, deterministic)

    @property
    def cache(self) -> SimpleNamespace:
        return SimpleNamespace(keys=self.keys, values=self.values, spec=self._spec)
