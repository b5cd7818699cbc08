"""Native CPU kernels against plain torch: attention alone, and steps of the demo model end to end; and attention over a
shared prefix, read once, against the same kernels where each sequence reads it.

    python -m benchmarks.cpu_attention [--json] [--threads N] [--rounds N] [--model NAME]

All variants run in one process, in turns, so that what else the machine does falls on each alike; figures are the
medians and the best of the turns, and ratios are taken turn by turn. A step is one call of the decoder; the parts of
its best turn are measured by a clock around each op, and "rest" is Python, embedding and what else lies between them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from executor.backends.base import AttentionMetadata, KVCacheSpec
from executor.backends.cpu.backend import CpuBackend
from executor.model.loader import LoadedModel, load_model
from executor.model.resolve import resolve_model

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64  # the demo model's
LAYERS = 30


class Case(NamedTuple):
    name: str
    seq_lens: list[int]
    query_lens: list[int]
    shared: int = 0  # leading tokens whose blocks are those of all sequences, whole blocks

    @property
    def num_blocks(self) -> int:
        own = sum(-(-(length - self.shared) // BLOCK_SIZE) for length in self.seq_lens)
        return self.shared // BLOCK_SIZE + own + 1


class Row(NamedTuple):
    """Milliseconds of one call, before and after; the ratio is that of the two, turn by turn."""

    case: str
    before_ms: float
    after_ms: float
    best_ms: float
    ratio: float
    parts_ms: dict[str, float] | None = None  # of best_ms


ATTENTION = [
    Case("decode, 64 sequences of 200", [200] * 64, [1] * 64),
    Case("prefill of 512", [512], [512]),
    Case("decode, 1 sequence of 4096", [4096], [1]),
]
# A prefix read once for all, against the same blocks read by every sequence.
SHARED = [
    Case(f"{rows} sequences share {prefix}", [prefix + 100] * rows, [1] * rows, shared=prefix)
    for rows in (32, 64)
    for prefix in (512, 1024)
]
STEPS = [
    Case("1 decode row", [200], [1]),
    Case("32 decode rows", [200] * 32, [1] * 32),
    Case("64 decode rows", [200] * 64, [1] * 64),
    Case("prefill of 512", [512], [512]),
]


PARTS = {
    "linear": "products",
    "paged_attention": "attention",
    "rope_and_write_kv": "rope + K/V",
    "rms_norm": "norm",
    "silu_mul": "silu",
}


class Clock:
    """Time within each op of a backend."""

    def __init__(self, backend: CpuBackend) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        for name in PARTS:
            setattr(backend, name, self._timed(name, getattr(backend, name)))

    def _timed(self, name: str, op: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            began = time.perf_counter()
            result = op(*arguments)
            self.seconds[name] += time.perf_counter() - began
            return result

        return timed


def metadata_of(case: Case) -> AttentionMetadata:
    """Blocks in an order that has nothing to do with their addresses."""
    free = (torch.randperm(case.num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    prefix = [free.pop() for _ in range(case.shared // BLOCK_SIZE)]
    tables = [
        prefix + [free.pop() for _ in range(-(-(length - case.shared) // BLOCK_SIZE))] for length in case.seq_lens
    ]
    width = max(map(len, tables))
    spans = list(zip(case.seq_lens, case.query_lens, tables, strict=True))
    positions = [(table, p) for length, queries, table in spans for p in range(length - queries, length)]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *itertools.accumulate(case.query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, p in positions]),
        positions=torch.tensor([p for _, p in positions]),
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
    )


def compare(name: str, first: Callable[[], float], second: Callable[[], float], rounds: int) -> Row:
    """Each callable returns its seconds."""
    first()
    second()
    pairs = [(first(), second()) for _ in range(rounds)]
    return Row(
        case=name,
        before_ms=statistics.median(before for before, _ in pairs) * 1e3,
        after_ms=statistics.median(after for _, after in pairs) * 1e3,
        best_ms=min(after for _, after in pairs) * 1e3,
        ratio=statistics.median(before / after for before, after in pairs),
    )


def attention(case: Case, before: CpuBackend, after: CpuBackend, rounds: int) -> Row:
    """All layers of a step, so that no layer's K/V is in the CPU's caches; milliseconds of one layer."""
    metadata, dtype = metadata_of(case), after.dtype
    q = torch.randn(len(metadata.positions), NUM_HEADS, HEAD_SIZE).to(dtype)

    def timed(backend: CpuBackend) -> Callable[[], float]:
        backend.allocate_kv_cache(KVCacheSpec(LAYERS, case.num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype))
        for cache in (*backend.cache.keys, *backend.cache.values):
            cache.normal_()

        def run() -> float:
            began = time.perf_counter()
            for layer in range(LAYERS):
                backend.paged_attention(layer, q, metadata, HEAD_SIZE**-0.5)
            return (time.perf_counter() - began) / LAYERS

        return run

    return compare(case.name, timed(before), timed(after), rounds)


def steps(model: str, dtype: torch.dtype, rounds: int) -> list[Row]:
    cache_dir = Path.home() / ".cache" / "octavo"
    directory = resolve_model(model, cache_dir, lambda line: None).directory
    backends = CpuBackend(dtype, native=False), CpuBackend(dtype)
    decoders = [load_model(directory, backend, cache_dir) for backend in backends]
    clock = Clock(backends[1])
    return [step(case, backends, decoders, clock, rounds) for case in STEPS]


def step(
    case: Case, backends: tuple[CpuBackend, CpuBackend], models: list[LoadedModel], clock: Clock, rounds: int
) -> Row:
    metadata = metadata_of(case)
    token_ids = torch.arange(len(metadata.positions)) % models[0].config.vocab_size
    logits_indices = metadata.query_start_loc[1:].long() - 1
    turns: list[tuple[float, dict[str, float]]] = []

    def run(model: LoadedModel) -> float:
        clock.seconds = dict.fromkeys(PARTS, 0.0)
        began = time.perf_counter()
        model.decoder.forward(token_ids, metadata, logits_indices, lambda: None)
        taken = time.perf_counter() - began
        if model is models[1]:
            turns.append((taken, clock.seconds))
        return taken

    for backend, model in zip(backends, models, strict=True):
        backend.allocate_kv_cache(model.kv_cache_spec(case.num_blocks, BLOCK_SIZE, backend.dtype))
        for cache in (*backend.cache.keys, *backend.cache.values):
            cache.normal_()
    row = compare(case.name, lambda: run(models[0]), lambda: run(models[1]), rounds)
    best, seconds = min(turns, key=lambda turn: turn[0])
    parts = {PARTS[name]: value * 1e3 for name, value in seconds.items()}
    return row._replace(parts_ms=parts | {"rest": (best - sum(seconds.values())) * 1e3})


def table(title: str, rows: list[Row], before: str, after: str) -> str:
    parts_of = "   parts of the best, ms" if rows[0].parts_ms else ""
    lines = [f"{title:32} {before:>9} {after:>9} {'(best)':>8} {'ratio':>6}{parts_of}"]
    for row in rows:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in (row.parts_ms or {}).items())
        times = f"{row.before_ms:9.2f} {row.after_ms:9.2f} {row.best_ms:8.2f} {row.ratio:6.2f}"
        lines.append(f"{row.case:32} {times}   {parts}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_attention", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    formats = (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    results: dict[str, list[Row]] = {}
    for name, dtype in formats:
        before, after = CpuBackend(dtype, native=False), CpuBackend(dtype)
        rows = [attention(case, before, after, options.rounds) for case in ATTENTION]
        results[f"attention of a layer, {name}"] = rows
    results["a step, bfloat16"] = steps(options.model, torch.bfloat16, options.rounds)
    shared: dict[str, list[Row]] = {}
    for name, dtype in formats:
        # The deterministic mode shares nothing; with several threads it splits nothing either.
        before, after = CpuBackend(dtype, deterministic=True), CpuBackend(dtype)
        shared[f"shared prefixes, {name}"] = [attention(case, before, after, options.rounds) for case in SHARED]
    if options.json:
        print(json.dumps({title: [row._asdict() for row in rows] for title, rows in (results | shared).items()}))
    else:
        tables = [table(title, rows, "torch ms", "native ms") for title, rows in results.items()]
        tables += [table(title, rows, "alone ms", "shared ms") for title, rows in shared.items()]
        print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
