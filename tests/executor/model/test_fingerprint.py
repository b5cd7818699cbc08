"""A fingerprint changes with each ingredient, and with nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.model.config import model_config
from executor.model.fingerprint import FingerprintInputs, fingerprint, tensors_digest
from executor.model.rope import RopeConfig
from tests.executor.model.factories import create_tiny_model, load, tiny_config


def inputs(**changes: object) -> FingerprintInputs:
    config = model_config(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]})
    defaults = FingerprintInputs(
        config=config,
        max_model_len=256,
        eos_token_ids=(2,),
        tokenizer_files={"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"},
        tensors="0" * 64,
        dtype="float32",
        quantization="none",
        kv_dtype="float32",
        block_size=16,
    )
    return replace(defaults, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": replace(inputs().config, rms_norm_eps=1e-5)},
        {"config": replace(inputs().config, rope=RopeConfig(theta=20_000.0))},
        {"eos_token_ids": (2, 3)},
        {"tokenizer_files": {"tokenizer.json": b"{ }", "chat_template.jinja": b"{{ messages }}"}},
        {"tokenizer_files": {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ message }}"}},
        {"tensors": "1" * 64},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"kv_dtype": "bfloat16"},
        {"block_size": 32},
    ],
)
def test_each_ingredient_changes_it(changes: dict[str, object]) -> None:
    assert fingerprint(inputs(**changes)) != fingerprint(inputs())


def test_the_length_served_changes_it_only_where_it_changes_the_rotation() -> None:
    assert fingerprint(inputs(max_model_len=100)) == fingerprint(inputs())
    dynamic = replace(inputs().config, rope=RopeConfig("dynamic", factor=2.0))
    assert fingerprint(inputs(config=dynamic, max_model_len=400)) != fingerprint(inputs(config=dynamic))


def test_one_model_loaded_twice_has_one_fingerprint(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path / "model").directory
    first, second = (load(directory, tmp_path / cache) for cache in ("one", "two"))
    assert first.fingerprint(torch.float32, 16) == second.fingerprint(torch.float32, 16)


def test_one_changed_weight_changes_the_tensors_digest(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path / "model").directory
    before = tensors_digest(directory, tmp_path / "cache")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, directory / "model.safetensors")
    assert tensors_digest(directory, tmp_path / "cache") != before


def test_spreading_tensors_over_files_does_not_change_the_digest(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path / "model").directory
    before = tensors_digest(directory, tmp_path / "cache")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {name: f"{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert tensors_digest(directory, tmp_path / "cache") == before


def test_a_digest_is_remembered(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path / "model").directory
    digest = tensors_digest(directory, tmp_path)
    (remembered,) = (tmp_path / "digests").iterdir()
    assert remembered.read_text() == digest
    remembered.write_text("5" * 64)
    assert tensors_digest(directory, tmp_path) == "5" * 64


def test_what_is_no_digest_is_not_remembered_as_one(tmp_path: Path) -> None:
    """A file that a full disk had left empty was every model's digest from then on."""
    directory = create_tiny_model(tmp_path / "model").directory
    digest = tensors_digest(directory, tmp_path)
    (remembered,) = (tmp_path / "digests").iterdir()
    for broken in (b"", b"f00d", b"\xff" * 64):
        remembered.write_bytes(broken)
        assert tensors_digest(directory, tmp_path) == digest
        assert remembered.read_text() == digest


def test_a_cache_that_keeps_no_digest_is_no_reason_to_fail(tmp_path: Path) -> None:
    directory = create_tiny_model(tmp_path / "model").directory
    digest = tensors_digest(directory, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    (tmp_path / "odd" / "digests").mkdir(parents=True)
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    (tmp_path / "odd" / "digests" / remembered.name).mkdir()  # neither read nor replaced
    for cache in ("file", "file/below", "odd"):
        assert tensors_digest(directory, tmp_path / cache) == digest
    assert [path.name for path in (tmp_path / "odd" / "digests").iterdir()] == [remembered.name]
