"""Launches what moves rows and blocks without looking at them: copy-on-write's copies, and gathers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor.backends.cuda.formats import check
from executor.backends.cuda.launch import Argument, Launcher
from executor.backends.cuda.sources import KernelSource, kernel

_PIECE = 256 * 16  # bytes of a row that a block of threads takes


def copy_blocks_source() -> KernelSource:
    return kernel("copy_blocks", "copy_blocks.cu")


def gather_rows_source() -> KernelSource:
    return kernel("gather_rows", "gather_rows.cu")


class CopyBlocks:
    """Copies whole blocks in all layers; holds the addresses of the caches it was built with."""

    def __init__(self, launcher: Launcher, caches: Sequence[torch.Tensor]) -> None:
        """caches: K and V of every layer, each [num_blocks, num_kv_heads, block_size, head_size]."""
        first = caches[0]
        for cache in caches:
            check("cache", cache, first.dtype, *first.shape)
        self._block_bytes = first[0].numel() * first.element_size()
        assert self._block_bytes % 16 == 0, f"blocks of {self._block_bytes} bytes"
        self._launcher = launcher
        self._caches = tuple(caches)  # kept alive: the kernel is given addresses
        self._addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=first.device)

    def __call__(self, pairs: torch.Tensor) -> None:
        """pairs [num_pairs, 2] int32: (source, destination); no block is in both columns."""
        check("pairs", pairs, torch.int32, None, 2)
        self._launcher.launch(
            copy_blocks_source(),
            (len(pairs), len(self._caches), 1),
            (256, 1, 1),
            0,
            [self._addresses, pairs, np.int64(self._block_bytes)],
        )


class GatherRows:
    """out[i] = table[indices[i]], for any format; an index ~d below 0 stands for drawn[d]."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(
        self,
        table: torch.Tensor,
        indices: torch.Tensor,
        out: torch.Tensor | None = None,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """table [n, size], rows of a multiple of 16 bytes; indices [num_rows] int64, none below 0 without `drawn` [..]
        int64 -> [num_rows, size]."""
        if drawn is not None:
            check("drawn", drawn, torch.int64, None)
        check("table", table, table.dtype, None, None)
        check("indices", indices, torch.int64, None)
        size = table.shape[1]
        row_bytes = size * table.element_size()
        assert row_bytes % 16 == 0, f"rows of {row_bytes} bytes"
        out = table.new_empty(len(indices), size) if out is None else out
        check("out", out, table.dtype, len(indices), size)
        grid = (len(indices), -(-row_bytes // _PIECE), 1)
        arguments: list[Argument] = [_bytes(out), _bytes(table), indices, drawn, np.int64(row_bytes)]
        self._launcher.launch(gather_rows_source(), grid, (256, 1, 1), 0, arguments)
        return out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
