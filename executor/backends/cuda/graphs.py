"""The model's step on a device: staged in one copy, and decode steps replayed from CUDA graphs.

Owns the buckets: a decode step runs in the smallest bucket that holds its rows, whose graph was captured with all
shapes, grids and addresses fixed; what changes are the contents of the staging buffer and of the block tables. Every
other step (a prompt's chunk, the deterministic mode, more rows than the largest bucket) runs eagerly. Stands between
the runner and the decoder, and knows neither plans nor layers.

A capture allows no allocation by others, no synchronization and no first use of anything, so each bucket's step runs
once before it is captured: kernels are compiled, loaded and allowed their shared memory, the matrix library has chosen.
Everything is captured before the first request. Graphs share one memory pool, because no two run at once; the largest
is captured first, so that the others fit into what it took.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from executor.backends.base import AttentionMetadata
from executor.backends.cuda.staging import Staging, staged_bytes
from executor.backends.cuda.step import HostStep, Step, Window, WorkShape, bucket_step, eager_step

_EAGER_BYTES = 1 << 20  # of the eager steps' staging buffers at first; they grow


class Replay(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Runs it again on the current stream, on whatever its buffers hold now."""


class Capture(Protocol):
    """What turns a step into one that can be replayed."""

    def capture(self, step: Callable[[], None]) -> Replay: ...


class Model(Protocol):
    """The decoder (executor.runner.Decoder)."""

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor: ...


class StepBackend(Protocol):
    """What this module needs of the backend."""

    @property
    def device(self) -> torch.device: ...

    @property
    def work_shape(self) -> WorkShape: ...

    def begin(self, step: Step) -> AttentionMetadata:
        """The step that the following ops belong to; what they are given as its metadata."""


def buckets(max_num_seqs: int) -> list[int]:
    """Rows of the graphs: every 8 from 8 on, every 16 from 64 on, and `max_num_seqs` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class StagedDecoder:
    """A decoder whose steps come from the host; executor.runner.Decoder for the runner."""

    def __init__(
        self,
        model: Model,
        backend: StepBackend,
        windows: Sequence[Window],
        max_blocks: int,
        capture: Capture | None = None,
        max_bucket: int = 256,
    ) -> None:
        """windows: those of the model's layers, each once. max_blocks: of the longest block table. Without `capture`
        every step is eager."""
        self._model = model
        self._backend = backend
        self._windows = tuple(windows)
        self._capture = capture
        self._eager = Staging(backend.device, _EAGER_BYTES)
        self._sizes = [] if capture is None or backend.work_shape.deterministic else buckets(max_bucket)
        self._graphs: dict[int, Replay] = {}
        self._progress_calls = 0
        if self._sizes:
            largest = self._host_step(self._sizes[-1], _no_rows())
            tables = np.zeros((self._sizes[-1], max_blocks), np.int32)
            most = staged_bytes(
                {**largest.arrays, "logits_rows": np.zeros(self._sizes[-1], np.int64), "tables": tables}
            )
            self._staging = Staging(backend.device, most, may_grow=False)
            self._block_tables = torch.zeros((self._sizes[-1], max_blocks), dtype=torch.int32, device=backend.device)
            self._logits: torch.Tensor | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[str], None] = lambda line: None) -> None:
        """Captures every bucket, the largest first. The K/V cache stands; nothing is written to it."""
        for size in reversed(self._sizes):
            progress(f"capturing decode steps of {size} rows")
            self._capture_bucket(size)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        """All tensors on the CPU; logits [n, vocab] fp32 on the device, good until the next step."""
        num_rows = len(token_ids)
        if self._graphs and metadata.max_query_len == 1 and num_rows <= self._sizes[-1]:
            return self._replay(num_rows, token_ids, metadata, logits_indices, progress)
        host = eager_step(token_ids, metadata, logits_indices, self._backend.work_shape, self._windows)
        step = host.staged(self._eager.upload(host.arrays))
        return self._model.forward(step.token_ids, self._backend.begin(step), step.logits_indices, progress)

    def _replay(
        self,
        num_rows: int,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        host = self._host_step(size, metadata, token_ids)
        tables = metadata.block_tables.numpy()
        # What graphs do not read comes last, in the size it has; the tables go to the place that graphs read.
        logits_rows = logits_indices.numpy()
        staged = self._staging.upload({**host.arrays, "logits_rows": logits_rows, "tables": tables})
        self._block_tables[:num_rows, : tables.shape[1]].copy_(staged["tables"])
        self._graphs[size].replay()
        for _ in range(self._progress_calls):
            progress()
        assert self._logits is not None
        if np.array_equal(logits_rows, np.arange(num_rows)):
            return self._logits[:num_rows]
        # Some rows do not sample; a prompt's position that wants log probabilities comes behind all that do.
        return self._logits[staged["logits_rows"]]

    def _capture_bucket(self, size: int) -> None:
        host = self._host_step(size, _no_rows())
        staged = self._staging.upload(host.arrays)
        step = host.staged({**staged, "decode.block_tables": self._block_tables[:size]})
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1

        def run() -> None:
            logits = self._model.forward(step.token_ids, self._backend.begin(step), step.logits_indices, count)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits[:size].copy_(logits)

        run()
        self._progress_calls = calls
        assert self._capture is not None
        self._graphs[size] = self._capture.capture(run)

    def _host_step(self, size: int, metadata: AttentionMetadata, token_ids: torch.Tensor | None = None) -> HostStep:
        ids = np.zeros(0, np.int64) if token_ids is None else token_ids.numpy()
        return bucket_step(size, ids, metadata, self._backend.work_shape, self._windows)


def _no_rows() -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros((0, 1), dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=0,
    )


class Rerun:
    """Instead of a graph, the step itself, in the same shapes and buffers: what replays are compared with, and what
    runs where there are no graphs."""

    def capture(self, step: Callable[[], None]) -> Replay:
        return _Again(step)


class _Again:
    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class CudaGraphs:
    """Captures on a stream of its own, into one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, step: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # once on the stream of the capture: libraries keep their workspaces by stream
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        return graph
