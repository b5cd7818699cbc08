"""How many bytes a kernel must move and how many operations it must do: lower bounds, by formula.

What is read twice by design (a shared prefix by two thread blocks) counts once; what lies in registers or shared memory
counts nothing. Rates in the benchmark's table are these numbers over measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What one launch costs at least."""

    num_bytes: int  # read and written
    num_flops: int = 0  # on tensor cores; 0 for what memory bounds


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    item_bytes: int  # of q and out
    kv_item_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.kv_item_bytes

    @property
    def query_bytes_per_token(self) -> int:
        """q read, out written."""
        return 2 * self.num_heads * self.head_size * self.item_bytes


def decode(shape: AttentionShape, seq_lens: Sequence[int]) -> Cost:
    """One query for each sequence."""
    return Cost(sum(seq_lens) * shape.kv_bytes_per_token + len(seq_lens) * shape.query_bytes_per_token)


def prefill(shape: AttentionShape, chunks: Sequence[tuple[int, int]]) -> Cost:
    """Causal attention of chunks (cached tokens, queries): two products over every visible pair."""
    pairs = sum(queries * cached + queries * (queries + 1) // 2 for cached, queries in chunks)
    tokens = sum(queries for _, queries in chunks)
    keys = sum(cached + queries for cached, queries in chunks)
    return Cost(
        keys * shape.kv_bytes_per_token + tokens * shape.query_bytes_per_token,
        4 * shape.num_heads * shape.head_size * pairs,
    )


def rope_kv_write(shape: AttentionShape, num_tokens: int) -> Cost:
    """The qkv row read, q and the cached K and V written, the table of angles and the slot read."""
    row = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size * shape.item_bytes
    written = shape.num_heads * shape.head_size * shape.item_bytes + shape.kv_bytes_per_token
    return Cost(num_tokens * (row + written + 4 * shape.head_size + 16))


def add_rms_norm(num_tokens: int, hidden: int, item_bytes: int) -> Cost:
    """x and the residual read, both results written."""
    return Cost(4 * num_tokens * hidden * item_bytes + hidden * item_bytes)


def silu_mul(num_tokens: int, size: int, item_bytes: int) -> Cost:
    return Cost(3 * num_tokens * size * item_bytes)


def sample(num_rows: int, vocab: int) -> Cost:
    """The logits, read once: what further passes read lies in L2."""
    return Cost(num_rows * vocab * 4)


def copy_blocks(num_pairs: int, bytes_per_block: int) -> Cost:
    return Cost(2 * num_pairs * bytes_per_block)


def gather_rows(num_rows: int, row_bytes: int) -> Cost:
    return Cost(num_rows * (2 * row_bytes + 8))


def merge_states(num_slots: int, num_rows: int, num_heads: int, head_size: int, item_bytes: int) -> Cost:
    return Cost(num_slots * num_heads * 4 * (head_size + 1) + num_rows * num_heads * head_size * item_bytes)


def gemm(rows: int, columns: int, inner: int, item_bytes: int) -> Cost:
    return Cost((rows * inner + inner * columns + rows * columns) * item_bytes, 2 * rows * columns * inner)


def copies_beyond(l2_bytes: int, bytes_per_copy: int, most: int = 64) -> int:
    """Sets of buffers to go through in turn, so that none is still in L2 when it comes again: three times its size in
    all, two sets at least."""
    return min(most, max(2, -(-3 * l2_bytes // max(1, bytes_per_copy))))
