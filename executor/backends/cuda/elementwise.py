"""Launches what the decoder does between its matrix products: norms, the gate, and rope with the write of K and V.

Each wrapper is built once for a format (and the cache's shape) and checks what comes with a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor.backends.cuda.formats import FP8, check, format_name
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.sources import KernelSource, kernel

_MAX_THREADS = 1024
_GOOD_THREADS = 512  # a row takes more vectors a thread rather than more threads than this
ITEMS = (1, 2, 4)  # vectors of a row that a thread keeps in registers


def rms_norm_source(scalar: str, items: int) -> KernelSource:
    return kernel("rms_norm", "rms_norm.cu", SCALAR=scalar, ITEMS=items)


def silu_mul_source(scalar: str) -> KernelSource:
    return kernel("silu_mul", "silu_mul.cu", SCALAR=scalar)


def rope_source(scalar: str, kv: str, head_size: int, block_size: int) -> KernelSource:
    return kernel("rope_kv_write", "rope_kv_write.cu", SCALAR=scalar, KV=kv, HEAD_SIZE=head_size, BLOCK_SIZE=block_size)


class RmsNorm:
    """norm(x + residual) * weight, and the sum; see Backend.rms_norm."""

    def __init__(self, launcher: Launcher, dtype: torch.dtype) -> None:
        self._launcher = launcher
        self._dtype = dtype
        self._scalar = format_name(dtype)

    def geometry(self, hidden: int) -> tuple[KernelSource, int]:
        """The kernel for rows of this size, and its threads. Raises ValueError for a size it cannot take."""
        vectors, rest = divmod(hidden * self._dtype.itemsize, 16)
        if rest:
            raise ValueError(f"rows of {hidden} {self._dtype} are no multiple of 16 bytes")
        items = next((items for items in ITEMS if -(-vectors // items) <= _GOOD_THREADS), ITEMS[-1])
        threads = -(-vectors // items)
        if threads > _MAX_THREADS:
            raise ValueError(f"a norm over {hidden} {self._dtype} is more than a block keeps in registers")
        return rms_norm_source(self._scalar, items), -(-threads // 32) * 32

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual, out and total [num_rows, hidden], weight [hidden]. Returns (out, total); without a residual, the
        total is x itself. `out` and `total` may be x or residual."""
        num_rows, hidden = x.shape
        check("x", x, self._dtype, None, None)
        check("weight", weight, self._dtype, hidden)
        out = torch.empty_like(x) if out is None else out
        check("out", out, self._dtype, num_rows, hidden)
        if residual is None:
            total = x
        else:
            check("residual", residual, self._dtype, num_rows, hidden)
            total = torch.empty_like(x) if total is None else total
            check("total", total, self._dtype, num_rows, hidden)
        source, threads = self.geometry(hidden)
        self._launcher.launch(
            source,
            (num_rows, 1, 1),
            (threads, 1, 1),
            0,
            [out, total, x, residual, weight, np.int32(hidden), np.float32(eps)],
        )
        return out, total


class SiluMul:
    """silu(first half) * second half; see Backend.silu_mul."""

    def __init__(self, launcher: Launcher, dtype: torch.dtype) -> None:
        self._launcher = launcher
        self._dtype = dtype
        self._source = silu_mul_source(format_name(dtype))

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """gate_up [num_rows, 2 * size] -> [num_rows, size]; size a multiple of 16 bytes."""
        check("gate_up", gate_up, self._dtype, None, None)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        row_bytes = size * self._dtype.itemsize
        assert row_bytes % 16 == 0, f"rows of {size} {self._dtype} are no multiple of 16 bytes"
        out = gate_up.new_empty(num_rows, size) if out is None else out
        check("out", out, self._dtype, num_rows, size)
        grid = (num_rows, -(-row_bytes // (256 * 16)), 1)
        self._launcher.launch(self._source, grid, (256, 1, 1), 0, [out, gate_up, np.int32(size)])
        return out


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The heads of a qkv row, and the cache they go to."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # the same, or float8_e4m3fn

    def __post_init__(self) -> None:
        if self.head_size % 16 or self.head_size > 256:
            raise ValueError(f"head size {self.head_size} is no multiple of 16 up to 256")
        if self.kv_dtype not in (self.dtype, FP8):
            raise ValueError(f"a cache of {self.kv_dtype} is not written from {self.dtype}")

    @property
    def source(self) -> KernelSource:
        return rope_source(format_name(self.dtype), format_name(self.kv_dtype), self.head_size, self.block_size)

    @property
    def heads_per_block(self) -> int:
        """128 threads, in groups of the next power of two above the lanes that a head needs."""
        return 128 // (1 << (self.head_size // 16 - 1).bit_length())


class RopeKvWrite:
    """Rotates q and k, writes K and V; see Backend.rope_and_write_kv."""

    def __init__(self, launcher: Launcher, spec: RopeSpec) -> None:
        self.spec = spec
        self._launcher = launcher
        self._source = spec.source

    def prepare(self) -> None:
        self._launcher.prepare(self._source)

    def __call__(
        self,
        q_out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """q_out [num_tokens, num_heads, head_size]; caches [num_blocks, num_kv_heads, block_size, head_size]; qkv
        [num_tokens, (num_heads + 2 * num_kv_heads) * head_size], rows may lie apart; cos_sin [max_positions, head_size]
        fp32; positions and slot_mapping [num_tokens] int64, slot -1 writes nothing; norm weights [head_size]. An fp8
        cache is given value / scale."""
        spec = self.spec
        num_tokens, heads = len(qkv), spec.num_heads + 2 * spec.num_kv_heads
        check("a row of qkv", qkv[:1], spec.dtype, None, heads * spec.head_size)
        assert qkv.stride(0) * qkv.element_size() % 16 == 0, "rows of qkv are not aligned to 16 bytes"
        check("q_out", q_out, spec.dtype, num_tokens, spec.num_heads, spec.head_size)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check(name, cache, spec.kv_dtype, None, spec.num_kv_heads, spec.block_size, spec.head_size)
        check("cos_sin", cos_sin, torch.float32, None, spec.head_size)
        check("positions", positions, torch.int64, num_tokens)
        check("slot_mapping", slot_mapping, torch.int64, num_tokens)
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            if weight is not None:
                check(name, weight, spec.dtype, spec.head_size)
        self._launcher.launch(
            self._source,
            (-(-num_tokens * heads // spec.heads_per_block), 1, 1),
            (128, 1, 1),
            0,
            [
                q_out,
                k_cache,
                v_cache,
                qkv,
                cos_sin,
                positions,
                slot_mapping,
                q_norm,
                k_norm,
                np.int32(num_tokens),
                np.int32(spec.num_heads),
                np.int32(spec.num_kv_heads),
                np.int64(qkv.stride(0)),
                np.float32(norm_eps),
                np.float32(k_scale),
                np.float32(v_scale),
            ],
        )
