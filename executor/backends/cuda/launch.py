"""One call that launches a kernel, and the launcher for a device.

`Launcher.launch` is the seam between the wrappers (which check shapes and formats and know a kernel's arguments) and
what runs it: `DeviceLauncher` here, or the simulator of the tests, which runs the same source on CPU tensors. Arguments
are tensors, passed as addresses, None, passed as a null address, and typed scalars: np.int32, np.int64, np.float32.
A plain Python number is refused, for its width in the kernel's signature would be a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from executor.backends.cuda.compile import KernelCompiler
from executor.backends.cuda.sources import KernelSource

if TYPE_CHECKING:
    from cupy.cuda.function import Function

Argument = torch.Tensor | np.int32 | np.int64 | np.float32 | None
Dimensions = tuple[int, int, int]

# Shared memory that one block may take, in bytes, by architecture; a kernel gets more than 48 KiB only when asked for.
_SHARED_LIMITS = {"80": 163 << 10, "87": 163 << 10, "90": 227 << 10, "100": 227 << 10, "103": 227 << 10}
_SHARED_OF_OTHERS = 99 << 10
_STATIC_LIMIT = 48 << 10


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that one block may take on an architecture from "80" on."""
    return _SHARED_LIMITS.get(arch, _SHARED_OF_OTHERS)


class Launcher(Protocol):
    """Runs kernels on the tensors of one device, in the order they are launched."""

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that one block may take."""

    def prepare(self, kernel: KernelSource, shared_bytes: int = 0) -> None:
        """Compiles and loads a kernel, so that launches do not wait for it (and may be captured in a graph)."""

    def launch(
        self,
        kernel: KernelSource,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        args: Sequence[Argument],
    ) -> None:
        """Launches on the current stream; `shared_bytes` of dynamic shared memory. An empty grid launches nothing."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream as CuPy takes it: anything with the handle in `ptr`."""

    ptr: int


def boxed(args: Sequence[Argument]) -> list[int | np.int32 | np.int64 | np.float32]:
    """Arguments as a launch takes them: an address for a tensor, scalars as they are."""
    values: list[int | np.int32 | np.int64 | np.float32] = []
    for position, argument in enumerate(args):
        match argument:
            case torch.Tensor():
                values.append(argument.data_ptr())
            case None:
                values.append(0)
            case _ if isinstance(argument, np.int32 | np.int64 | np.float32):
                values.append(argument)
            case _:
                raise TypeError(f"kernel argument {position} is a {type(argument).__name__}: give np.int32 or the like")
    return values


class DeviceLauncher:
    """Launches on a CUDA device, on torch's current stream. Kernels are compiled and loaded once, on first use."""

    def __init__(self, device: torch.device, compiler: KernelCompiler | None = None) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self._device = device
        self._arch = f"{major}{minor}"
        self._compiler = compiler or KernelCompiler()
        self._functions: dict[KernelSource, tuple[Function, int]] = {}
        self._shared_limit = shared_limit(self._arch)

    @property
    def shared_limit(self) -> int:
        return self._shared_limit

    def prepare(self, kernel: KernelSource, shared_bytes: int = 0) -> None:
        self._function(kernel, shared_bytes)

    def launch(
        self,
        kernel: KernelSource,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        args: Sequence[Argument],
    ) -> None:
        if 0 in grid:
            return
        stream = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
        self._function(kernel, shared_bytes)(grid, block, boxed(args), shared_bytes, stream)

    def _function(self, kernel: KernelSource, shared_bytes: int) -> Function:
        loaded = self._functions.get(kernel)
        if loaded is not None and loaded[1] >= shared_bytes:
            return loaded[0]
        import cupy  # only here: compiling and simulating need none

        with cupy.cuda.Device(self._device.index or 0):
            compiled = self._compiler.compile(kernel, self._arch)
            raw = cupy.RawModule(path=str(compiled.path)).get_function(kernel.function)
            if shared_bytes > _STATIC_LIMIT:
                raw.max_dynamic_shared_size_bytes = shared_bytes
                raw.preferred_shared_memory_carveout = 100  # in percent: room for as many blocks as the limit allows
            self._functions[kernel] = (raw.kernel, max(shared_bytes, _STATIC_LIMIT))
        return self._functions[kernel][0]
