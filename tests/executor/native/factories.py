"""A step over a paged cache whose every unused number is NaN, with K and V in float64 beside it for the oracle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.backends.base import AttentionMetadata, KVCacheSpec
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.native.library import Level, open_library

LEVELS: tuple[Level, ...] = open_library().levels
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 1e-2)}  # rtol, atol


@dataclass(frozen=True)
class Shape:
    """Of a model's attention."""

    group: int = 3  # query heads of one K/V head
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Span:
    """One sequence of the step: its length, and how many of its last tokens are queries."""

    seq_len: int
    query_len: int = 1
    shares: int = 0  # leading blocks that are those of the sequence before


class Step:
    """Queries, cache and metadata; `expected` is dense attention in float64."""

    def __init__(self, spans: Sequence[Span], shape: Shape = Shape(), query_scale: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(len(spans) + spans[0].seq_len)
        self.shape, self.spans = shape, spans
        self.scale = 1 / math.sqrt(shape.head_size)
        counts = [-(-span.seq_len // shape.block_size) for span in spans]
        num_blocks = sum(counts) + 3
        cache = torch.full((2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size), torch.nan)
        self.cache = cache.to(shape.dtype)
        free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        tables: list[list[int]] = []
        self.contents: list[torch.Tensor] = []  # [2, seq_len, num_kv_heads, head_size]
        for span, count in zip(spans, counts, strict=True):
            kv = torch.randn(2, span.seq_len, shape.num_kv_heads, shape.head_size, generator=generator)
            kv = kv.to(shape.dtype)
            shared = span.shares * shape.block_size
            table = tables[-1][: span.shares] if tables else []
            if shared:
                kv[:, :shared] = self.contents[-1][:, :shared]
            table = table + [free.pop() for _ in range(count - len(table))]
            for position in range(span.seq_len):
                block, offset = table[position // shape.block_size], position % shape.block_size
                self.cache[:, block, :, offset] = kv[:, position]
            tables.append(table)
            self.contents.append(kv)
        num_tokens = sum(span.query_len for span in spans)
        heads = shape.group * shape.num_kv_heads
        q = torch.randn(num_tokens, heads, shape.head_size, generator=generator) * query_scale
        self.q = q.to(shape.dtype)
        width = max(counts) + 1
        positions = [p for span in spans for p in range(span.seq_len - span.query_len, span.seq_len)]
        self.metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *itertools.accumulate(span.query_len for span in spans)]).int(),
            seq_lens=torch.tensor([span.seq_len for span in spans], dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.tensor(positions),
            max_query_len=max(span.query_len for span in spans),
            max_seq_len=max(span.seq_len for span in spans),
        )

    def backend(self, level: Level | None = None, deterministic: bool = False, native: bool = True) -> CpuBackend:
        shape = self.shape
        backend = CpuBackend(shape.dtype, deterministic, native, level)
        num_blocks = self.cache.shape[1]
        backend.allocate_kv_cache(
            KVCacheSpec(1, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size, shape.dtype)
        )
        backend.cache.keys[0].copy_(self.cache[0])
        backend.cache.values[0].copy_(self.cache[1])
        return backend

    def attention(self, backend: CpuBackend, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        return backend.paged_attention(0, self.q, self.metadata, self.scale, window, softcap)

    def expected(self, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        parts = self.q.double().split([span.query_len for span in self.spans])
        return torch.cat([self._dense(q, kv, window, softcap) for q, kv in zip(parts, self.contents, strict=True)])

    def _dense(self, q: torch.Tensor, kv: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
        k, v = (x.double().repeat_interleave(self.shape.group, dim=1) for x in kv)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        queries = torch.arange(len(k) - len(q), len(k))[:, None]
        keys = torch.arange(len(k))
        hidden = (keys > queries) | (keys <= queries - (window or len(k)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def assert_right(self, backend: CpuBackend, window: int | None = None, softcap: float | None = None) -> None:
        rtol, atol = TOLERANCES[self.shape.dtype]
        out = self.attention(backend, window, softcap)
        torch.testing.assert_close(out.double(), self.expected(window, softcap), rtol=rtol, atol=atol)
