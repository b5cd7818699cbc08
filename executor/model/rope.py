"""Rotary position embeddings: inverse frequencies of every scaling variant, and the table of cosines and sines.

The K/V cache holds rotated keys, so a position's rotation cannot change while it is cached. Variants that look at the
current length (dynamic NTK, LongRoPE) are therefore taken at one fixed length, the longest that the model is served
with.
Everything is computed in float64 and rounded once.

Sources: RoPE (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071), LongRoPE (2402.13753), and the
Llama 3.1 reference for "llama3".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from executor.model.errors import BrokenModel, UnsupportedModel

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of a rotary embedding; those of other variants than `rope_type` are None."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None  # yarn, longrope: multiplies cosines and sines
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None  # longrope, [head_size / 2]
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedModel(
                f"RoPE scaling type {self.rope_type!r} is not known; known are {', '.join(ROPE_TYPES)}"
            )


def cos_sin_table(
    rope: RopeConfig, head_size: int, max_position_embeddings: int, length: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[length, head_size]: row p holds the head_size / 2 cosines of position p, then the sines."""
    inv_freq, attention_factor = inverse_frequencies(rope, head_size, max_position_embeddings, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inv_freq)
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor).to(dtype)


def inverse_frequencies(
    rope: RopeConfig, head_size: int, max_position_embeddings: int, length: int
) -> tuple[torch.Tensor, float]:
    """Angles per position, [head_size / 2] float64, and the factor on cosines and sines, for sequences of at most
    `length` tokens."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    plain = rope.theta**-exponents
    match rope.rope_type:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / _required(rope, "factor"), 1.0
        case "dynamic":
            return _dynamic(rope, exponents, head_size, max_position_embeddings, length), 1.0
        case "llama3":
            return _llama3(rope, plain, max_position_embeddings), 1.0
        case "yarn":
            return _yarn(rope, plain, head_size, max_position_embeddings)
        case _:
            return _longrope(rope, plain, max_position_embeddings, length)


def _dynamic(
    rope: RopeConfig, exponents: torch.Tensor, head_size: int, max_position_embeddings: int, length: int
) -> torch.Tensor:
    factor = _required(rope, "factor")
    stretch = factor * max(length, max_position_embeddings) / max_position_embeddings - (factor - 1)
    theta = rope.theta * stretch ** (head_size / (head_size - 2))
    return torch.tensor(theta, dtype=torch.float64) ** -exponents


def _llama3(rope: RopeConfig, plain: torch.Tensor, max_position_embeddings: int) -> torch.Tensor:
    factor, low, high = (_required(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.original_max_position_embeddings or max_position_embeddings
    wavelengths = 2 * math.pi / plain
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(
    rope: RopeConfig, plain: torch.Tensor, head_size: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    original = rope.original_max_position_embeddings or max_position_embeddings
    factor = rope.factor if rope.factor is not None else max_position_embeddings / original

    def dimension_of(rotations: float) -> float:
        return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(head_size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope(
    rope: RopeConfig, plain: torch.Tensor, max_position_embeddings: int, length: int
) -> tuple[torch.Tensor, float]:
    original = rope.original_max_position_embeddings or max_position_embeddings
    factors = rope.long_factor if length > original else rope.short_factor
    if factors is None or len(factors) != len(plain):
        raise BrokenModel(f"RoPE scaling type 'longrope' needs {len(plain)} short and long factors")
    attention_factor = rope.attention_factor
    if attention_factor is None:
        factor = rope.factor if rope.factor is not None else max_position_embeddings / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64), attention_factor


def _required(rope: RopeConfig, name: str) -> float:
    value: float | None = getattr(rope, name)
    if value is None:
        raise BrokenModel(f"RoPE scaling type {rope.rope_type!r} needs {name!r}")
    return value
