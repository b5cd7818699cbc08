"""From host arrays to the device in one copy: page-locked memory, packed by a layout.

Owns the two host buffers that take turns, so that a step is packed while the copy of the one before may still run, and
the device buffer that they are copied into. The device buffer's addresses never change unless it must grow; a CUDA
graph reads them directly, so its staging is made large enough at first and told not to grow.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]

_ALIGNMENT = 16  # bytes: the widest load of a kernel


class Staging:
    """Packs arrays behind each other and copies them to `device`."""

    def __init__(self, device: torch.device, num_bytes: int, may_grow: bool = True) -> None:
        self._device = device
        self._may_grow = may_grow
        self._turn = 0
        self._allocate(num_bytes)

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Views of the device buffer, by the names of the arrays; good until the next upload. The same shapes and
        types in the same order give the same addresses."""
        offsets, total = _layout(arrays)
        if total > self._device_buffer.numel():
            assert self._may_grow, f"{total} bytes in a staging buffer of {self._device_buffer.numel()}"
            self._allocate(2 * total)
        self._turn = 1 - self._turn
        pinned, copied = self._pinned[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # of the copy before the last: long over
        host = pinned.numpy()
        for array, offset in zip(arrays.values(), offsets, strict=True):
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device_buffer[:total].copy_(pinned[:total], non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream())
        return {
            name: self._device_buffer[offset : offset + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for (name, array), offset in zip(arrays.items(), offsets, strict=True)
        }

    def _allocate(self, num_bytes: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._device_buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._pinned = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [_event() if on_gpu else None for _ in range(2)]


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


def staged_bytes(arrays: Mapping[str, Array]) -> int:
    """Bytes that an upload of such arrays takes."""
    return _layout(arrays)[1]


def _layout(arrays: Mapping[str, Array]) -> tuple[list[int], int]:
    offsets, total = [], 0
    for array in arrays.values():
        offsets.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.uint64,
    np.dtype(np.float32): torch.float32,
}
