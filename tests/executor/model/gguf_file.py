"""Writes a tiny model as a GGUF file, and converts such a file, but for its tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from executor.model import gguf as conversion
from tests.executor.model.factories import TinyModel

LAYER_NAMES = {ours: theirs for theirs, ours in conversion.LAYER_TENSORS.items()}
NAMES = {ours: theirs for theirs, ours in conversion.TENSORS.items()}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.{suffix}"


def permute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As the format's own converter does it for the llama architecture: halves of a head to pairs of neighbours."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model: TinyModel,
    architecture: str,
    quantization: gguf.GGMLQuantizationType | None = None,
    other: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> None:
    """quantization: of matrices, but for those parts of a layer, as "attn_v", that have another one."""
    config = model.reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = gguf_name(name)
        part = stored.split(".")[-2]
        if architecture == "llama" and part in heads:
            tensor = permute(tensor, heads[part])
        kind = (other or {}).get(part, quantization)
        if kind is not None and tensor.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(path: Path, directory: Path) -> Path:
    directory.mkdir()
    conversion.convert(path, directory, lambda message: None)
    return directory
