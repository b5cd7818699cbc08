"""What the GPU does at best, by torch, in this run: a copy for bandwidth, a square product for tensor cores."""

from __future__ import annotations

import torch

from benchmarks.on_gpu.costs import gemm
from benchmarks.on_gpu.table import Ceilings
from benchmarks.on_gpu.timing import seconds_per_launch

_COPY_BYTES = 1 << 30
_GEMM = 8192


def measure(device: torch.device) -> Ceilings:
    return Ceilings(_copy(device), _gemm(device))


def _copy(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / seconds_per_launch([lambda: target.copy_(source)])


def _gemm(device: torch.device) -> float:
    a = torch.randn((_GEMM, _GEMM), dtype=torch.bfloat16, device=device)
    b = torch.randn((_GEMM, _GEMM), dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return gemm(_GEMM, _GEMM, _GEMM, 2).num_flops / seconds_per_launch([lambda: torch.matmul(a, b.T, out=out)])
