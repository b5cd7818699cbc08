"""What an executor tells of the model it serves: all that a scheduler must know, and nothing that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executor.plan import Limits


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Of the model's generation_config; None where it names none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded, and the pool it runs in."""

    name: str
    fingerprint: str  # config, tokenizer, template, tensors, number formats and block size
    limits: Limits
    dtype: str  # "float32" or "bfloat16"
    kv_dtype: str
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    deterministic: bool
    device: str  # kind and name, as "cpu (AMD EPYC)"
    tokenizer_files: Mapping[str, bytes]  # by name: tokenizer.json, tokenizer_config.json, chat_template.jinja
