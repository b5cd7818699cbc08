"""The CPU as a platform: number format by what the CPU does best, the cache by what memory is free."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
import torch

from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.memory import available_memory, kv_cache_blocks
from executor.backends.platform import CacheWish, PlatformError
from executor.plan import Limits

if TYPE_CHECKING:
    from executor.model.loader import LoadedModel
    from executor.runner import Decoder

_DEFAULT_SHARE = 4  # a quarter of what is free
_DEFAULT_MOST = 2 << 30


class CpuPlatform:
    """See executor.backends.platform."""

    survives_failed_steps = True

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self.name = f"cpu ({platform.processor() or platform.machine()})"

    def num_blocks(self, model: LoadedModel, limits: Limits, wish: CacheWish) -> int:
        """No more than the memory that is free, and than all sequences at their longest could fill."""
        per_block = model.kv_cache_spec(1, limits.block_size, self.backend.dtype).bytes_per_block
        if wish.num_blocks is not None:
            return kv_cache_blocks(per_block, wish.num_blocks * per_block)
        memory = wish.memory or min(available_memory() // _DEFAULT_SHARE, _DEFAULT_MOST)
        most = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size) + 1
        return min(kv_cache_blocks(per_block, memory), most)

    def decoder(self, model: LoadedModel, limits: Limits, progress: Callable[[str], None]) -> Decoder:
        return model.decoder


def open_platform(dtype: str, deterministic: bool, quantization: str = "none") -> CpuPlatform:
    """Raises PlatformError for a format that a CPU does not compute in."""
    if dtype == "float16":
        raise PlatformError("--dtype float16 needs --device cuda: a CPU computes in float32 or bfloat16")
    backend = CpuBackend(_dtype(dtype), deterministic, quantization=quantization)
    if backend.native_missing is not None:
        structlog.get_logger("executor").warning("computing in plain torch, slowly", reason=backend.native_missing)
    return CpuPlatform(backend)


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
