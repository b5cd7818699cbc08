"""The attention kernels of one model: made once its heads are known, called for each layer of a step.

Owns which rows go to which kernel: rows of one query to decode, chunks to prefill, each writing its own rows of one
output. Knows the cache's shape, not the cache.
"""

from __future__ import annotations

import torch

from executor.backends.base import KVCacheSpec
from executor.backends.cuda.attention_decode import DecodeAttention, DecodeShape, decode_launch
from executor.backends.cuda.attention_prefill import PrefillAttention, PrefillSpec
from executor.backends.cuda.elementwise import RopeKvWrite, RopeSpec
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.step import Step, WorkShape


class Attention:
    """Kernels for `num_heads` query heads over a cache."""

    def __init__(
        self,
        launcher: Launcher,
        num_heads: int,
        cache: KVCacheSpec,
        dtype: torch.dtype,
        num_sms: int,
        deterministic: bool,
    ) -> None:
        """Raises ValueError for sizes that no kernel is made for."""
        sizes = (num_heads, cache.num_kv_heads, cache.head_size, cache.block_size, dtype, cache.dtype)
        self.num_heads = num_heads
        self.rope_and_write_kv = RopeKvWrite(launcher, RopeSpec(*sizes))
        shape = DecodeShape(*sizes)
        self._decode = DecodeAttention(launcher, shape)
        self._prefill = PrefillAttention(launcher, PrefillSpec(*sizes))
        # Query heads of one K/V head that a thread block has no room for go to further blocks.
        groups = -(-shape.heads_per_kv_head // decode_launch(shape, launcher.shared_limit).heads)
        self.work_shape = WorkShape(
            ctas_per_item=cache.num_kv_heads * groups,
            num_ctas=num_sms * self._decode.blocks_per_multiprocessor,
            tile_tokens=self._prefill.spec.tile_tokens,
            deterministic=deterministic,
        )

    def prepare(self) -> None:
        """Compiles and loads all kernels, those too that a first step would not need."""
        self.rope_and_write_kv.prepare()
        self._decode.prepare()
        self._prefill.prepare()

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        step: Step,
        softmax_scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """q [num_tokens, num_heads, head_size] -> the same shape; rows that are padding come back with anything."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.prefill is not None:
            chunks = step.prefill
            self._prefill(
                out,
                q,
                k_cache,
                v_cache,
                chunks.tiles,
                chunks.query_start_loc,
                chunks.seq_lens,
                chunks.block_tables,
                softmax_scale,
                sliding_window,
                softcap,
            )
        if step.decode is not None:
            self._decode(out, q, k_cache, v_cache, step.decode, softmax_scale, sliding_window, softcap)
        return out
