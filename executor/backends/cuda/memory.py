"""How many K/V blocks a GPU holds beside the weights and the activations of the largest step.

Owns the sum: a share of the device's memory, less what is in use already, less the peak of a profiled step. The profile
runs the largest steps that the limits allow against a cache of two blocks, before the real cache is taken; reading the
device stands behind `Gauge`, so that the sum can be tested without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from executor.backends.base import AttentionMetadata, OutOfMemory
from executor.plan import Limits
from executor.sizes import format_bytes

DEFAULT_SHARE = 0.9  # of the device's memory, for everything this process does on it
MIN_BLOCKS = 2  # the null block and one to use


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's memory, in bytes."""

    total: int
    used: int  # by everybody, weights included; nothing of a step


class Gauge(Protocol):
    """What tells of a device's memory."""

    def read(self) -> Reading: ...

    def peak_of(self, step: Callable[[], None]) -> int:
        """Bytes that a step takes at its peak beyond what stood before it."""


class Forward(Protocol):
    """The model's step (executor.runner.Decoder)."""

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor: ...


def kv_cache_blocks(
    bytes_per_block: int,
    reading: Reading,
    peak_activations: int,
    memory: int | None = None,
    share: float = DEFAULT_SHARE,
) -> int:
    """Blocks that fit into `memory` bytes, or into what `share` of the device leaves.

    Raises OutOfMemory, naming both sizes, where `memory` exceeds what is left or holds less than two blocks.
    """
    free = max(0, reading.total - reading.used - peak_activations)
    if memory is not None and memory > free:
        raise OutOfMemory(
            f"a K/V cache of {format_bytes(memory)} was asked for, but the GPU has {format_bytes(free)} left beside "
            f"{format_bytes(reading.used)} in use and {format_bytes(peak_activations)} for activations"
        )
    budget = max(0, int(reading.total * share) - reading.used - peak_activations) if memory is None else memory
    if budget < MIN_BLOCKS * bytes_per_block:
        raise OutOfMemory(
            f"the smallest K/V cache, {MIN_BLOCKS} blocks, takes {format_bytes(MIN_BLOCKS * bytes_per_block)}, but the "
            f"budget is {format_bytes(budget)}: {share:.0%} of the GPU's {format_bytes(reading.total)}, less "
            f"{format_bytes(reading.used)} in use and {format_bytes(peak_activations)} for activations"
        )
    return budget // bytes_per_block


def profile(model: Forward, gauge: Gauge, limits: Limits) -> int:
    """Peak bytes of the largest steps: as many tokens as a plan may bring, and as many decode rows. They are added,
    because CUDA graphs keep the memory of the decode step for themselves. The cache must have two blocks."""
    num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    steps = [_spread(limits.max_num_batched_tokens, num_seqs, limits), [1] * num_seqs]
    return sum(gauge.peak_of(lambda rows=rows: _run(model, rows, limits)) for rows in steps)  # type: ignore[misc]


def _spread(num_tokens: int, num_seqs: int, limits: Limits) -> list[int]:
    """The tokens of each of `num_seqs` rows: as long as they may be, one token at least."""
    rows = []
    for left in range(num_seqs - 1, -1, -1):
        rows.append(min(num_tokens - left, limits.max_model_len))
        num_tokens -= rows[-1]
    return rows


def _run(model: Forward, rows: list[int], limits: Limits) -> None:
    """One step whose sequences all live in block 1: what is computed is of no use, how much memory it takes is."""
    block_size = limits.block_size
    lens = torch.tensor(rows)
    positions = torch.cat([torch.arange(row) for row in rows])
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    metadata = AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=lens.int(),
        block_tables=torch.ones((len(rows), -(-max(rows) // block_size)), dtype=torch.int32),
        slot_mapping=block_size + positions % block_size,
        positions=positions,
        max_query_len=max(rows),
        max_seq_len=max(rows),
    )
    with torch.inference_mode():
        model.forward(torch.zeros(len(positions), dtype=torch.int64), metadata, starts[1:] - 1, lambda: None)


class DeviceGauge:
    """The GPU's own numbers: the driver's for what is used, torch's allocator for peaks. Only torch allocates."""

    def read(self) -> Reading:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return Reading(total, total - free)

    def peak_of(self, step: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
