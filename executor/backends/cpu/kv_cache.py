"""The paged K/V cache in main memory: one tensor for K and one for V in each layer.

Owns the layout [num_blocks, num_kv_heads, block_size, head_size] and how a list of blocks becomes rows of it. Knows
nothing of who holds which block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from executor.backends.base import KVCacheSpec, OutOfMemory
from executor.sizes import format_bytes


class KVCache:
    """K and V of all layers, zeroed at first."""

    def __init__(self, spec: KVCacheSpec) -> None:
        shape = (spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size)
        try:
            self.keys = [_zeros(shape, spec.dtype) for _ in range(spec.num_layers)]
            self.values = [_zeros(shape, spec.dtype) for _ in range(spec.num_layers)]
        except MemoryError as error:
            size = format_bytes(spec.num_blocks * spec.bytes_per_block)
            raise OutOfMemory(f"a K/V cache of {spec.num_blocks} blocks needs {size}: {error}") from error
        self.spec = spec
        self._heads = torch.arange(spec.num_kv_heads)

    def token_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """slots [num_tokens] int64 -> rows [num_tokens * num_kv_heads] of a cache seen as [-1, head_size]."""
        block_size = self.spec.block_size
        blocks, offsets = slots // block_size, slots % block_size
        rows = (blocks[:, None] * self.spec.num_kv_heads + self._heads) * block_size + offsets[:, None]
        return rows.flatten()

    def block_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """blocks [n, num] int64 -> rows [n * num_kv_heads * num] of a cache seen as [-1, block_size * head_size]: each
        head's blocks stand together, so that what is gathered is [n, num_kv_heads, num * block_size, head_size]."""
        rows = blocks[:, None, :] * self.spec.num_kv_heads + self._heads[:, None]
        return rows.flatten()

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [num_tokens, num_kv_heads, head_size], rows as `token_rows` gives them."""
        head_size = self.spec.head_size
        for cache, new in ((self.keys[layer], k), (self.values[layer], v)):
            cache.view(-1, head_size).index_copy_(0, rows, new.reshape(-1, head_size))

    def gather(self, cache: torch.Tensor, rows: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Copies whole blocks: rows as `block_rows` gives them -> [n, num_kv_heads, num * block_size, head_size]."""
        spec = self.spec
        gathered = cache.view(-1, spec.block_size * spec.head_size).index_select(0, rows)
        return gathered.view(num_sequences, spec.num_kv_heads, -1, spec.head_size)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        source, destination = torch.tensor(sources), torch.tensor(destinations)
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, destination, cache.index_select(0, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the kernel provides when they are first written; torch's own would touch them all at once."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
