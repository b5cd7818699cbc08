"""A model of Llama-3.1-8B's shape with random weights, made on the device: nothing is read or fetched.

The weights are a function of a tensor's name, so that the peer gets the same ones. Text is out of the question; what a
step costs does not depend on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

LLAMA_8B: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


class RandomWeights:
    """Stands where executor.model.weights.Weights does."""

    directory = Path("random")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Norms near one, everything else so small that activations keep their size."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return 1 + 0.1 * values if len(shape) == 1 else values.mul_(shape[-1] ** -0.5)

    def kinds(self, *names: str) -> set[str | None]:
        """No tensor has blocks."""
        return {None}

    def left(self) -> list[str]:
        return []
