"""Converts a .gguf file into a Hugging Face directory: safetensors, config, tokenizer, chat template.

Owns the names and keys of the format, and one trap in it: the llama architecture stores the rows of q and k in pairs of
neighbours (as its own rotary embedding wants them), where every other architecture keeps halves. Quantized tensors
become float32, which holds their values exactly, and their blocks are kept beside them, for backends that compute with
blocks; 16-bit tensors stay as they are. The tokenizer is read by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from executor.model.errors import BrokenModel, UnsupportedModel
from executor.model.weights import BLOCKS, INDEX_FILE

CONVERSION = 3  # grows with what is made of a file
MAX_SHARD_BYTES = 2 << 30

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, [head_size / 2]


def convert(path: Path, directory: Path, progress: Callable[[str], None]) -> None:
    """Fills `directory` from the file. Raises UnsupportedModel or BrokenModel, or OSError if it cannot be written."""
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise BrokenModel(f"cannot read {path}: {error}") from error
    progress(f"converting {path.name}, once")
    metadata = _Metadata(reader)
    config = _config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(metadata))
    places = _write_shards(_tensors(reader, metadata), directory, "model", {})
    _write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": places})
    _write_shards(_blocks(reader, metadata), directory, BLOCKS, _kinds(reader, metadata))
    _write_tokenizer(path, directory)


class _Metadata:
    """Key-value pairs of the file; `of` prefixes a key with the architecture's name."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"GGUF architecture {self.architecture!r} is not known; known are {', '.join(ARCHITECTURES)}"
            )

    def get(self, key: str, default: object = None) -> object:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def of(self, key: str, default: object = None) -> object:
        return self.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.of(key, default)
        if not isinstance(value, int):
            raise BrokenModel(f"GGUF key {self.architecture}.{key} is {value!r}, which is no integer")
        return value


def _config(metadata: _Metadata, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, object]:
    if metadata.of("expert_count"):
        raise UnsupportedModel("mixtures of experts are not known")
    num_heads, hidden_size = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_size = metadata.integer("attention.key_length", hidden_size // num_heads)
    if metadata.integer("rope.dimension_count", head_size) != head_size:
        raise UnsupportedModel("rotary embeddings of a part of the head are not known")
    window = metadata.of("attention.sliding_window")
    architecture = ARCHITECTURES[metadata.architecture]
    if window and metadata.architecture == "llama":
        architecture = "MistralForCausalLM"  # Llama with a window over all layers
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": int(_tensor(tensors, "token_embd.weight").shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.of("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_parameters": _rope(metadata, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": metadata.architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": window or None,
        "eos_token_id": _eos_token_ids(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
    }


def _rope(metadata: _Metadata, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, object]:
    theta = metadata.of("rope.freq_base", 10_000.0)
    if ROPE_FACTORS in tensors:  # what llama3 scaling comes to, in numbers: one factor for each frequency
        factors = [float(factor) for factor in tensors[ROPE_FACTORS].data]
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    kind = metadata.of("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"RoPE scaling type {kind!r} of a GGUF file is not known")
    return {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": metadata.of("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.of("rope.scaling.original_context_length"),
    }


def _eos_token_ids(metadata: _Metadata) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({value for key in keys if isinstance(value := metadata.get(key), int)})


def _generation_config(metadata: _Metadata) -> dict[str, object]:
    """Sampling defaults that the file names, and the tokens that end a text."""
    values = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "temperature": metadata.get("general.sampling.temp"),
        "top_k": metadata.get("general.sampling.top_k"),
        "top_p": metadata.get("general.sampling.top_p"),
        "min_p": metadata.get("general.sampling.min_p"),
        "repetition_penalty": metadata.get("general.sampling.penalty_repeat"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _tensors(reader: gguf.GGUFReader, metadata: _Metadata) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and values, rows in Hugging Face's order."""
    for name, tensor, heads in _named(reader, metadata):
        values = _values(tensor)
        yield name, (unpermute(values, heads) if heads else values).contiguous()


def _blocks(reader: gguf.GGUFReader, metadata: _Metadata) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of quantized matrices, as rows of bytes [out_features, bytes of a row]."""
    for name, tensor, heads in _named(reader, metadata):
        if _quantized(tensor):
            rows = torch.from_numpy(tensor.data.copy())
            yield name, (unpermute(rows, heads) if heads else rows).contiguous()


def _kinds(reader: gguf.GGUFReader, metadata: _Metadata) -> dict[str, str]:
    """The kind of each quantized matrix, as ggml calls it."""
    return {name: tensor.tensor_type.name for name, tensor, _ in _named(reader, metadata) if _quantized(tensor)}


def _quantized(tensor: gguf.ReaderTensor) -> bool:
    weights_in_block: int = gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]
    return weights_in_block > 1 and len(tensor.shape) == 2


def _named(reader: gguf.GGUFReader, metadata: _Metadata) -> Iterator[tuple[str, gguf.ReaderTensor, int | None]]:
    """The model's tensors with their Hugging Face names, and the heads whose rows stand in llama's order."""
    num_heads = metadata.integer("attention.head_count")
    heads = {"attn_q": num_heads, "attn_k": metadata.integer("attention.head_count_kv", num_heads)}
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        stem, _, suffix = tensor.name.rpartition(".")
        permuted = heads.get(stem.rpartition(".")[2]) if metadata.architecture == "llama" else None
        yield f"{_name(stem, tensor.name)}.{suffix}", tensor, permuted


def _name(stem: str, full_name: str) -> str:
    if stem in TENSORS:
        return TENSORS[stem]
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or part not in LAYER_TENSORS:
        raise UnsupportedModel(f"GGUF tensor {full_name!r} is not known")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}"


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, half, 1, half + 1, …) back to halves (0, 1, …, half, half + 1, …)."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _values(tensor: gguf.ReaderTensor) -> torch.Tensor:
    kinds = gguf.GGMLQuantizationType
    if tensor.tensor_type == kinds.F16:
        return torch.from_numpy(tensor.data.copy())
    try:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    except NotImplementedError as error:
        raise UnsupportedModel(f"GGUF tensor {tensor.name!r}: {error}") from error
    return values.bfloat16() if tensor.tensor_type == kinds.BF16 else values


def _tensor(tensors: dict[str, gguf.ReaderTensor], name: str) -> gguf.ReaderTensor:
    if name not in tensors:
        raise BrokenModel(f"the GGUF file holds no tensor {name!r}")
    return tensors[name]


def _write_shards(
    tensors: Iterator[tuple[str, torch.Tensor]], directory: Path, stem: str, metadata: dict[str, str]
) -> dict[str, str]:
    """Writes shards as they fill, so that no more than one is in memory; returns the file of each tensor."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        name = f"{stem}-{len(set(places.values())) + 1:05}.safetensors"
        try:
            save_file(shard, directory / name, metadata={"format": "pt", **metadata})
        except SafetensorError as error:  # of a file that cannot be written; the tensors are well
            raise OSError(str(error)) from error
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        flush()
    return places


def _write_tokenizer(path: Path, directory: Path) -> None:
    from transformers import AutoTokenizer  # takes seconds to import, and only a conversion needs it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # the library raises its own, and OSError for what it does not find
        raise BrokenModel(f"cannot read the tokenizer of {path}: {error}") from error
    try:
        tokenizer.save_pretrained(str(directory))
    except Exception as error:  # a bare one, of a file that cannot be written
        raise OSError(str(error)) from error


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
