"""Attention of decode rows: chooses between the kernels of cuda/decode*.cu, checks shapes, launches, joins partitions.

`DecodeShape` is what a model and a cache fix; the kernel follows from it and from the shared memory that a block may
take. Knows neither plans nor layers: the work list comes with each call (see plan.py and step.py). Both kernels take
the same arguments. Partial results live in memory taken from torch for the call, so a captured graph owns its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor.backends.cuda.formats import FP8, format_name
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.sources import KernelSource, kernel
from executor.backends.cuda.step import DecodeRows, Window

_ROWS = 16  # of an mma tile: query heads of a block
_SIMT_WARPS = 4
_SIMT_RESIDENT = 3  # blocks that the kernel's registers let share a multiprocessor
_SIMT_GROUP = 2  # query heads on a K/V head up to which the ordinary cores are used; their heads of a block


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sizes and formats of one model's attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype  # of q and the output
    kv_dtype: torch.dtype  # dtype, or float8_e4m3fn

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def uses_tensor_cores(self) -> bool:
        return self.dtype != torch.float32 and self.heads_per_kv_head > _SIMT_GROUP


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """The kernel for a shape, and how a block of it is made."""

    source: KernelSource
    heads: int  # query heads of a block
    threads: int
    shared_bytes: int
    blocks_per_multiprocessor: int  # that run at once; of the tensor-core kernel 2 at most


def decode_launch(shape: DecodeShape, shared_limit: int) -> DecodeLaunch:
    """The kernel for `shape` where a block may take `shared_limit` bytes of shared memory."""
    common: dict[str, str | int] = {
        "SCALAR": format_name(shape.dtype),
        "KV": format_name(shape.kv_dtype),
        "HEAD_SIZE": shape.head_size,
        "BLOCK_SIZE": shape.block_size,
    }
    if not shape.uses_tensor_cores:
        group = min(_SIMT_GROUP, shape.heads_per_kv_head)
        source = kernel("decode_simt", "decode_simt.cu", **common, GROUP=group)
        return DecodeLaunch(source, group, _SIMT_WARPS * 32, 0, _SIMT_RESIDENT)
    warps, stages = _pipeline(shape, shared_limit)
    shared = _shared_bytes(shape, warps, stages)
    source = kernel("decode", "decode.cu", **common, WARPS=warps, STAGES=stages)
    return DecodeLaunch(source, _ROWS, warps * 32, shared, _resident(shared, shared_limit))


def _pipeline(shape: DecodeShape, shared_limit: int) -> tuple[int, int]:
    """Warps and stages: two blocks on a multiprocessor with as many stages as fit, else one block with as many."""
    for blocks in (2, 1):
        for stages in (4, 3, 2):
            if _resident(_shared_bytes(shape, 4, stages), shared_limit) >= blocks:
                return 4, stages
    return 2, 2


def _resident(shared: int, shared_limit: int) -> int:
    """Blocks that share a multiprocessor. It has 1 KiB more than one block may take, and each block costs 1 KiB."""
    return min(2, (shared_limit + 1024) // (shared + 1024))


def _shared_bytes(shape: DecodeShape, warps: int, stages: int) -> int:
    """Of decode.cu: q, then the stages, which the joining of the warps uses again. Pitches are odd, in 16 bytes."""
    q_pitch = shape.head_size * 2 // 16 | 1
    pitch = shape.head_size * shape.kv_dtype.itemsize // 16 | 1
    staged = warps * stages * 2 * 16 * pitch * 16
    joined = warps * _ROWS * (shape.head_size + 8) * 4
    return _ROWS * q_pitch * 16 + max(staged, joined)


class DecodeAttention:
    """Attention of rows of one query each, over a paged cache of one shape."""

    def __init__(self, launcher: Launcher, shape: DecodeShape) -> None:
        if shape.num_heads % shape.num_kv_heads != 0:
            raise ValueError(f"{shape.num_heads} query heads on {shape.num_kv_heads} key/value heads")
        if shape.head_size % 16 != 0 or shape.block_size % 16 != 0:
            raise ValueError(
                f"head size {shape.head_size}, block size {shape.block_size}: kernels take multiples of 16"
            )
        if shape.kv_dtype not in (shape.dtype, FP8):
            raise ValueError(f"a cache of {shape.kv_dtype} for activations of {shape.dtype}")
        self.shape = shape
        self._launcher = launcher
        self._launch = decode_launch(shape, launcher.shared_limit)
        self._merge = kernel(
            "merge_states", "merge_states.cu", SCALAR=format_name(shape.dtype), HEAD_SIZE=shape.head_size
        )

    @property
    def blocks_per_multiprocessor(self) -> int:
        """What the plan multiplies by the number of multiprocessors to know how many blocks fill the device."""
        return self._launch.blocks_per_multiprocessor

    def prepare(self) -> None:
        """Compiles and loads both kernels."""
        self._launcher.prepare(self._launch.source, self._launch.shared_bytes)
        self._launcher.prepare(self._merge)

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: DecodeRows,
        softmax_scale: float,
        window: Window = None,
        softcap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Writes the rows of `out` that `rows` names, and no others.

        out [num_tokens, num_heads, head_size], contiguous; q the same, its tokens any multiple of 16 bytes apart;
        caches [num_blocks, num_kv_heads, block_size, head_size]. window: the last so many tokens are visible, the
        query's own counted. k_scale, v_scale: what an fp8 cache's values were divided by.
        """
        shape, work = self.shape, rows.items[window]
        self._check(out, q, k_cache, v_cache)
        num_rows, max_blocks = rows.block_tables.shape
        slots = (max(work.num_slots, 1), shape.num_heads)
        partial_out = torch.empty((*slots, shape.head_size), dtype=torch.float32, device=out.device)
        partial_lse = torch.empty(slots, dtype=torch.float32, device=out.device)
        launch = self._launch
        groups = -(-shape.heads_per_kv_head // launch.heads)
        self._launcher.launch(
            launch.source,
            (work.items.shape[0], shape.num_kv_heads * groups, 1),
            (launch.threads, 1, 1),
            launch.shared_bytes,
            [
                out,
                partial_out,
                partial_lse,
                q,
                k_cache,
                v_cache,
                rows.block_tables,
                rows.seq_lens,
                work.items,
                work.num_items,
                rows.token_rows,
                np.int64(q.stride(0)),
                np.int32(max_blocks),
                np.int32(shape.num_heads),
                np.int32(shape.num_kv_heads),
                np.float32(softmax_scale * k_scale),
                np.float32(softcap or 0.0),
                np.int32(window or 0),
                np.float32(v_scale),
            ],
        )
        if work.num_slots:
            self._launcher.launch(
                self._merge,
                (num_rows, shape.num_heads, 1),
                (shape.head_size // 4, 1, 1),
                0,
                [out, partial_out, partial_lse, work.slot_ptr, rows.token_rows],
            )

    def _check(self, out: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        shape = self.shape
        heads, cache = (shape.num_heads, shape.head_size), (shape.num_kv_heads, shape.block_size, shape.head_size)
        assert out.dtype == q.dtype == shape.dtype, (out.dtype, q.dtype)
        assert tuple(out.shape[1:]) == tuple(q.shape[1:]) == heads, (out.shape, q.shape)
        assert out.is_contiguous(), out.stride()
        assert q.stride()[1:] == (shape.head_size, 1), q.stride()
        assert q.stride(0) * q.element_size() % 16 == 0 == q.data_ptr() % 16, "rows of q start at 16 bytes"
        for tensor in (k_cache, v_cache):
            assert tensor.dtype == shape.kv_dtype, tensor.dtype
            assert tensor.is_contiguous(), tensor.stride()
            assert tuple(tensor.shape[1:]) == cache, tensor.shape
