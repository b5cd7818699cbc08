"""The contract between the model and what computes it: about ten ops over tensors, and one description of a batch.

The model is written once over `Backend`. A backend owns the KV cache's memory and the number formats; it knows nothing
of sequences, plans or layers' names. A batch is mixed: every sequence brings any number of query tokens, so prefill,
chunked prefill and decode are one case.

KV layout, all backends: K and V of a layer are each [num_blocks, num_kv_heads, block_size, head_size]; slot =
block_id * block_size + offset. Block 0 is the null block: padding points there, nothing of worth is in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch

if TYPE_CHECKING:
    from executor.sampler import Draws, SamplingBatch


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and number format of the paged KV cache."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step stand. Sequence i owns tokens [query_start_loc[i], query_start_loc[i + 1])."""

    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32: tokens whose K/V is in cache once this step has written its own
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32, padded with 0
    slot_mapping: torch.Tensor  # [num_tokens] int64: where each token's K/V goes
    positions: torch.Tensor  # [num_tokens] int64: position of each token in its sequence
    max_query_len: int
    max_seq_len: int


class Mark(Protocol):
    """A moment between two ops, on the clock of whoever computes them."""

    def ns_since(self, earlier: Self) -> int:
        """Nanoseconds from an earlier mark of the same backend; asked once both have passed."""


class HostMark:
    """Of a backend that computes where it is called."""

    def __init__(self) -> None:
        self._ns = time.monotonic_ns()

    def ns_since(self, earlier: HostMark) -> int:
        return self._ns - earlier._ns


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight matrix as GGUF files keep it: rows of blocks, each with numbers of few bits and their scale."""

    kind: str  # ggml's name of it, as "Q4_1"
    blocks: torch.Tensor  # [out_features, bytes of a row] uint8
    in_features: int


class Linear(Protocol):
    """Weights of one matrix product, in the form that the backend likes best (see `Backend.prepare_linear`)."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class Backend(Protocol):
    """Ops of a decoder. Tensors live on the backend's device; activations have the backend's dtype."""

    device: torch.device
    dtype: torch.dtype

    @property
    def block_kinds(self) -> frozenset[str]:
        """Kinds of blocks that `prepare_linear` takes as they are; every other weight comes as numbers."""

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Takes the memory of the whole cache, zeroed. Raises OutOfMemory naming both sizes."""

    def prepare_linear(self, weight: torch.Tensor | BlockWeight, bias: torch.Tensor | None) -> Linear:
        """weight [out_features, in_features] of any float format, or blocks of a kind in `block_kinds`; bias
        [out_features]: packed once, when the model is loaded."""

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """table [vocab, hidden], token_ids [num_tokens] int64 -> [num_tokens, hidden]."""

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm(x + residual) * weight, x + residual), both [num_tokens, hidden]; fp32 inside."""

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
        """Splits qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_size], normalizes q and k where weights are
        given, rotates both (cos_sin [max_positions, head_size] fp32: cosines, then sines, of the half-rotated
        layout), writes K and V at slot_mapping; returns q [num_tokens, num_heads, head_size]."""

    def paged_attention(
        self,
        layer: int,
        q: torch.Tensor,
        metadata: AttentionMetadata,
        softmax_scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_heads, head_size] over the cached K/V of each sequence, all of it
        or the last `sliding_window` positions (the query's own counted); same shape back."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size] -> silu(first half) * second half, [num_tokens, size]."""

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks in all layers; no block is in both."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Draws:
        """logits [num_rows, vocab] fp32 -> one token a draw, as executor/sampler.py defines it. Where the draws are
        not known when this returns, `embed` takes ~d for the token of draw d until the next call."""

    def mark(self) -> Mark:
        """Now, in the order in which the backend computes."""


class OutOfMemory(Exception):
    """The device cannot hold what was asked."""
