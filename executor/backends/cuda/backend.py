"""The Backend of a GPU: raw kernels and torch's products on one stream, a paged K/V cache in the GPU's memory.

Owns the cache, the number formats and the step that the layers' ops belong to. Runs wherever its launcher does: with
the simulator's it computes on CPU tensors by the kernels' own source. Allocates with torch alone, and calls nothing
that waits for the device: whoever collects draws does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor.backends.base import AttentionMetadata, BlockWeight, HostMark, KVCacheSpec, Linear, Mark, OutOfMemory
from executor.backends.cuda import linear
from executor.backends.cuda.attention import Attention
from executor.backends.cuda.cache_ops import CopyBlocks, GatherRows, copy_blocks_source
from executor.backends.cuda.draw_buffers import DeviceMark, DrawBuffers
from executor.backends.cuda.elementwise import RmsNorm, SiluMul
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.linear import DenseLinear
from executor.backends.cuda.sampling import Sampler
from executor.backends.cuda.staging import Staging
from executor.backends.cuda.step import Step, Window, WorkShape, eager_step
from executor.backends.platform import PlatformError
from executor.sampler import Draws, SamplerOutput, SamplingBatch
from executor.sizes import format_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STAGING_BYTES = 1 << 16  # at first; they grow


class UnsupportedShape(PlatformError):
    """No kernel is made for a model's sizes."""


class CudaBackend:
    """Ops of a decoder on a GPU; see `executor.backends.base.Backend` for the contracts."""

    def __init__(
        self,
        launcher: Launcher,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        num_sms: int = 1,
        deterministic: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"the CUDA backend computes in bfloat16, float16 or float32, not {dtype}")
        self.device = device
        self.dtype = dtype
        self.deterministic = deterministic
        self._launcher = launcher
        self._num_sms = num_sms
        self._rms_norm = RmsNorm(launcher, dtype)
        self._silu_mul = SiluMul(launcher, dtype)
        self._gather_rows = GatherRows(launcher)
        self._staging = Staging(device, _STAGING_BYTES)
        self._copies = Staging(device, _STAGING_BYTES)
        self._sampler = Sampler(launcher, Staging(device, _STAGING_BYTES).upload)
        self._draws = DrawBuffers(device)
        self._windows: tuple[Window, ...] = ()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._spec: KVCacheSpec | None = None
        self._copy_blocks: CopyBlocks | None = None
        self._attention: Attention | None = None
        self._step: tuple[AttentionMetadata, Step] | None = None

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        self.release_kv_cache()  # an old cache must not stand beside the new one
        shape = (spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size)
        try:
            for _ in range(spec.num_layers):
                self.keys.append(torch.zeros(shape, dtype=spec.dtype, device=self.device))
                self.values.append(torch.zeros(shape, dtype=spec.dtype, device=self.device))
        except torch.OutOfMemoryError as error:
            self.release_kv_cache()
            size = format_bytes(spec.num_blocks * spec.bytes_per_block)
            raise OutOfMemory(f"a K/V cache of {spec.num_blocks} blocks needs {size}: {error}") from error
        self._spec = spec
        self._copy_blocks = CopyBlocks(self._launcher, [*self.keys, *self.values])

    def release_kv_cache(self) -> None:
        """Gives the cache's memory back. What was captured over it must not run again."""
        self.keys, self.values = [], []
        self._spec = self._copy_blocks = self._attention = self._step = None

    @property
    def work_shape(self) -> WorkShape:
        """What the work lists of a step depend on besides lengths."""
        assert self._attention is not None, "use_heads comes first"
        return self._attention.work_shape

    def use_heads(self, num_heads: int) -> None:
        """Makes the kernels for a model of so many query heads, once, those too that a first step would not need: no
        request should wait for a compiler. Raises UnsupportedShape."""
        assert self._spec is not None, "allocate_kv_cache comes first"
        if self._attention is None or self._attention.num_heads != num_heads:
            try:
                self._attention = Attention(
                    self._launcher, num_heads, self._spec, self.dtype, self._num_sms, self.deterministic
                )
            except ValueError as error:
                raise UnsupportedShape(str(error)) from error
            self._attention.prepare()
            self._sampler.prepare()
            self._launcher.prepare(copy_blocks_source())

    def begin(self, step: Step) -> AttentionMetadata:
        """The step that the following ops belong to; returns what they are given as its metadata."""
        first = step.decode or step.prefill
        assert first is not None, "a step without rows"
        num_rows = len(first.seq_lens)
        handle = AttentionMetadata(
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=first.seq_lens,
            block_tables=first.block_tables,
            slot_mapping=step.slot_mapping,
            positions=step.positions,
            max_query_len=1,
            max_seq_len=0,
        )
        self._step = (handle, step)
        return handle

    @property
    def block_kinds(self) -> frozenset[str]:
        return frozenset()

    def prepare_linear(self, weight: torch.Tensor | BlockWeight, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor)

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=self.device, dtype=self.dtype).contiguous()

        return DenseLinear(placed(weight), None if bias is None else placed(bias))

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self._gather_rows(table, token_ids.to(self.device), drawn=self._draws.token_ids)

    def linear(self, x: torch.Tensor, linear_: Linear) -> torch.Tensor:
        assert isinstance(linear_, DenseLinear)
        return linear.tiled(x, linear_) if self.deterministic else linear.apply(x, linear_)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rms_norm(x, weight, eps, residual)

    def rope_and_write_kv(
        self,
        layer: int,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> torch.Tensor:
        self.use_heads(num_heads)
        assert self._attention is not None
        assert self._spec is not None
        step = self._current(metadata)
        q = torch.empty((len(qkv), num_heads, self._spec.head_size), dtype=self.dtype, device=self.device)
        self._attention.rope_and_write_kv(
            q,
            self.keys[layer],
            self.values[layer],
            qkv,
            cos_sin,
            step.positions,
            step.slot_mapping,
            q_norm,
            k_norm,
            norm_eps,
        )
        return q

    def paged_attention(
        self,
        layer: int,
        q: torch.Tensor,
        metadata: AttentionMetadata,
        softmax_scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        self.use_heads(q.shape[1])
        assert self._attention is not None
        if sliding_window not in self._windows:
            self._windows = (*self._windows, sliding_window)
        step = self._current(metadata, sliding_window)
        return self._attention(q, self.keys[layer], self.values[layer], step, softmax_scale, sliding_window, softcap)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._silu_mul(gate_up)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if sources:
            assert self._copy_blocks is not None
            pairs = np.array([sources, destinations], np.int32).T
            self._copy_blocks(self._copies.upload({"pairs": pairs})["pairs"])

    def reserve_draws(self, max_draws: int) -> None:
        """Room for so many draws a step; before anything is captured."""
        self._draws.reserve(max_draws)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Draws:
        if len(batch) == 0:
            return SamplerOutput(np.zeros(0, np.int64))
        drawn = self._sampler.launch(logits, batch, self._draws.next(len(batch)))
        return self._draws.fetch(drawn.buffer, lambda host: self._sampler.report(logits, batch, drawn, host))

    def mark(self) -> Mark:
        return DeviceMark() if self.device.type == "cuda" else HostMark()

    def _current(self, metadata: AttentionMetadata, *windows: Window) -> Step:
        """The step that `begin` was told of, or, for metadata of another making, one staged here by its first op."""
        if self._step is not None and self._step[0] is metadata:
            step = self._step[1]
            if step.decode is None or all(window in step.decode.items for window in windows):
                return step
        host = eager_step(
            torch.zeros(0, dtype=torch.int64),
            _on_host(metadata),
            torch.zeros(0, dtype=torch.int64),
            self.work_shape,
            self._windows,
        )
        step = host.staged(self._staging.upload(host.arrays))
        self._step = (metadata, step)
        return step


def _on_host(metadata: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=metadata.query_start_loc.cpu(),
        seq_lens=metadata.seq_lens.cpu(),
        block_tables=metadata.block_tables.cpu(),
        slot_mapping=metadata.slot_mapping.cpu(),
        positions=metadata.positions.cpu(),
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
