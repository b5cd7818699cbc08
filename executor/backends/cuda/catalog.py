"""Every kernel that ships, with every specialisation: what `octavo kernels` compiles and prints, and CI gates.

A family adds its entries in one function. Wrappers build the same `KernelSource` values for what they launch; a test
asserts that what they can ask for is listed here.
"""

from __future__ import annotations

from executor.backends.cuda.sources import KernelSource, kernel

SCALARS = ("bf16", "fp16", "fp32")
HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32)


def merge_states() -> list[KernelSource]:
    return [
        kernel("merge_states", "merge_states.cu", SCALAR=scalar, HEAD_SIZE=head_size)
        for scalar in SCALARS
        for head_size in HEAD_SIZES
    ]


def catalog() -> list[KernelSource]:
    """All kernels, by family."""
    return [*merge_states()]
