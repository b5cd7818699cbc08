"""Number formats by the names that kernels know them by, and the checks that every wrapper makes of its tensors.

A wrong tensor handed to a kernel is read as if it were right, so what can be checked is checked before the launch: once
where a wrapper is built with it, and as assertions (shape, format, contiguity) where it comes with every call.
"""

from __future__ import annotations

from typing import Final

import torch

FP8: Final = torch.float8_e4m3fn
FORMATS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}


def format_name(dtype: torch.dtype) -> str:
    """As a kernel's -D constant names it. Raises ValueError for a format that no kernel computes in."""
    name = FORMATS.get(dtype)
    if name is None:
        raise ValueError(f"kernels know {', '.join(map(str, FORMATS))}, not {dtype}")
    return name


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Asserts format, shape (None: any size), contiguity, and of floats that they start at a multiple of 16 bytes."""
    assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for size, want in zip(tensor.shape, shape, strict=True)
    )
    assert fits, f"{name} has shape {list(tensor.shape)}, not {list(shape)}"
    assert tensor.is_contiguous(), f"{name} is not contiguous"
    assert not dtype.is_floating_point or tensor.data_ptr() % 16 == 0, f"{name} is not aligned to 16 bytes"
