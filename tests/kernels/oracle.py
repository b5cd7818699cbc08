"""What attention should be, in float64 on the inputs as they were rounded, and how far a kernel may be from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WEIGHTS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
_OFFSETS = {torch.bfloat16: 1e-3, torch.float16: 5e-4, torch.float32: 1e-5}


def gathered(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of one sequence, [length, num_kv_heads, head_size] float64."""
    blocks = table[: -(-length // cache.shape[2])].tolist()
    pieces = [cache[block].double().transpose(0, 1) for block in blocks]
    if not pieces:
        return torch.zeros((0, cache.shape[1], cache.shape[3]), dtype=torch.float64)
    return torch.cat(pieces)[:length]


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last positions: q [n, num_heads, head_size], keys and values [length, num_kv_heads,
    head_size], q's last token at position length - 1. Returns (out [n, num_heads, head_size], lse [n, num_heads])."""
    per_kv_head = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(per_kv_head, 1), values.repeat_interleave(per_kv_head, 1)
    logits = torch.einsum("nhd,lhd->nhl", q.double(), keys) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    length = keys.shape[0]
    query = torch.arange(length - q.shape[0], length)[:, None]
    key = torch.arange(length)[None, :]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    logits = logits.masked_fill(hidden[:, None, :], float("-inf"))
    return torch.einsum("nhl,lhd->nhd", torch.softmax(logits, -1), values), torch.logsumexp(logits, -1)


def attention_tolerance(dtype: torch.dtype, values: Sequence[torch.Tensor]) -> float:
    """For outputs of `dtype`: a weight's rounding times the largest value, and an offset for sums."""
    largest = max((float(value.abs().max()) for value in values if value.numel()), default=0.0)
    return _WEIGHTS[dtype] * largest + _OFFSETS[dtype]


LSE_TOLERANCE = 1e-3
