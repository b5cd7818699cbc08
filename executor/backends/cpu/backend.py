"""The Backend of a CPU: weights packed by oneDNN, a paged K/V cache in main memory, native kernels for the rest.

Owns the cache and the number formats. Where the native library is missing, or does not serve the cache's shape, the
same ops run in plain torch, which is also what the library is tested against. Two modes: the fast one, and the
deterministic one, in which a row's result does not depend on the other rows of the step. The native ops keep that by
construction, as long as attention splits no context and shares no prefix; those in torch need ways of their own (see
deterministic.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from executor import sampler
from executor.backends.base import AttentionMetadata, BlockWeight, HostMark, KVCacheSpec, Linear
from executor.backends.cpu import attention, deterministic, linear, quantized
from executor.backends.cpu.attention import StepLayout, step_layout
from executor.backends.cpu.deterministic import DeterministicLayout, deterministic_layout
from executor.backends.cpu.kv_cache import KVCache
from executor.backends.cpu.native.kernels import MAX_GROUP, NativeKernels, load_kernels, serves
from executor.backends.cpu.native.library import Cache, Level, NoLibrary
from executor.backends.cpu.quantized import QuantizedLinear

DTYPES = (torch.float32, torch.bfloat16)


class CpuBackend:
    """Ops of a decoder on a CPU; see `executor.backends.base.Backend` for the contracts."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        native: bool = True,
        level: Level | None = None,
        quantization: str = "none",
    ) -> None:
        """native: with the library where it was built, at the level given or the best that this CPU runs. Raises
        NoLibrary for a level that cannot be had. quantization: of the weights of products, one of QUANTIZATIONS."""
        if dtype not in DTYPES:
            raise ValueError(f"the CPU backend computes in float32 or bfloat16, not {dtype}")
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.deterministic = deterministic
        assert quantization in quantized.QUANTIZATIONS
        self._quantization = quantization
        self.native_missing: str | None = None  # why the library is not used though it was asked for
        self._native: NativeKernels | None = None
        if native:
            try:
                self._native = load_kernels(dtype, level)
            except NoLibrary as error:
                if level is not None:
                    raise
                self.native_missing = str(error)
        self._native_layers: list[Cache] = []  # empty where the library does not serve the cache
        self._checked: set[tuple[int, int]] = set()  # shapes of products known to be deterministic
        self._cache: KVCache | None = None
        self._layout: tuple[AttentionMetadata, StepLayout | DeterministicLayout] | None = None

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "allocate_kv_cache comes first"
        return self._cache

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        self._cache = None  # an old cache must not stand beside the new one
        self._native_layers = []
        self._cache = KVCache(spec)
        self._layout = None
        if self._native is not None and serves(spec):
            caches = zip(self._cache.keys, self._cache.values, strict=True)
            self._native_layers = [self._native.layer(spec, keys, values) for keys, values in caches]

    @property
    def block_kinds(self) -> frozenset[str]:
        return quantized.KINDS if self._quantization == "gguf" else frozenset()

    def prepare_linear(self, weight: torch.Tensor | BlockWeight, bias: torch.Tensor | None) -> Linear:
        bias = None if bias is None else bias.to(self.dtype)
        if self._quantization == "int8" and isinstance(weight, torch.Tensor):
            weight = quantized.quantize(weight)
        if isinstance(weight, torch.Tensor):
            packed = linear.pack(weight.to(self.dtype), bias)
            self._check(packed)
            return packed
        blocks = quantized.pack(weight, bias)
        if self._native is None:
            self._check(self._dequantized(blocks))
        return blocks

    def _dequantized(self, blocks: QuantizedLinear) -> linear.PackedLinear:
        """Without the native library a product unpacks its weights anew each time: right, small, and slow."""
        return linear.pack(quantized.dequantize(blocks).to(self.dtype), blocks.bias)

    def _check(self, packed: linear.PackedLinear) -> None:
        shape = (packed.in_features, packed.out_features)
        if self.deterministic and shape not in self._checked:
            deterministic.check_tiles(packed, self.dtype)
            self._checked.add(shape)

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, table)

    def linear(self, x: torch.Tensor, linear_: Linear) -> torch.Tensor:
        if isinstance(linear_, QuantizedLinear):
            if self._native is not None:
                return self._native.quantized_linear(x, linear_)
            linear_ = self._dequantized(linear_)
        assert isinstance(linear_, linear.PackedLinear)
        return deterministic.tiled_linear(x, linear_) if self.deterministic else linear.apply(x, linear_)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._native is not None:
            return self._native.rms_norm(x, weight, eps, residual)
        total = x if residual is None else x + residual
        return self._norm(total, weight, eps), total

    def rope_and_write_kv(
        self,
        layer: int,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> torch.Tensor:
        if self._native is not None and self._native_layers:
            return self._native.rope_and_write_kv(
                self._native_layers[layer], qkv, cos_sin, metadata, num_heads, q_norm, k_norm, norm_eps
            )
        spec = self.cache.spec
        heads = qkv.view(len(qkv), -1, spec.head_size)
        q, k, v = torch.split(heads, [num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if q_norm is not None:
            q = self._norm(q, q_norm, norm_eps)
        if k_norm is not None:
            k = self._norm(k, k_norm, norm_eps)
        cos, sin = cos_sin[metadata.positions][:, None].chunk(2, dim=-1)  # [num_tokens, 1, head_size / 2]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self.cache.write(layer, self._step(metadata).write_rows, k, v)
        return q

    def paged_attention(
        self,
        layer: int,
        q: torch.Tensor,
        metadata: AttentionMetadata,
        softmax_scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self._native is not None and self._native_layers and q.shape[1] <= MAX_GROUP * self.cache.spec.num_kv_heads:
            return self._native.paged_attention(
                self._native_layers[layer],
                q,
                metadata,
                softmax_scale,
                sliding_window,
                softcap,
                may_split=not self.deterministic,
            )
        layout = self._step(metadata)
        if isinstance(layout, DeterministicLayout):
            return deterministic.paged_attention(self.cache, layer, q, layout, softmax_scale, sliding_window, softcap)
        return attention.paged_attention(self.cache, layer, q, layout, softmax_scale, sliding_window, softcap)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return deterministic.silu_mul(gate, up) if self.deterministic else functional.silu(gate).mul_(up)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if sources:
            self.cache.copy_blocks(sources, destinations)

    def sample(self, logits: torch.Tensor, batch: sampler.SamplingBatch) -> sampler.SamplerOutput:
        return sampler.sample(logits, batch, None if self._native is None else self._native.largest)

    def mark(self) -> HostMark:
        return HostMark()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self.deterministic:
            return deterministic.rms_norm(x, weight, eps)
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def _step(self, metadata: AttentionMetadata) -> StepLayout | DeterministicLayout:
        """The layout of this step, worked out by its first layer; a step has a metadata object of its own."""
        if self._layout is None or self._layout[0] is not metadata:
            layout = deterministic_layout if self.deterministic else step_layout
            self._layout = (metadata, layout(self.cache, metadata))
        return self._layout[1]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, head_size], cos and sin [num_tokens, 1, head_size / 2] fp32: turns the pairs (x[i],
    x[i + head_size / 2])."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
