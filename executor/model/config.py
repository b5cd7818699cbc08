"""What the decoder must know of a model (`ModelConfig`), read from a Hugging Face config.json.

Owns the differences between the Llama family's members: biases, q/k norms, sliding windows, RoPE scaling. What the
decoder cannot compute is refused here by name, so that nothing further on meets a surprise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executor.model.errors import BrokenModel, UnsupportedModel
from executor.model.rope import RopeConfig

Json = Mapping[str, object]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one a layer; None attends to everything

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model was made for. YaRN's factor counts from the original length, and configs
        that switch it on often leave max_position_embeddings at that."""
        if self.rope.rope_type == "yarn" and self.rope.factor is not None:
            original = self.rope.original_max_position_embeddings or self.max_position_embeddings
            return max(self.max_position_embeddings, int(original * self.rope.factor))
        return self.max_position_embeddings


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises BrokenModel, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenModel(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} holds no JSON object")
    return value


def model_config(json_config: Json) -> ModelConfig:
    """Reads a config.json. Raises UnsupportedModel naming what is not known, BrokenModel naming what is missing."""
    fields = _Fields(json_config)
    model_type = _model_type(fields)
    _refuse_unknown(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    attention_bias = bool(fields.get("attention_bias", False)) and model_type in ("llama", "qwen3")
    config = ModelConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_size=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(fields),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        sliding_windows=_sliding_windows(fields, model_type, num_layers),
    )
    if config.num_heads % config.num_kv_heads or config.head_size % 2:
        raise BrokenModel(
            f"{config.num_heads} heads over {config.num_kv_heads} K/V heads of size {config.head_size} do not divide"
        )
    return config


def _model_type(fields: _Fields) -> str:
    architectures = fields.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = fields.get("model_type")
    if not names and model_type in ARCHITECTURES.values():
        return str(model_type)
    raise UnsupportedModel(
        f"architecture {', '.join(names) or model_type} is not known; known are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unknown(fields: _Fields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation!r} is not known; known is 'silu'")
    quantization = fields.get("quantization_config")
    if isinstance(quantization, Mapping):
        raise UnsupportedModel(f"weights quantized by {quantization.get('quant_method')!r} cannot be read")


def _sliding_windows(fields: _Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for all layers. Qwen: only with use_sliding_window, and then by layer_types or, without
    them, from layer max_window_layers on. Llama: none."""
    if model_type == "llama" or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if model_type == "mistral":
        return (window,) * num_layers
    if not fields.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        unknown = sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedModel(f"layer type {unknown[0]!r} is not known")
        if len(layer_types) != num_layers:
            raise BrokenModel(f"layer_types names {len(layer_types)} layers of {num_layers}")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = fields.integer("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _rope(fields: _Fields) -> RopeConfig:
    """Both spellings: `rope_scaling` beside `rope_theta`, and `rope_parameters` that holds everything."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise BrokenModel(f"RoPE parameters {parameters!r} are no object")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel("RoPE parameters that differ by layer type are not known")
    rope = _Fields(parameters)
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not known")
    rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
    # A length outside the parameters is the trained one, and goes before the one inside.
    original = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return RopeConfig(
        rope_type=rope_type,
        theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        factor=rope.optional_number("factor"),
        original_max_position_embeddings=int(original) if isinstance(original, int | float) else None,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
        low_freq_factor=rope.optional_number("low_freq_factor"),
        high_freq_factor=rope.optional_number("high_freq_factor"),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )


class _Fields:
    """Typed reading of a JSON object; null counts as absent."""

    def __init__(self, values: Json) -> None:
        self._values = values

    def get(self, name: str, default: object = None) -> object:
        value = self._values.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BrokenModel(f"config names {name}={value!r}, which is no number")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise BrokenModel(f"config names {name}={value!r}, which is no positive integer")
        return int(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        value = self.get(name)
        return tuple(float(number) for number in value) if isinstance(value, list) else None
