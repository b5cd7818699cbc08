"""Both attentions of the CPU backend against a dense one written in a few lines, in what no model of the tests uses."""

from __future__ import annotations

import pytest
import torch

from executor.backends.base import AttentionMetadata, KVCacheSpec
from executor.backends.cpu.backend import CpuBackend

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 6, 2, 32


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """q [num_queries, heads, size], the last ones of k and v [seq_len, kv_heads, size]; float64."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(ratio, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * HEAD_SIZE**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(len(k) - len(q), len(k))[:, None]
    keys = torch.arange(len(k))
    hidden = (keys > queries) | (keys <= queries - (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).float()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_mixed_batches_attend_to_their_own_keys(deterministic: bool, window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    seq_lens, query_lens = [1, 150, 33, 64, 90, 16], [1, 1, 33, 1, 20, 3]
    backend = CpuBackend(deterministic=deterministic)
    backend.allocate_kv_cache(KVCacheSpec(1, 64, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, torch.float32))
    keys, values = backend.cache.keys[0], backend.cache.values[0]
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    free = torch.randperm(63).add(1).tolist()
    tables = torch.zeros(len(seq_lens), 10, dtype=torch.int32)
    q, expected = [], []
    for index, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        k, v = torch.randn(2, seq_len, NUM_KV_HEADS, HEAD_SIZE)
        queries = torch.randn(query_len, NUM_HEADS, HEAD_SIZE) * 3
        for block in range(-(-seq_len // BLOCK_SIZE)):
            tables[index, block] = block_id = free.pop()
            part = slice(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, seq_len))
            keys[block_id, :, : part.stop - part.start] = k[part].transpose(0, 1)
            values[block_id, :, : part.stop - part.start] = v[part].transpose(0, 1)
        q.append(queries)
        expected.append(dense_attention(queries, k, v, window, softcap))
    positions = [
        position
        for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    out = backend.paged_attention(0, torch.cat(q), metadata, HEAD_SIZE**-0.5, window, softcap)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)
