"""One decoder for the whole Llama family, written over the Backend's ops.

Owns the order of the ops and which weights go where; knows nothing of sequences, devices or number formats. q, k and v
are one product, gate and up another; logits are computed for the rows that somebody asked for, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.backends.base import AttentionMetadata, Backend, BlockWeight, Linear
from executor.model.config import ModelConfig
from executor.model.errors import BrokenModel
from executor.model.rope import cos_sin_table
from executor.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # rows: all q heads, all k heads, all v heads
    q_norm: torch.Tensor | None  # [head_size]
    k_norm: torch.Tensor | None  # [head_size]
    o: Linear
    post_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # rows: gate, then up
    down: Linear
    sliding_window: int | None


class Decoder:
    """A model in a backend's memory."""

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend, max_model_len: int) -> None:
        """Reads and packs all weights. Raises BrokenModel if one is missing, left over or of a wrong shape."""
        self.config = config
        self.max_model_len = max_model_len
        self._backend = backend
        self._softmax_scale = config.head_size**-0.5
        builder = _Builder(config, weights, backend)
        self._embedding = builder.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._norm = builder.tensor("model.norm.weight", (config.hidden_size,))
        self._lm_head = builder.lm_head()
        builder.refuse_left_over()
        self._cos_sin = cos_sin_table(config.rope, config.head_size, config.max_position_embeddings, max_model_len).to(
            backend.device
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        """token_ids [num_tokens] int64, logits_indices [n] int64 (rows of this step) -> logits [n, vocab] fp32.

        Writes the tokens' K/V into the cache. Calls `progress` after every layer.
        """
        backend, config = self._backend, self.config
        x = backend.embed(self._embedding, token_ids)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, residual = backend.rms_norm(x, layer.input_norm, config.rms_norm_eps, residual)
            q = backend.rope_and_write_kv(
                index,
                backend.linear(x, layer.qkv),
                self._cos_sin,
                metadata,
                config.num_heads,
                layer.q_norm,
                layer.k_norm,
                config.rms_norm_eps,
            )
            attended = backend.paged_attention(index, q, metadata, self._softmax_scale, layer.sliding_window)
            x = backend.linear(attended.flatten(1), layer.o)
            x, residual = backend.rms_norm(x, layer.post_norm, config.rms_norm_eps, residual)
            x = backend.linear(backend.silu_mul(backend.linear(x, layer.gate_up)), layer.down)
            progress()
        if not len(logits_indices):
            return torch.empty((0, config.vocab_size), device=backend.device)
        if residual is not None:
            residual = residual[logits_indices]
        x, _ = backend.rms_norm(x[logits_indices], self._norm, config.rms_norm_eps, residual)
        return backend.linear(x, self._lm_head).float()


class _Builder:
    """Takes tensors by their Hugging Face names and gives them the backend's form."""

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend) -> None:
        self._config = config
        self._weights = weights
        self._backend = backend

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.take(name, shape).to(device=self._backend.device, dtype=self._backend.dtype)

    def layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        hidden, inner = config.hidden_size, config.intermediate_size
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = self.tensor(attention + "q_norm.weight", (config.head_size,))
            k_norm = self.tensor(attention + "k_norm.weight", (config.head_size,))
        return Layer(
            input_norm=self.tensor(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(
                {attention + "q_proj": q_size, attention + "k_proj": kv_size, attention + "v_proj": kv_size},
                hidden,
                config.qkv_bias,
            ),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._linear({attention + "o_proj": hidden}, q_size, config.o_bias),
            post_norm=self.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear({mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, config.mlp_bias),
            down=self._linear({mlp + "down_proj": hidden}, inner, config.mlp_bias),
            sliding_window=config.sliding_windows[index],
        )

    def lm_head(self) -> Linear:
        config = self._config
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return self._linear({name: config.vocab_size}, config.hidden_size, bias=False)

    def _linear(self, sizes: dict[str, int], in_features: int, bias: bool) -> Linear:
        """Several products of one input as one; `sizes` maps each name to its rows."""
        biases = self._cat([self.tensor(f"{name}.bias", (size,)) for name, size in sizes.items()]) if bias else None
        shapes = {f"{name}.weight": (size, in_features) for name, size in sizes.items()}
        return self._backend.prepare_linear(self._blocks(shapes) or self._numbers(shapes), biases)

    def _numbers(self, shapes: dict[str, tuple[int, int]]) -> torch.Tensor:
        return self._cat([self._weights.take(name, shape) for name, shape in shapes.items()])

    def _blocks(self, shapes: dict[str, tuple[int, int]]) -> BlockWeight | None:
        """As stored, if all are of one kind, which the backend computes with."""
        kinds = self._weights.kinds(*shapes)
        if len(kinds) > 1 or not kinds <= self._backend.block_kinds:
            return None
        parts = [self._weights.take_blocks(name, shape) for name, shape in shapes.items()]
        return BlockWeight(parts[0].kind, self._cat([part.blocks for part in parts]), parts[0].in_features)

    @staticmethod
    def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def refuse_left_over(self) -> None:
        """A tensor that nobody computes with is a model other than the config tells. Old checkpoints keep their
        rotary frequencies, and some a copy of tied embeddings: both are known and redundant."""
        left = [
            name
            for name in self._weights.left()
            if not name.endswith("rotary_emb.inv_freq")
            and not (self._config.tie_word_embeddings and name == "lm_head.weight")
        ]
        if left:
            raise BrokenModel(f"{len(left)} tensors are not part of the model that the config tells, first {left[0]!r}")
