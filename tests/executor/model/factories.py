"""Tiny models, and a paged cache driven by hand: blocks in shuffled order, what is not written yet poisoned by NaN."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from executor.backends.base import AttentionMetadata
from executor.backends.cpu.backend import CpuBackend
from executor.model.loader import LoadedModel, load_model

SHAPE: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide enough that logits differ and layers matter
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WINDOW = 11  # shorter than the prompts, and no multiple of a block

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-windows": (Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class TinyModel:
    """A random model, as transformers computes it and as a directory."""

    reference: torch.nn.Module
    directory: Path

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[num_tokens, vocab] float32."""
        with torch.no_grad():
            return self.reference(torch.tensor([list(token_ids)])).logits[0]


def tiny_config(kind: str, **overrides: object) -> PreTrainedConfig:
    config_class, specifics = CONFIGS[kind]
    return config_class(**{**SHAPE, **specifics, **overrides})


def create_tiny_model(directory: Path, kind: str = "llama", **overrides: object) -> TinyModel:
    """Random weights, biases and norms too; float32 in one safetensors file, with a tokenizer of numbers."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(tiny_config(kind, **overrides), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(directory)
    write_tokenizer(directory)
    return TinyModel(reference, directory)


def write_tokenizer(directory: Path, vocab_size: int = 128) -> None:
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}, unk_token="0"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "2"}))


def load(directory: Path, cache_dir: Path, backend: CpuBackend | None = None) -> LoadedModel:
    return load_model(directory, backend or CpuBackend(), cache_dir)


@dataclass
class Row:
    """The next tokens of one sequence."""

    sequence: str
    token_ids: Sequence[int]


@dataclass
class PagedModel:
    """Runs steps of any rows, and keeps the sequences' block tables."""

    model: LoadedModel
    backend: CpuBackend
    block_size: int = 16
    num_blocks: int = 128
    _tables: dict[str, list[int]] = field(default_factory=dict)
    _lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend.allocate_kv_cache(self.model.kv_cache_spec(self.num_blocks, self.block_size, self.backend.dtype))
        for cache in (*self.backend.cache.keys, *self.backend.cache.values):
            cache.fill_(torch.nan)
        self._free = list(range(1, self.num_blocks))
        random.Random(0).shuffle(self._free)

    def step(self, *rows: Row) -> list[torch.Tensor]:
        """Logits of all tokens of each row, [len(token_ids), vocab]."""
        token_ids = [token for row in rows for token in row.token_ids]
        logits = self.model.decoder.forward(
            torch.tensor(token_ids), self._metadata(rows), torch.arange(len(token_ids)), lambda: None
        )
        return list(logits.split([len(row.token_ids) for row in rows]))

    def run(self, token_ids: Sequence[int], chunk: int, sequence: str = "it") -> torch.Tensor:
        """Logits of a whole sequence, `chunk` tokens a step."""
        chunks = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
        return torch.cat([self.step(Row(sequence, part))[0] for part in chunks])

    def table(self, sequence: str) -> list[int]:
        return self._tables[sequence]

    def _metadata(self, rows: Sequence[Row]) -> AttentionMetadata:
        starts, seq_lens, positions, slots = [0], [], [], []
        for row in rows:
            table = self._tables.setdefault(row.sequence, [])
            start = self._lengths.get(row.sequence, 0)
            end = self._lengths[row.sequence] = start + len(row.token_ids)
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            starts.append(starts[-1] + len(row.token_ids))
            seq_lens.append(end)
            positions += range(start, end)
            slots += [
                table[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(start, end)
            ]
        width = max(len(self._tables[row.sequence]) for row in rows)
        tables = [self._tables[row.sequence] for row in rows]
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            positions=torch.tensor(positions),
            max_query_len=max(len(row.token_ids) for row in rows),
            max_seq_len=max(seq_lens),
        )


def random_tokens(length: int, seed: int = 0, vocab_size: int = 128) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab_size) for _ in range(length)]
