"""The bound of a decode step alone: all weights are read from memory once for each token, and nothing else is done.

A peer like the others, so that it takes its turn in the same minutes. It reads as fast as all cores of this machine can
add up as many bytes; no more than a small share of those stays in a CPU's caches from one pass to the next.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from benchmarks.versus.comparisons import MEMORY
from benchmarks.versus.system import Outcome, Task, outcome_of


class MemoryReader:
    """A system that draws no tokens, and takes the least time for it."""

    name = MEMORY

    def __init__(self, num_bytes: int) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._weights = torch.ones(num_bytes // 4, dtype=torch.float32)

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def answer(self, task: Task) -> Outcome:
        start = time.perf_counter()
        arrivals = [[self._token(start) for _ in range(work.num_output_tokens)] for work in task.works]
        return outcome_of(task, time.perf_counter() - start, arrivals)

    def _token(self, start: float) -> tuple[float, int]:
        self._weights.sum()
        return time.perf_counter() - start, 1


def weights_bytes(model: Path) -> int:
    """Of a Hugging Face directory; tied embeddings are one tensor there, and read once a step: for the logits."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
