"""What it costs to get a preempted sequence's K/V back: measured on this machine's CPU backend, on
one core, in milliseconds.

Swapping is no feature of Octavo; here it is only timed: every block of a sequence is copied to a buffer and back, each
block on its own in every layer, as a swap of scattered blocks must, or all blocks of a layer at once. Recomputation is
one forward pass over the sequence's tokens. The model has the demo model's shape and random weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.on_gpu.model import RandomWeights
from executor.backends.base import AttentionMetadata, KVCacheSpec
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.platform import open_platform
from executor.model.config import ModelConfig, model_config
from executor.model.decoder import Decoder

NUM_TOKENS = 256  # of the sequence, as in the paper's microbenchmark
BLOCK_SIZES = (1, 4, 16, 64, 256)
SHAPE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


class Cost(NamedTuple):
    """Milliseconds, the least of some runs: on a machine with other work, more says little of ours."""

    block_size: int
    swap_each: float  # out and in, block by block
    swap_layers: float  # out and in, all blocks of a layer at once
    recompute: float


def measure(block_sizes: Sequence[int], repeats: int, seed: int, shape: dict[str, object] = SHAPE) -> list[Cost]:
    torch.set_num_threads(1)
    config = model_config(shape)
    platform = open_platform("bfloat16", False)
    backend = platform.backend
    weights = RandomWeights(torch.device("cpu"), torch.bfloat16)
    decoder = Decoder(config, weights, backend, 2 * NUM_TOKENS)  # type: ignore[arg-type]
    return [_measure(config, backend, decoder, size, repeats, random.Random(seed)) for size in block_sizes]


def _measure(
    config: ModelConfig, backend: CpuBackend, decoder: Decoder, block_size: int, repeats: int, r: random.Random
) -> Cost:
    num_blocks = -(-NUM_TOKENS // block_size)
    backend.allocate_kv_cache(
        KVCacheSpec(
            config.num_layers, 2 * num_blocks + 1, config.num_kv_heads, block_size, config.head_size, backend.dtype
        )
    )
    table = r.sample(range(1, 2 * num_blocks + 1), num_blocks)  # scattered, as in a pool in use
    caches = [*backend.cache.keys, *backend.cache.values]
    rows = torch.tensor(table)
    hosts = [torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype) for cache in caches]

    def swap_each() -> None:
        for cache, host in zip(caches, hosts, strict=True):
            for index, block in enumerate(table):
                host[index].copy_(cache[block])
        for cache, host in zip(caches, hosts, strict=True):
            for index, block in enumerate(table):
                cache[block].copy_(host[index])

    def swap_layers() -> None:
        for cache, host in zip(caches, hosts, strict=True):
            torch.index_select(cache, 0, rows, out=host)
        for cache, host in zip(caches, hosts, strict=True):
            cache.index_copy_(0, rows, host)

    ids = torch.tensor([r.randrange(100, config.vocab_size) for _ in range(NUM_TOKENS)])
    metadata = _prefill_metadata(table, block_size)
    last = torch.tensor([NUM_TOKENS - 1])

    def recompute() -> None:
        decoder.forward(ids, metadata, last, lambda: None)

    with torch.inference_mode():
        return Cost(
            block_size,
            1000 * _least(swap_each, repeats),
            1000 * _least(swap_layers, repeats),
            1000 * _least(recompute, repeats),
        )


def _prefill_metadata(table: Sequence[int], block_size: int) -> AttentionMetadata:
    positions = torch.arange(NUM_TOKENS)
    blocks = torch.tensor(table)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_tables=blocks.to(torch.int32)[None],
        slot_mapping=blocks[positions // block_size] * block_size + positions % block_size,
        positions=positions,
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
    )


def _least(work: Callable[[], None], repeats: int) -> float:
    """Seconds; a first run does not count."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
