"""Reading config.json: what the members of the family share, where they differ, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.model.config import model_config, read_json
from executor.model.errors import BrokenModel, UnsupportedModel
from tests.executor.model.factories import WINDOW, tiny_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def json_config(kind: str = "llama", **changes: object) -> dict[str, object]:
    config: dict[str, object] = tiny_config(kind).to_dict()
    return config | {"architectures": [ARCHITECTURES[kind.partition("-")[0]]]} | changes


def test_shape_is_read() -> None:
    config = model_config(json_config())
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (3, 4, 2, 16)
    assert (config.max_model_len, config.tie_word_embeddings) == (256, True)


def test_heads_count_as_kv_heads_where_the_config_names_none() -> None:
    assert model_config(json_config(num_key_value_heads=None)).num_kv_heads == 4


def test_qwen2_has_qkv_biases_alone() -> None:
    config = model_config(json_config("qwen2"))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)


def test_qwen3_normalizes_q_and_k() -> None:
    config = model_config(json_config("qwen3"))
    assert (config.qkv_bias, config.qk_norm, config.head_size) == (False, True, 32)


def test_mistral_has_one_window_in_all_layers() -> None:
    assert model_config(json_config("mistral")).sliding_windows == (WINDOW, WINDOW, WINDOW)


def test_mistral_without_a_window_sees_everything() -> None:
    assert model_config(json_config("mistral", sliding_window=None)).sliding_windows == (None, None, None)


def test_qwen_ignores_its_window_unless_told_to_use_it() -> None:
    config = json_config("qwen2", sliding_window=WINDOW, use_sliding_window=False, max_window_layers=1)
    assert model_config(config).sliding_windows == (None, None, None)


def test_qwen_windows_begin_at_max_window_layers() -> None:
    config = json_config("qwen2-windows", layer_types=None)
    assert model_config(config).sliding_windows == (None, WINDOW, WINDOW)


def test_qwen_layer_types_go_before_max_window_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = json_config("qwen2-windows", layer_types=kinds)
    assert model_config(config).sliding_windows == (WINDOW, None, WINDOW)


def test_yarn_reaches_as_far_as_its_factor() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert model_config(json_config(rope_parameters=rope)).max_model_len == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not known"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not known"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantized by 'awq' cannot be read"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        model_config(json_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "4 heads over 3 K/V heads"),
    ],
)
def test_a_broken_config_names_the_field_and_its_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BrokenModel, match=message):
        model_config(json_config(**changes))


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenModel, match=r"cannot read .*config\.json"):
        read_json(tmp_path / "config.json")
