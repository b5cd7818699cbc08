"""Matrix products by torch, on the stream that the kernels run on.

Two ways: as the rows come, which lets the library choose by the shape; and in full tiles of ROW_TILE rows, so that the
shape never varies and a row's result does not depend on how many others there are (the deterministic mode).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

ROW_TILE = 64  # rows of a product in the deterministic mode


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights as they are stored."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None  # [out_features]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


def apply(x: torch.Tensor, linear: DenseLinear) -> torch.Tensor:
    """x [num_rows, in_features] -> [num_rows, out_features]."""
    return functional.linear(x, linear.weight, linear.bias)


def tiled(x: torch.Tensor, linear: DenseLinear) -> torch.Tensor:
    """The same, one product for each tile of rows."""
    num_rows = len(x)
    padded = functional.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
    return torch.cat([apply(tile, linear) for tile in torch.split(padded, ROW_TILE)])[:num_rows]
