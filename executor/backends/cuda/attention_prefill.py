"""Launches prefill attention: which kernel computes it, how large its tiles are, and the checks of what it is given.

Half-width formats go to the tensor cores (cuda/prefill.cu), fp32 does not (cuda/prefill_simt.cu); both take the same
tiles and arguments. The work list is plan.py's, in tiles of `tile_tokens` queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor.backends.cuda.formats import FP8, check, format_name
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.sources import KernelSource, kernel

_THREADS = 128
_SIMT_ROWS, _SIMT_KEYS = 16, 32  # as prefill_simt.cu has them


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    """What a prefill kernel is specialised by, and the heads it is launched for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # the same, or float8_e4m3fn

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} K/V heads evenly")
        if self.head_size % 16:
            raise ValueError(f"head size {self.head_size} is no multiple of 16")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"prefill computes in bfloat16, float16 or float32, not {self.dtype}")
        if self.kv_dtype not in (self.dtype, FP8):
            raise ValueError(f"prefill in {self.dtype} reads a cache of {self.dtype} or {FP8}, not {self.kv_dtype}")
        if self.group > self.rows:
            raise ValueError(f"{self.group} heads share a K/V head; a tile holds {self.rows}")

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Packed rows (token, head of the group) of a tile."""
        return _tile(format_name(self.dtype), format_name(self.kv_dtype), self.head_size)[0]

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return _tile(format_name(self.dtype), format_name(self.kv_dtype), self.head_size)[1]

    @property
    def tile_tokens(self) -> int:
        """Queries of one sequence that a tile covers: what the work list is cut by."""
        return self.rows // self.group

    @property
    def source(self) -> KernelSource:
        return prefill_source(format_name(self.dtype), format_name(self.kv_dtype), self.head_size, self.block_size)

    @property
    def shared_bytes(self) -> int:
        if self.dtype == torch.float32:
            return 4 * ((self.rows + 2 * self.keys) * (self.head_size + 4) + self.rows * (self.keys + 1))
        raw = 2 * self.keys * self.head_size if self.kv_dtype == FP8 else 0
        return 2 * (self.rows + 2 * self.keys) * (self.head_size + 8) + raw


def prefill_source(scalar: str, kv: str, head_size: int, block_size: int) -> KernelSource:
    """The kernel for one pair of formats."""
    if scalar == "fp32":
        return kernel(
            "prefill_simt", "prefill_simt.cu", SCALAR=scalar, KV=kv, HEAD_SIZE=head_size, BLOCK_SIZE=block_size
        )
    rows, keys = _tile(scalar, kv, head_size)
    return kernel(
        "prefill",
        "prefill.cu",
        SCALAR=scalar,
        KV=kv,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        KEYS=keys,
    )


def _tile(scalar: str, kv: str, head_size: int) -> tuple[int, int]:
    """Packed rows and keys of a tile: as many as registers hold accumulators and scores for, without spilling."""
    if scalar == "fp32":
        return _SIMT_ROWS, _SIMT_KEYS
    if head_size > 128:
        return 64, 32
    return 128, 32 if head_size == 128 and kv == "fp8" else 64


class PrefillAttention:
    """Attention of chunks of queries; see Backend.paged_attention for what it computes."""

    def __init__(self, launcher: Launcher, spec: PrefillSpec) -> None:
        if spec.shared_bytes > launcher.shared_limit:
            raise ValueError(
                f"prefill at head size {spec.head_size} takes {spec.shared_bytes} bytes of shared memory a block; the "
                f"device has {launcher.shared_limit}"
            )
        self.spec = spec
        self._launcher = launcher
        self._source = spec.source

    def prepare(self) -> None:
        self._launcher.prepare(self._source, self.spec.shared_bytes)

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        tiles: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        softmax_scale: float,
        window: int | None = None,
        softcap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Writes the rows of `out` [num_tokens, num_heads, head_size] that the tiles name, and no others.

        q [num_tokens, num_heads, head_size]: tokens may lie apart (inside the fused qkv row), heads may not. Caches
        [num_blocks, num_kv_heads, block_size, head_size]; tiles [num_tiles, 2], query_start_loc [num_seqs + 1],
        seq_lens [num_seqs] and block_tables [num_seqs, max_blocks] int32. window: the last so many keys are visible,
        the query's own counted. k_scale, v_scale: what an fp8 cache's values were divided by.
        """
        spec = self.spec
        num_seqs = len(seq_lens)
        check("a token of q", q[:1], spec.dtype, None, spec.num_heads, spec.head_size)
        assert q.stride(0) * q.element_size() % 16 == 0, "the tokens of q are not aligned to 16 bytes"
        check("out", out, spec.dtype, len(q), spec.num_heads, spec.head_size)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check(name, cache, spec.kv_dtype, None, spec.num_kv_heads, spec.block_size, spec.head_size)
        check("tiles", tiles, torch.int32, None, 2)
        check("query_start_loc", query_start_loc, torch.int32, num_seqs + 1)
        check("seq_lens", seq_lens, torch.int32, num_seqs)
        check("block_tables", block_tables, torch.int32, num_seqs, None)
        assert window is None or window > 0, "a window of no key"
        assert softmax_scale * k_scale > 0, "the largest score is taken for the largest logit"
        self._launcher.launch(
            self._source,
            (len(tiles), spec.num_kv_heads, 1),
            (_THREADS, 1, 1),
            spec.shared_bytes,
            [
                out,
                q,
                k_cache,
                v_cache,
                tiles,
                query_start_loc,
                seq_lens,
                block_tables,
                np.int32(block_tables.shape[1]),
                np.int32(spec.num_heads),
                np.int64(q.stride(0)),
                np.float32(softmax_scale * k_scale),
                np.int32(window or 0),
                np.float32(softcap or 0.0),
                np.float32(v_scale),
            ],
        )
