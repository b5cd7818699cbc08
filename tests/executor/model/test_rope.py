"""Every RoPE scaling variant against transformers' own rotary embedding, in both spellings of the parameters."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from executor.model.config import model_config
from executor.model.errors import BrokenModel, UnsupportedModel
from executor.model.rope import cos_sin_table

HALF = 16  # head_size / 2
LENGTH = 256  # max_position_embeddings

VARIANTS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, factor given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.9,
        "mscale_all_dim": 0.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
        "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
    },
}


def transformers_config(rope: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * 2 * HALF,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 5000.0, **rope},
    )


def transformers_table(rope: dict[str, object], length: int) -> torch.Tensor:
    """At the fixed length: all positions are asked for at once."""
    embedding = LlamaRotaryEmbedding(transformers_config(rope))
    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
    return torch.cat((cos[0, :, :HALF], sin[0, :, :HALF]), dim=1)


def our_table(config: dict[str, object], length: int) -> torch.Tensor:
    read = model_config(config)
    return cos_sin_table(read.rope, read.head_size, read.max_position_embeddings, length)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [LENGTH, 60], ids=["longest", "short"])
def test_table_is_that_of_transformers(variant: str, length: int) -> None:
    rope = VARIANTS[variant]
    config = transformers_config(rope).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    torch.testing.assert_close(our_table(config, length), transformers_table(rope, length), rtol=0, atol=5e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_older_spelling_means_the_same(variant: str) -> None:
    rope = VARIANTS[variant]
    config = transformers_config(rope).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    older = {name: value for name, value in config.items() if name != "rope_parameters"}
    older |= {"rope_theta": 5000.0, "rope_scaling": {**rope, "type": rope["rope_type"]}}
    assert torch.equal(our_table(older, LENGTH), our_table(config, LENGTH))


def test_dynamic_scaling_is_taken_at_the_length_served() -> None:
    rope = VARIANTS["dynamic"]
    config = transformers_config(rope).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    torch.testing.assert_close(our_table(config, 400), transformers_table(rope, 400), rtol=0, atol=5e-5)
    assert not torch.allclose(our_table(config, 400)[:LENGTH], our_table(config, LENGTH), atol=1e-3)


def test_an_unknown_scaling_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="RoPE scaling type 'spiral' is not known"):
        model_config(transformers_config({}).to_dict() | {"rope_parameters": {"rope_type": "spiral"}})


def test_a_missing_parameter_is_named() -> None:
    config = transformers_config({}).to_dict() | {"rope_parameters": {"rope_type": "linear"}}
    with pytest.raises(BrokenModel, match="RoPE scaling type 'linear' needs 'factor'"):
        our_table(config, LENGTH)
