"""The native ops over tensors: shapes and formats are checked here, once, and pointers handed on.

Owns the calls, and for each step the addresses of its metadata. Knows nothing of models; a cache or a tensor that the
library does not serve is told by `serves`, and the caller then takes the ops in plain torch.
"""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch

from executor.backends.base import AttentionMetadata, KVCacheSpec
from executor.backends.cpu.native.library import (
    AttentionArguments,
    Batch,
    Cache,
    Format,
    LargestArguments,
    Level,
    Library,
    NoLibrary,
    NormArguments,
    QuantizedArguments,
    RopeArguments,
    Runtime,
    SiluArguments,
    open_library,
)
from executor.backends.cpu.quantized import QuantizedLinear
from executor.sampler import Floats, Ints

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
BLOCK_UNIT = 16  # keys that lie in one block for certain
MAX_HEAD_SIZE = 256
MAX_GROUP = 48  # heads of one K/V head


class NativeKernels:
    """The library at one level, for tensors of one format. Results of a row do not depend on the rows beside it, except
    where attention may split a long context or read a shared prefix once."""

    def __init__(self, library: Library, dtype: torch.dtype, level: Level) -> None:
        if level not in library.levels:
            raise NoLibrary(
                f"this CPU does not run {level.name}; it runs {', '.join(it.name for it in library.levels)}"
            )
        self.level = level
        self._calls = library.calls
        self._parallel = library.parallel
        self._format = FORMATS[dtype]
        self._runtime = Runtime(level, 1, library.parallel)
        self._batch: tuple[AttentionMetadata, Batch] | None = None

    def paged_attention(
        self,
        cache: Cache,
        q: torch.Tensor,
        metadata: AttentionMetadata,
        softmax_scale: float,
        sliding_window: int | None,
        softcap: float | None,
        may_split: bool,
    ) -> torch.Tensor:
        """q [num_tokens, num_heads, head_size], same shape back; see Backend.paged_attention."""
        q = q.contiguous()
        out = torch.empty_like(q)
        arguments = AttentionArguments(
            q.shape[1], sliding_window or 0, softmax_scale, softcap or 0.0, may_split, q.data_ptr(), out.data_ptr()
        )
        self._calls.octavo_attention(
            byref(self._threads()), byref(self._step(metadata)), byref(cache), byref(arguments)
        )
        return out

    def rope_and_write_kv(
        self,
        cache: Cache,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor:
        """See Backend.rope_and_write_kv."""
        qkv = qkv.contiguous()
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
        queries = qkv.new_empty((len(qkv), num_heads, cache.head_size))
        arguments = RopeArguments(
            num_heads,
            norm_eps,
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            queries.data_ptr(),
        )
        self._calls.octavo_rope(byref(self._threads()), byref(self._step(metadata)), byref(cache), byref(arguments))
        return queries

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [num_tokens, hidden]; see Backend.rms_norm."""
        x = x.contiguous()
        out, total = torch.empty_like(x), x
        if residual is not None:
            residual, total = residual.contiguous(), torch.empty_like(x)
        arguments = NormArguments(
            self._format,
            x.shape[0],
            x.shape[1],
            eps,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            None if residual is None else total.data_ptr(),
        )
        self._calls.octavo_norm(byref(self._threads()), byref(arguments))
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [num_tokens, 2 * size]; see Backend.silu_mul."""
        gate_up = gate_up.contiguous()
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty((len(gate_up), size))
        arguments = SiluArguments(self._format, len(gate_up), size, gate_up.data_ptr(), out.data_ptr())
        self._calls.octavo_silu_mul(byref(self._threads()), byref(arguments))
        return out

    def quantized_linear(self, x: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
        """x [num_rows, in_features]; see Backend.linear."""
        x = x.contiguous()
        out = x.new_empty((len(x), linear.out_features))
        arguments = QuantizedArguments(
            self._format,
            linear.kind,
            len(x),
            linear.in_features,
            linear.out_features,
            x.data_ptr(),
            linear.tiles.data_ptr(),
            None if linear.bias is None else linear.bias.data_ptr(),
            out.data_ptr(),
        )
        self._calls.octavo_quantized_linear(byref(self._threads()), byref(arguments))
        return out

    def largest(self, rows: Floats) -> tuple[Ints, Floats]:
        """rows [n, size] float32 -> see `executor.sampler.Largest`."""
        rows = np.ascontiguousarray(rows)
        places, values = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        arguments = LargestArguments(
            rows.shape[0], rows.shape[1], rows.ctypes.data, places.ctypes.data, values.ctypes.data
        )
        self._calls.octavo_largest(byref(self._threads()), byref(arguments))
        return places, values

    def layer(self, spec: KVCacheSpec, keys: torch.Tensor, values: torch.Tensor) -> Cache:
        """One layer of a cache that `serves` accepts; the tensors must outlive it."""
        assert keys.is_contiguous()
        assert values.is_contiguous()
        return Cache(
            self._format, spec.num_kv_heads, spec.block_size, spec.head_size, keys.data_ptr(), values.data_ptr()
        )

    def _threads(self) -> Runtime:
        self._runtime.num_threads = torch.get_num_threads()
        return self._runtime

    def _step(self, metadata: AttentionMetadata) -> Batch:
        """The addresses of this step's tensors, which the metadata keeps alive."""
        if self._batch is None or self._batch[0] is not metadata:
            self._batch = (metadata, _batch(metadata))
        return self._batch[1]


def load_kernels(dtype: torch.dtype, level: Level | None = None) -> NativeKernels:
    """At the level given, or at the best that this CPU runs. Raises NoLibrary."""
    library = open_library()
    return NativeKernels(library, dtype, library.levels[-1] if level is None else level)


def serves(spec: KVCacheSpec) -> bool:
    """Whether the library reads and writes such a cache."""
    return (
        spec.dtype in FORMATS
        and spec.block_size % BLOCK_UNIT == 0
        and spec.head_size % 2 == 0
        and spec.head_size <= MAX_HEAD_SIZE
    )


def _batch(metadata: AttentionMetadata) -> Batch:
    for tensor, dtype in (
        (metadata.query_start_loc, torch.int32),
        (metadata.seq_lens, torch.int32),
        (metadata.block_tables, torch.int32),
        (metadata.slot_mapping, torch.int64),
        (metadata.positions, torch.int64),
    ):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    return Batch(
        len(metadata.seq_lens),
        len(metadata.positions),
        metadata.block_tables.shape[1],
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
        metadata.slot_mapping.data_ptr(),
        metadata.positions.data_ptr(),
    )
