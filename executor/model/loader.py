"""From a model's directory to a model that runs: `load_model`.

Owns what an executor must tell of a model besides its logits: sampling defaults, end-of-sequence tokens, tokenizer
files, the longest sequence, the fingerprint. Knows nothing of plans or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from executor.backends.base import Backend, KVCacheSpec
from executor.model.config import ModelConfig, model_config, read_json
from executor.model.decoder import Decoder
from executor.model.errors import BrokenModel, UnsupportedModel
from executor.model.fingerprint import FingerprintInputs, fingerprint, tensors_digest
from executor.model.weights import Weights
from executor.served import GenerationDefaults

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_TOP_K = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in a backend's memory, and what there is to tell of it."""

    config: ModelConfig
    decoder: Decoder
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]  # sorted
    tokenizer_files: Mapping[str, bytes]  # those of TOKENIZER_FILES that the model has
    max_model_len: int
    dtype: torch.dtype
    tensors_digest: str

    def kv_cache_spec(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """The K/V cache that this model needs."""
        config = self.config
        return KVCacheSpec(config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_size, dtype)

    def fingerprint(self, kv_dtype: torch.dtype, block_size: int, quantization: str = "none") -> str:
        """Equal for executors that compute the same from the same blocks."""
        return fingerprint(
            FingerprintInputs(
                config=self.config,
                max_model_len=self.max_model_len,
                eos_token_ids=self.eos_token_ids,
                tokenizer_files=self.tokenizer_files,
                tensors=self.tensors_digest,
                dtype=dtype_name(self.dtype),
                quantization=quantization,
                kv_dtype=dtype_name(kv_dtype),
                block_size=block_size,
            )
        )


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def load_model(
    directory: Path,
    backend: Backend,
    cache_dir: Path,
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> LoadedModel:
    """Reads a directory in Hugging Face's form. `max_model_len` shortens the model's own.

    Raises UnsupportedModel or BrokenModel.
    """
    json_config = read_json(directory / "config.json")
    config = model_config(json_config)
    if max_model_len is not None and max_model_len > _longest(config):
        raise UnsupportedModel(f"max_model_len {max_model_len} exceeds the model's {_longest(config)}")
    length = max_model_len or config.max_model_len
    if length < 2:
        raise UnsupportedModel(f"max_model_len {length} has no room for a prompt and an output, of a token each")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    tokenizer_files = _tokenizer_files(directory)
    progress("loading weights")
    weights = Weights(directory)
    if backend.block_kinds and not backend.block_kinds & weights.kinds():
        raise UnsupportedModel(
            f"--quantization gguf keeps the blocks of a GGUF file ({', '.join(sorted(backend.block_kinds))}), and this "
            "model has none; --quantization int8 takes any weights"
        )
    decoder = Decoder(config, weights, backend, length)
    return LoadedModel(
        config=config,
        decoder=decoder,
        defaults=_defaults(generation),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), config.vocab_size)
        or _token_ids(json_config.get("eos_token_id"), config.vocab_size),
        tokenizer_files=tokenizer_files,
        max_model_len=length,
        dtype=backend.dtype,
        tensors_digest=tensors_digest(directory, cache_dir),
    )


def _longest(config: ModelConfig) -> int:
    """What may be asked for: dynamic scaling goes beyond the length that it is plain at."""
    if config.rope.rope_type == "dynamic":
        return int(config.max_model_len * (config.rope.factor or 1))
    return config.max_model_len


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
    try:
        files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    except OSError as error:
        raise BrokenModel(f"cannot read {error.filename}: {error.strerror}") from error
    if "tokenizer.json" not in files:
        raise BrokenModel(f"{directory} holds no tokenizer.json")
    return files


def _token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    """generation_config and config name one id, several, or none. What the vocabulary lacks is never drawn."""
    values = value if isinstance(value, list) else [value]
    numbers = {token for token in values if isinstance(token, int) and not isinstance(token, bool)}
    return tuple(sorted(token for token in numbers if 0 <= token < vocab_size))


def _defaults(generation: Mapping[str, object]) -> GenerationDefaults:
    """In the bounds that requests have, too. A negative top_k keeps all tokens, as 0 does."""

    def number(name: str, low: float, high: float, *, zero: bool = True) -> float | None:
        value = generation.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BrokenModel(f"generation_config names {name}={value!r}, which is no number")
        if not low <= value <= high or (value == 0 and not zero):
            raise BrokenModel(
                f"generation_config names {name}={value!r}, which is not in {'[' if zero else '('}{low:g}, {high:g}]"
            )
        return float(value)

    top_k = number("top_k", -MAX_TOP_K, MAX_TOP_K)
    return GenerationDefaults(
        temperature=number("temperature", 0, 100),
        top_k=None if top_k is None else max(int(top_k), 0),
        top_p=number("top_p", 0, 1, zero=False),
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 0, 10, zero=False),
    )
