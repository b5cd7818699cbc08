"""Every kernel that ships, with every specialisation: what `octavo kernels` compiles and prints, and CI gates.

A family adds its entries in one function. Wrappers build the same `KernelSource` values for what they launch; a test
asserts that what they can ask for is listed here.
"""

from __future__ import annotations

import torch

from executor.backends.cuda.attention_decode import DecodeShape, decode_launch
from executor.backends.cuda.attention_prefill import prefill_source
from executor.backends.cuda.cache_ops import copy_blocks_source, gather_rows_source
from executor.backends.cuda.compile import ARCHITECTURES
from executor.backends.cuda.elementwise import ITEMS, rms_norm_source, rope_source, silu_mul_source
from executor.backends.cuda.launch import shared_limit
from executor.backends.cuda.sampling import adjust_source, sample_source
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


def decode() -> list[KernelSource]:
    """What decode_launch answers for any model, cache and architecture: by heads on a K/V head, 1, 2 and more."""
    sources = [
        decode_launch(DecodeShape(heads, 1, head_size, block_size, dtype, kv_dtype), limit).source
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for kv_dtype in (dtype, torch.float8_e4m3fn)
        for head_size in HEAD_SIZES
        for block_size in BLOCK_SIZES
        for heads in (1, 2, 4)
        for limit in sorted({shared_limit(arch) for arch in ARCHITECTURES})
    ]
    return list(dict.fromkeys(sources))


def prefill() -> list[KernelSource]:
    return [
        prefill_source(scalar, kv, head_size, block_size)
        for scalar in SCALARS
        for kv in (scalar, "fp8")
        for head_size in HEAD_SIZES
        for block_size in BLOCK_SIZES
    ]


def elementwise() -> list[KernelSource]:
    """Between matrix products: norms, the gate, rope with the write of K and V."""
    return [
        *(rms_norm_source(scalar, items) for scalar in SCALARS for items in ITEMS),
        *(silu_mul_source(scalar) for scalar in SCALARS),
        *(
            rope_source(scalar, kv, head_size, block_size)
            for scalar in SCALARS
            for kv in (scalar, "fp8")
            for head_size in HEAD_SIZES
            for block_size in BLOCK_SIZES
        ),
    ]


def sampling() -> list[KernelSource]:
    return [sample_source(), adjust_source()]


def moves() -> list[KernelSource]:
    return [copy_blocks_source(), gather_rows_source()]


def catalog() -> list[KernelSource]:
    """All kernels, by family."""
    return [*merge_states(), *decode(), *prefill(), *elementwise(), *sampling(), *moves()]
