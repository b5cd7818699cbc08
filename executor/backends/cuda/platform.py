"""A GPU as a platform: bf16, the cache by what a profiled step leaves of the memory, decode steps as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from executor.backends.cuda import nvrtc
from executor.backends.cuda.backend import CudaBackend
from executor.backends.cuda.device import Device, NoDevice, require_device
from executor.backends.cuda.graphs import CudaGraphs, StagedDecoder
from executor.backends.cuda.launch import DeviceLauncher
from executor.backends.cuda.memory import DEFAULT_SHARE, DeviceGauge, kv_cache_blocks, profile
from executor.backends.platform import CacheWish, PlatformError
from executor.plan import Limits

if TYPE_CHECKING:
    from executor.model.loader import LoadedModel
    from executor.runner import Decoder

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MAX_BUCKET = 256  # rows of the largest graph


class CudaPlatform:
    """See executor.backends.platform."""

    survives_failed_steps = False  # an error of a kernel stays with the process's context

    def __init__(self, device: Device, backend: CudaBackend) -> None:
        self.backend = backend
        self.name = f"cuda ({device.name})"

    def num_blocks(self, model: LoadedModel, limits: Limits, wish: CacheWish) -> int:
        """What the share leaves beside weights and activations, or exactly what was asked for if that fits."""
        gauge = DeviceGauge()
        block_size, dtype = limits.block_size, self.backend.dtype
        self.backend.allocate_kv_cache(model.kv_cache_spec(2, block_size, dtype))
        peak = profile(model.decoder, gauge, limits)
        self.backend.release_kv_cache()
        per_block = model.kv_cache_spec(1, block_size, dtype).bytes_per_block
        memory = wish.memory if wish.num_blocks is None else wish.num_blocks * per_block
        share = DEFAULT_SHARE if wish.device_share is None else wish.device_share
        return kv_cache_blocks(per_block, gauge.read(), peak, memory, share)

    def decoder(self, model: LoadedModel, limits: Limits, progress: Callable[[str], None]) -> Decoder:
        self.backend.use_heads(model.config.num_heads)
        self.backend.reserve_draws(limits.max_num_seqs)
        staged = StagedDecoder(
            model.decoder,
            self.backend,
            windows=tuple(dict.fromkeys(model.config.sliding_windows)),
            max_blocks=-(-limits.max_model_len // limits.block_size),
            capture=CudaGraphs(),
            max_bucket=min(limits.max_num_seqs, _MAX_BUCKET),
        )
        staged.capture_all(progress)
        return staged


def open_platform(dtype: str, deterministic: bool, quantization: str = "none") -> CudaPlatform:
    """Raises NoDevice where there is no GPU that the kernels run on, or nothing to compile them with, PlatformError for
    a quantization."""
    if quantization != "none":
        raise PlatformError(f"--quantization {quantization} needs --device cpu: no kernel reads such weights on a GPU")
    found = require_device()
    try:
        nvrtc.load()
    except nvrtc.NvrtcError as error:
        raise NoDevice(f"--device cuda: {error}") from error
    device = torch.device("cuda", torch.cuda.current_device())
    backend = CudaBackend(DeviceLauncher(device), device, _DTYPES[dtype], found.num_sms, deterministic)
    return CudaPlatform(found, backend)
