"""What a loaded model tells of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.backends.cpu.backend import CpuBackend
from executor.model.errors import BrokenModel, UnsupportedModel
from executor.model.loader import load_model
from executor.served import GenerationDefaults
from tests.executor.model.factories import PagedModel, create_tiny_model, load, random_tokens


def write_generation_config(directory: Path, **values: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(values))


def test_sampling_defaults_are_those_of_the_generation_config(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    write_generation_config(directory, temperature=0.6, top_k=20, top_p=0.95)
    assert load(directory, tmp_path).defaults == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)


def test_without_a_generation_config_there_are_no_defaults(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    (directory / "generation_config.json").unlink()
    assert load(directory, tmp_path).defaults == GenerationDefaults()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature='hot', which is no number"),
        ({"temperature": -1.0}, r"temperature=-1.0, which is not in \[0, 100\]"),
        ({"top_p": 0}, r"top_p=0, which is not in \(0, 1\]"),
        ({"min_p": float("nan")}, r"min_p=nan, which is not in \[0, 1\]"),
        ({"top_k": 1e12}, "top_k=1000000000000.0, which is not in"),
    ],
)
def test_sampling_defaults_that_no_request_could_name_are_refused(
    tmp_path: Path, values: dict[str, object], words: str
) -> None:
    directory = create_tiny_model(tmp_path).directory
    write_generation_config(directory, **values)
    with pytest.raises(BrokenModel, match=f"generation_config names {words}"):
        load(directory, tmp_path)


def test_a_negative_top_k_keeps_all_tokens(tmp_path: Path) -> None:
    """It had no place in the message that describes the executor, which no scheduler could join."""
    directory = create_tiny_model(tmp_path).directory
    write_generation_config(directory, top_k=-1)
    assert load(directory, tmp_path).defaults == GenerationDefaults(top_k=0)


@pytest.mark.parametrize(
    ("named", "expected"), [(7, (7,)), ([9, 7], (7, 9)), (None, (2,)), ([-1, 7, 128], (7,)), ([-1], (2,))]
)
def test_end_tokens_come_from_the_generation_config_or_else_the_config(
    tmp_path: Path, named: object, expected: tuple[int, ...]
) -> None:
    directory = create_tiny_model(tmp_path).directory
    write_generation_config(directory, eos_token_id=named)
    assert load(directory, tmp_path).eos_token_ids == expected


def test_tokenizer_files_are_handed_on_as_they_are(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    files = load(directory, tmp_path).tokenizer_files
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files["chat_template.jinja"] == b"{{ messages }}"


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    (directory / "tokenizer.json").unlink()
    with pytest.raises(BrokenModel, match=r"holds no tokenizer\.json"):
        load(directory, tmp_path)


def test_max_model_len_shortens_the_models_own(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    assert load_model(directory, CpuBackend(), tmp_path, max_model_len=100).max_model_len == 100
    with pytest.raises(UnsupportedModel, match="max_model_len 1 has no room for a prompt and an output"):
        load_model(directory, CpuBackend(), tmp_path, max_model_len=1)
    with pytest.raises(UnsupportedModel, match="max_model_len 257 exceeds the model's 256"):
        load_model(directory, CpuBackend(), tmp_path, max_model_len=257)


def test_sharded_weights_are_found_by_their_index(tmp_path: Path) -> None:
    model = create_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    places = {name: file for file, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    backend = CpuBackend()
    tokens = random_tokens(20)
    logits = PagedModel(load(tmp_path, tmp_path, backend), backend).run(tokens, 20)
    torch.testing.assert_close(logits, model.reference_logits(tokens), rtol=1e-4, atol=1e-4)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match=r"holds no model-00002\.safetensors"):
        load(directory, tmp_path)


def test_a_damaged_weights_file_is_named(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path).directory
    (directory / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(BrokenModel, match=r"cannot read .*model\.safetensors"):
        load(directory, tmp_path)
