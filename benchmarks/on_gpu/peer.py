"""The peer: transformers' continuous batching, on the same weights, for the same prompts, in the same process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.on_gpu.model import RandomWeights
from benchmarks.on_gpu.steps import Measured


def build(
    config: Mapping[str, object], weights: RandomWeights, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """transformers' Llama with these weights."""
    values = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**values), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.take(name, tuple(parameter.shape)))
    return model


def answer(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int, max_memory_percent: float = 0.8
) -> Measured:
    """Greedy, no end of sequence; one short run first, so that nothing is loaded or captured in the measured one."""
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_memory_percent=max_memory_percent)

    def run(batch: Sequence[Sequence[int]]) -> int:
        outputs = model.generate_batch(
            [list(prompt) for prompt in batch],
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    run(prompts)
    began = time.perf_counter()
    num_tokens = run(prompts)
    return Measured(num_tokens, new_tokens, time.perf_counter() - began)
