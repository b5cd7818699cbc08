"""Paged attention in plain torch: decode rows batched together, prefill chunks one sequence at a time.

Owns what the layers of a step share (`StepLayout`: which rows of the cache are read and written), worked out once.
Nothing past a sequence's length reaches a result, whatever bits stand there: stale slots and padding may hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from executor.backends.base import AttentionMetadata
from executor.backends.cpu.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each and lengths alike, padded to a common number of blocks."""

    queries: torch.Tensor  # [n] int64: their rows in the step
    seq_lens: torch.Tensor  # [n] int64
    cache_rows: torch.Tensor  # [n * num_kv_heads * max_blocks] int64
    stale_rows: (
        torch.Tensor
    )  # int64: positions past a sequence's end, rows of what is gathered, seen as [-1, head_size]
    length: int  # max_blocks * block_size


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several queries of one sequence, the last ones of its `seq_len` tokens."""

    start: int  # its rows in the step: [start, end)
    end: int
    seq_len: int
    cache_rows: torch.Tensor  # [num_kv_heads * num_blocks] int64


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step's batch, in rows of the cache."""

    write_rows: torch.Tensor  # [num_tokens * num_kv_heads] int64
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]


def step_layout(cache: KVCache, metadata: AttentionMetadata) -> StepLayout:
    starts = metadata.query_start_loc.tolist()
    seq_lens = metadata.seq_lens.tolist()
    groups: dict[int, list[int]] = {}
    prefills = []
    for sequence, seq_len in enumerate(seq_lens):
        start, end = starts[sequence], starts[sequence + 1]
        num_blocks = -(-seq_len // cache.spec.block_size)
        if end - start == 1:
            # Lengths within a factor of two share a group: padding at most doubles what is read.
            groups.setdefault(num_blocks.bit_length(), []).append(sequence)
        elif end > start:
            blocks = metadata.block_tables[sequence : sequence + 1, :num_blocks].long()
            prefills.append(PrefillChunk(start, end, seq_len, cache.block_rows(blocks)))
    decodes = [_decode_group(cache, metadata, torch.tensor(members)) for members in groups.values()]
    return StepLayout(cache.token_rows(metadata.slot_mapping), decodes, prefills)


def _decode_group(cache: KVCache, metadata: AttentionMetadata, members: torch.Tensor) -> DecodeGroup:
    seq_lens = metadata.seq_lens[members].long()
    max_blocks = -(-int(seq_lens.max()) // cache.spec.block_size)
    length = max_blocks * cache.spec.block_size
    stale = (torch.arange(length) >= seq_lens[:, None])[:, None].expand(-1, cache.spec.num_kv_heads, -1)
    return DecodeGroup(
        queries=metadata.query_start_loc[members].long(),
        seq_lens=seq_lens,
        cache_rows=cache.block_rows(metadata.block_tables[members, :max_blocks].long()),
        stale_rows=stale.flatten().nonzero().flatten(),
        length=length,
    )


def paged_attention(
    cache: KVCache,
    layer: int,
    q: torch.Tensor,
    layout: StepLayout,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [num_tokens, num_heads, head_size], same shape back; see Backend.paged_attention."""
    out = torch.empty_like(q)
    keys, values = cache.keys[layer], cache.values[layer]
    for group in layout.decodes:
        n = len(group.queries)
        k = cache.gather(keys, group.cache_rows, n)
        v = cache.gather(values, group.cache_rows, n)
        v.view(-1, v.shape[-1]).index_fill_(0, group.stale_rows, 0)  # its weight is 0, but 0 * NaN is NaN
        positions = torch.arange(group.length)
        visible = visible_keys(group.seq_lens[:, None] - 1, positions, sliding_window)[:, None, None]
        grouped = q[group.queries].view(n, k.shape[1], -1, k.shape[3])  # the heads of one K/V head are its rows
        attended = _attend(grouped, k, v, visible, softmax_scale, softcap)
        out[group.queries] = attended.reshape(n, *q.shape[1:])
    for chunk in layout.prefills:
        k = cache.gather(keys, chunk.cache_rows, 1)[:, :, : chunk.seq_len]
        v = cache.gather(values, chunk.cache_rows, 1)[:, :, : chunk.seq_len]
        queries = q[chunk.start : chunk.end].transpose(0, 1)[None]
        out[chunk.start : chunk.end] = _prefill(queries, k, v, softmax_scale, sliding_window, softcap)[0].transpose(
            0, 1
        )
    return out


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [1, num_heads, num_queries, head_size], k and v [1, num_kv_heads, seq_len, head_size] -> as q."""
    num_queries, seq_len = q.shape[2], k.shape[2]
    whole = num_queries == seq_len and (sliding_window is None or sliding_window >= seq_len)
    visible = None
    if not whole or softcap is not None:
        positions = torch.arange(seq_len)
        visible = visible_keys(positions[seq_len - num_queries :, None], positions, sliding_window)
    if softcap is not None:
        ratio = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        return _attend(q, k, v, visible, softmax_scale, softcap)
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=softmax_scale, enable_gqa=True
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    softmax_scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Dense attention, softmax in fp32; what is not visible has no weight, be it NaN."""
    scores = (q @ k.transpose(-1, -2)).float() * softmax_scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def visible_keys(
    query_positions: torch.Tensor, key_positions: torch.Tensor, sliding_window: int | None
) -> torch.Tensor:
    """[..., 1] against [num_keys] -> bool: keys not later than the query, of the last `sliding_window` ones."""
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible = visible & (key_positions > query_positions - sliding_window)
    return visible
