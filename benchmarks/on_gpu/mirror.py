"""The kernels' own tests on a device: `python -m pytest -p benchmarks.on_gpu.mirror --mirror cuda tests/kernels/…`.

A launcher that copies what it is given to the device, launches there, and copies everything back, in the place of the
simulator's: the same cases, poisoned and compared in the same way. A kernel that is given addresses inside a tensor
cannot be mirrored; its tests are skipped. `--mirror simulated` copies to other memory of the CPU and simulates there,
which shows the mirror itself to be right where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import tests.kernels.sim as sim
from executor.backends.cuda.launch import Argument, DeviceLauncher, Dimensions, Launcher
from executor.backends.cuda.sources import KernelSource

_TAKES_ADDRESSES = {"copy_blocks"}
_MOST_BYTES = 1 << 30  # of one storage; sparse address spaces of many gigabytes stay with the simulator
_Simulator = sim.SimulatorLauncher


class MirrorLauncher:
    """Runs CPU tensors' launches on another device."""

    def __init__(self, launcher: Launcher, device: torch.device, shared_limit: int) -> None:
        """`shared_limit`: what the test asks for; the device's own counts where it is less."""
        self._launcher = launcher
        self._device = device
        self._shared_limit = min(shared_limit, launcher.shared_limit)

    @property
    def shared_limit(self) -> int:
        return self._shared_limit

    @property
    def bank_conflicts(self) -> int:
        """The simulator's count; a device tells none."""
        return self._launcher.bank_conflicts if isinstance(self._launcher, _Simulator) else 0

    def prepare(self, kernel: KernelSource, shared_bytes: int = 0) -> None:
        self._launcher.prepare(kernel, shared_bytes)

    def launch(
        self,
        kernel: KernelSource,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        args: Sequence[Argument],
    ) -> None:
        if kernel.function in _TAKES_ADDRESSES:
            pytest.skip(f"{kernel.function} is given addresses, which cannot be mirrored")
        mirrored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address of a storage: its bytes, and the copy
        given = [self._mirror(arg, mirrored) if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._launcher.launch(kernel, grid, block, shared_bytes, given)
        for host, copy in mirrored.values():
            host.copy_(copy)  # waits for the launch

    def _mirror(self, tensor: torch.Tensor, mirrored: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The same view of the same bytes: a whole storage is copied, for views of it may share."""
        storage = tensor.untyped_storage()
        if storage.nbytes() > _MOST_BYTES:
            pytest.skip(f"a tensor of {storage.nbytes()} bytes is not mirrored")
        if storage.data_ptr() not in mirrored:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            mirrored[storage.data_ptr()] = (host, host.to(self._device, copy=True))
        copy = mirrored[storage.data_ptr()][1]
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mirror", choices=["cuda", "simulated"], required=True, help="where kernels run")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests' modules are imported: they take the launcher by its name."""
    where = config.getoption("--mirror")

    def make(*arguments: object, **options: object) -> MirrorLauncher:
        simulator = _Simulator(*arguments, **options)  # type: ignore[arg-type]
        if where == "simulated":
            return MirrorLauncher(simulator, torch.device("cpu"), simulator.shared_limit)
        device = torch.device("cuda", torch.cuda.current_device())
        return MirrorLauncher(_on_device(device), device, simulator.shared_limit)

    launchers: dict[torch.device, DeviceLauncher] = {}

    def _on_device(device: torch.device) -> DeviceLauncher:
        if device not in launchers:
            launchers[device] = DeviceLauncher(device)
        return launchers[device]

    sim.SimulatorLauncher = make  # type: ignore[assignment,misc]
