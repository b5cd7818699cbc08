"""The CUDA backend where there is no GPU: the kernels' own source on CPU tensors, by the simulator's launcher."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from executor.backends.cuda.backend import CudaBackend
from executor.sampler import Draws, SamplingBatch
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


class LateBackend(SimulatedBackend):
    """Its draws are known to the host a while after they are made, as a device's are."""

    num_fed = 0  # steps that took tokens from the draws of the step before

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        self.num_fed += bool((token_ids < 0).any())
        return super().embed(table, token_ids)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Draws:
        return _Late(super().sample(logits, batch))


class _Late:
    def __init__(self, draws: Draws) -> None:
        self.collect = draws.collect
        self._num_looks = 0

    def is_ready(self) -> bool:
        self._num_looks += 1
        return self._num_looks > 100
