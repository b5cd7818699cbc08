"""Tensors that end at a page which faults, so that a kernel's read or write past the end is found."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache

import torch

_PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # of Linux; the module does not name it


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def address_space(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros of any size, whose pages take memory once they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose last byte is followed by a page that faults.

    Floating-point tensors keep the alignment of 16 bytes that kernels' vector accesses rely on (and so may end up to 15
    bytes before the page, where their size is no multiple of 16); integers need only their own.
    """
    source = tensor.contiguous()
    nbytes = source.numel() * source.element_size()
    alignment = 16 if source.is_floating_point() else source.element_size()
    mapped = -(-max(nbytes, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, mapped + _PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc().mprotect(base + mapped, _PAGE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    if nbytes == 0:
        return torch.empty(source.shape, dtype=source.dtype)
    offset = (mapped - nbytes) // alignment * alignment
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).view(source.dtype)
    copy = copy.view(source.shape)
    copy.copy_(source)
    return copy
