"""Every kernel at the sizes that docs/kernels.md names targets for, through the launch wrappers that the executor uses.

A case makes as many sets of buffers as L2 cannot hold, and one launch for each; beside it, where torch has an op for
the same work, that op on contiguous data. Sizes are arguments, so that the cases are tested on a CPU with small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from benchmarks.on_gpu import costs
from benchmarks.on_gpu.costs import AttentionShape, Cost
from executor.backends.cuda.attention_decode import DecodeAttention, DecodeShape, decode_launch
from executor.backends.cuda.attention_prefill import PrefillAttention, PrefillSpec
from executor.backends.cuda.cache_ops import CopyBlocks, GatherRows
from executor.backends.cuda.elementwise import RmsNorm, RopeKvWrite, RopeSpec, SiluMul
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.plan import decode_plan, prefill_tiles
from executor.backends.cuda.sampling import Sampler
from executor.backends.cuda.sources import kernel as kernel_source
from executor.backends.cuda.staging import Staging
from executor.backends.cuda.step import DecodeItems, DecodeRows
from executor.sampler import SamplingBatch

Launch = Callable[[], object]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cases run."""

    launcher: Launcher
    device: torch.device
    num_sms: int
    l2_bytes: int

    def copies(self, cost: Cost) -> int:
        return costs.copies_beyond(self.l2_bytes, cost.num_bytes)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        values = torch.randn(shape, device=self.device, dtype=torch.bfloat16 if dtype == FP8 else dtype)
        return values.to(dtype)

    def ints(self, values: Sequence[int] | np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), device=self.device).to(dtype)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run. The defaults are those of the targets."""

    context: int = 4096
    batch: int = 64
    prompt: int = 8192
    chunk: int = 512
    num_heads: int = 32
    many_heads: int = 64
    num_kv_heads: int = 8
    head_size: int = 128
    tokens: int = 4096
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256
    blocks_to_copy: int = 256
    layers_to_copy: int = 8
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size."""

    name: str
    size: str
    cost: Cost
    target: str
    launches: Sequence[Launch]  # over different buffers
    torch_launches: Sequence[Launch] | None = None


def cases(place: Place, sizes: Sizes = Sizes()) -> Iterator[Case]:
    """Made one after another: what a case holds is freed before the next one is made."""
    h, kv = sizes.many_heads, sizes.num_kv_heads
    batch = [sizes.context] * sizes.batch
    yield decode(place, sizes, batch, h, kv, sizes.dtype, "≥ 90 % (85 % first)")
    yield decode(place, sizes, [sizes.context], h, kv, sizes.dtype, "≤ 14 µs with merge")
    yield decode(place, sizes, batch, h, kv, FP8, "≤ 0.6 of bf16's time")
    yield decode(place, sizes, batch, kv, kv, sizes.dtype, "≥ 85 %")
    yield merge_states(place, sizes)
    yield prefill(place, sizes, [(0, sizes.prompt)], "≥ 350 TFLOP/s")
    yield prefill(place, sizes, [(sizes.prompt, sizes.chunk)], "≥ 250 TFLOP/s")
    yield rope_kv_write(place, sizes, sizes.tokens, "≥ 85 %")
    yield rope_kv_write(place, sizes, sizes.batch, "< 4 µs")
    yield add_rms_norm(place, sizes)
    yield silu_mul(place, sizes)
    yield sample(place, sizes)
    yield copy_blocks(place, sizes)
    yield gather_rows(place, sizes)


BLOCK = 16


def _shape(sizes: Sizes, num_heads: int, num_kv_heads: int, kv_dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, sizes.head_size, sizes.dtype.itemsize, kv_dtype.itemsize)


def _cache(place: Place, sizes: Sizes, num_blocks: int, num_kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """K and V."""
    return [place.random(num_blocks, num_kv_heads, BLOCK, sizes.head_size, dtype=dtype) for _ in range(2)]


def _tables(place: Place, seq_lens: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Block tables in a random order, as after hours of serving; and the blocks that the cache must have."""
    width = max(-(-length // BLOCK) for length in seq_lens)
    num_blocks = width * len(seq_lens) + 1
    order = np.random.default_rng(0).permutation(num_blocks - 1) + 1
    return place.ints(order.reshape(len(seq_lens), width)), num_blocks


def decode(
    place: Place,
    sizes: Sizes,
    seq_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    kv_dtype: torch.dtype,
    target: str,
) -> Case:
    shape = DecodeShape(num_heads, num_kv_heads, sizes.head_size, BLOCK, sizes.dtype, kv_dtype)
    kernel = DecodeAttention(place.launcher, shape)
    cost = costs.decode(_shape(sizes, num_heads, num_kv_heads, kv_dtype), seq_lens)
    groups = -(-shape.heads_per_kv_head // decode_launch(shape, place.launcher.shared_limit).heads)
    ctas = place.num_sms * kernel.blocks_per_multiprocessor
    plan = decode_plan(np.array(seq_lens, np.int32), num_kv_heads * groups, ctas)
    tables, num_blocks = _tables(place, seq_lens)
    rows = DecodeRows(
        token_rows=None,
        seq_lens=place.ints(seq_lens),
        block_tables=tables,
        items={
            None: DecodeItems(
                place.ints(plan.items), place.ints([len(plan.items)]), place.ints(plan.slot_ptr), plan.num_slots
            )
        },
    )
    scale = sizes.head_size**-0.5
    launches: list[Launch] = []
    others: list[Launch] = []
    for _ in range(place.copies(cost)):
        q = place.random(len(seq_lens), num_heads, sizes.head_size, dtype=sizes.dtype)
        out = torch.empty_like(q)
        keys, values = _cache(place, sizes, num_blocks, num_kv_heads, kv_dtype)
        launches.append(lambda out=out, q=q, k=keys, v=values: kernel(out, q, k, v, rows, scale))  # type: ignore[misc]
        if kv_dtype == sizes.dtype and len(set(seq_lens)) == 1:
            flat = [
                cache[1:]
                .view(-1)[: len(seq_lens) * num_kv_heads * seq_lens[0] * sizes.head_size]
                .view(len(seq_lens), num_kv_heads, seq_lens[0], sizes.head_size)
                for cache in (keys, values)
            ]
            others.append(lambda q=q, kv=flat: _sdpa(q[:, :, None], *kv, scale, causal=False))  # type: ignore[misc]
    name = "decode" if shape.uses_tensor_cores else "decode_simt"
    heads = f"{num_heads}q/{num_kv_heads}kv"
    size = f"{len(seq_lens)} x {seq_lens[0]}, {heads}, {sizes.head_size}, KV {_name(kv_dtype)}"
    return Case(name, size, cost, target, launches, others or None)


def merge_states(place: Place, sizes: Sizes, slots_a_row: int = 4) -> Case:
    """The joining alone, of a batch whose rows were all split."""
    heads, head_size = sizes.many_heads, sizes.head_size
    source = kernel_source("merge_states", "merge_states.cu", SCALAR=_name(sizes.dtype), HEAD_SIZE=head_size)
    num_slots = sizes.batch * slots_a_row
    cost = costs.merge_states(num_slots, sizes.batch, heads, head_size, sizes.dtype.itemsize)
    slot_ptr = place.ints(np.arange(sizes.batch + 1) * slots_a_row)
    grid, block = (sizes.batch, heads, 1), (head_size // 4, 1, 1)
    launches: list[Launch] = []
    for _ in range(place.copies(cost)):
        out = torch.empty((sizes.batch, heads, head_size), dtype=sizes.dtype, device=place.device)
        values = place.random(num_slots, heads, head_size, dtype=torch.float32)
        sums = place.random(num_slots, heads, dtype=torch.float32)
        args = [out, values, sums, slot_ptr, None]
        launches.append(lambda args=args: place.launcher.launch(source, grid, block, 0, args))  # type: ignore[misc]
    size = f"{sizes.batch} rows of {slots_a_row} slots, {heads} heads"
    return Case("merge_states", size, cost, "< 5 µs", launches)


def prefill(place: Place, sizes: Sizes, chunks: Sequence[tuple[int, int]], target: str) -> Case:
    """chunks: (tokens in cache, queries) of each sequence."""
    spec = PrefillSpec(sizes.num_heads, sizes.num_kv_heads, sizes.head_size, BLOCK, sizes.dtype, sizes.dtype)
    kernel = PrefillAttention(place.launcher, spec)
    cost = costs.prefill(_shape(sizes, sizes.num_heads, sizes.num_kv_heads, sizes.dtype), chunks)
    query_lens = np.array([queries for _, queries in chunks])
    seq_lens = query_lens + np.array([cached for cached, _ in chunks])
    tables, num_blocks = _tables(place, seq_lens.tolist())
    tiles = place.ints(prefill_tiles(query_lens, seq_lens, spec.tile_tokens))
    starts, lens = place.ints(np.concatenate([[0], np.cumsum(query_lens)])), place.ints(seq_lens)
    scale = sizes.head_size**-0.5
    launches: list[Launch] = []
    others: list[Launch] = []
    for _ in range(min(4, place.copies(cost))):  # bounded by products, not by L2
        q = place.random(int(query_lens.sum()), sizes.num_heads, sizes.head_size, dtype=sizes.dtype)
        out = torch.empty_like(q)
        keys, values = _cache(place, sizes, num_blocks, sizes.num_kv_heads, sizes.dtype)
        launches.append(
            lambda out=out, q=q, k=keys, v=values: kernel(out, q, k, v, tiles, starts, lens, tables, scale)  # type: ignore[misc]
        )
        if len(chunks) == 1:
            flat = [
                cache[1:]
                .view(-1)[: int(seq_lens[0]) * sizes.num_kv_heads * sizes.head_size]
                .view(1, sizes.num_kv_heads, int(seq_lens[0]), sizes.head_size)
                for cache in (keys, values)
            ]
            others.append(lambda q=q, kv=flat: _sdpa(q.transpose(0, 1)[None], *kv, scale, causal=True))  # type: ignore[misc]
    cached, queries = chunks[0]
    size = f"{queries} on {cached}, {sizes.num_heads}q/{sizes.num_kv_heads}kv, {sizes.head_size}"
    return Case("prefill", size, cost, target, launches, others or None)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Of a chunk at the end of a longer sequence torch has only a form with a mask."""
    mask = None
    if causal and q.shape[2] != k.shape[2]:
        offset = k.shape[2] - q.shape[2]
        mask = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril(offset)
        causal = False
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def rope_kv_write(place: Place, sizes: Sizes, num_tokens: int, target: str) -> Case:
    spec = RopeSpec(sizes.num_heads, sizes.num_kv_heads, sizes.head_size, BLOCK, sizes.dtype, sizes.dtype)
    kernel = RopeKvWrite(place.launcher, spec)
    cost = costs.rope_kv_write(_shape(sizes, sizes.num_heads, sizes.num_kv_heads, sizes.dtype), num_tokens)
    positions = place.ints(np.arange(num_tokens), torch.int64)
    slots = place.ints(np.arange(num_tokens) + BLOCK, torch.int64)
    angles = place.random(num_tokens, sizes.head_size, dtype=torch.float32)
    launches: list[Launch] = []
    for _ in range(place.copies(cost)):
        qkv = place.random(num_tokens, (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size, dtype=sizes.dtype)
        q = place.random(num_tokens, sizes.num_heads, sizes.head_size, dtype=sizes.dtype)
        keys, values = _cache(place, sizes, -(-num_tokens // BLOCK) + 1, sizes.num_kv_heads, sizes.dtype)
        launches.append(
            lambda q=q, k=keys, v=values, qkv=qkv: kernel(q, k, v, qkv, angles, positions, slots)  # type: ignore[misc]
        )
    size = f"{num_tokens} tokens, {sizes.num_heads}q/{sizes.num_kv_heads}kv, {sizes.head_size}"
    return Case("rope_kv_write", size, cost, target, launches)


def add_rms_norm(place: Place, sizes: Sizes) -> Case:
    kernel = RmsNorm(place.launcher, sizes.dtype)
    cost = costs.add_rms_norm(sizes.tokens, sizes.hidden, sizes.dtype.itemsize)
    weight = place.random(sizes.hidden, dtype=sizes.dtype)
    launches: list[Launch] = []
    others: list[Launch] = []
    for _ in range(place.copies(cost)):
        x, residual, out = (place.random(sizes.tokens, sizes.hidden, dtype=sizes.dtype) for _ in range(3))
        total = torch.empty_like(x)
        launches.append(lambda x=x, r=residual, out=out, total=total: kernel(x, weight, 1e-5, r, out, total))  # type: ignore[misc]
        others.append(lambda x=x, r=residual: functional.rms_norm(x + r, (sizes.hidden,), weight, 1e-5))  # type: ignore[misc]
    return Case("rms_norm", f"{sizes.tokens} x {sizes.hidden}, with residual", cost, "≥ 88 %", launches, others)


def silu_mul(place: Place, sizes: Sizes) -> Case:
    kernel = SiluMul(place.launcher, sizes.dtype)
    cost = costs.silu_mul(sizes.tokens, sizes.inner, sizes.dtype.itemsize)
    launches: list[Launch] = []
    others: list[Launch] = []
    for _ in range(place.copies(cost)):
        gate_up = place.random(sizes.tokens, 2 * sizes.inner, dtype=sizes.dtype)
        out = torch.empty((sizes.tokens, sizes.inner), dtype=sizes.dtype, device=place.device)
        launches.append(lambda x=gate_up, out=out: kernel(x, out))  # type: ignore[misc]
        others.append(lambda x=gate_up: functional.silu(x[:, : sizes.inner]) * x[:, sizes.inner :])  # type: ignore[misc]
    return Case("silu_mul", f"{sizes.tokens} x {sizes.inner}", cost, "≥ 90 %", launches, others)


def sample(place: Place, sizes: Sizes) -> Case:
    """Draws with top-k and top-p, on logits that stay where they are: in a step they were written just before."""
    num = sizes.batch
    upload = Staging(place.device, 1 << 16).upload
    columns: list[dict[str, torch.Tensor]] = []

    def upload_once(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        if not columns:  # the copy is the step's, not the kernel's
            columns.append(upload(arrays))
        return columns[0]

    sampler = Sampler(place.launcher, upload_once)  # type: ignore[arg-type]
    batch = SamplingBatch(
        logits_rows=None,
        temperature=np.full(num, 0.8, np.float32),
        top_k=np.full(num, 50),
        top_p=np.full(num, 0.9, np.float32),
        min_p=np.zeros(num, np.float32),
        seeds=np.arange(num, dtype=np.uint64),
        positions=np.arange(num),
        sample_indices=np.zeros(num, np.int64),
    )
    logits = place.random(num, sizes.vocab, dtype=torch.float32)
    launches = [lambda: sampler.launch(logits, batch)]
    size = f"{num} x {sizes.vocab}, top-k 50, top-p 0.9"
    return Case("sample", size, costs.sample(num, sizes.vocab), "≤ 60 µs", launches)


def copy_blocks(place: Place, sizes: Sizes) -> Case:
    num_blocks = 2 * sizes.blocks_to_copy + 1
    caches = [
        cache
        for _ in range(sizes.layers_to_copy)
        for cache in _cache(place, sizes, num_blocks, sizes.num_kv_heads, sizes.dtype)
    ]
    kernel = CopyBlocks(place.launcher, caches)
    order = np.random.default_rng(0).permutation(num_blocks - 1) + 1
    pairs = place.ints(order.reshape(-1, 2))
    block_bytes = caches[0][0].numel() * caches[0].element_size()
    cost = costs.copy_blocks(sizes.blocks_to_copy, block_bytes * len(caches))
    size = f"{sizes.blocks_to_copy} blocks, {sizes.layers_to_copy} layers"
    return Case("copy_blocks", size, cost, "≥ 85 %", [lambda: kernel(pairs)])


def gather_rows(place: Place, sizes: Sizes) -> Case:
    kernel = GatherRows(place.launcher)
    table = place.random(sizes.vocab, sizes.hidden, dtype=sizes.dtype)
    cost = costs.gather_rows(sizes.tokens, sizes.hidden * sizes.dtype.itemsize)
    launches: list[Launch] = []
    others: list[Launch] = []
    for seed in range(place.copies(cost)):
        wanted = np.random.default_rng(seed).integers(0, sizes.vocab, sizes.tokens)
        indices = place.ints(wanted, torch.int64)
        out = torch.empty((sizes.tokens, sizes.hidden), dtype=sizes.dtype, device=place.device)
        launches.append(lambda i=indices, out=out: kernel(table, i, out))  # type: ignore[misc]
        others.append(lambda i=indices: functional.embedding(i, table))  # type: ignore[misc]
    return Case("gather_rows", f"{sizes.tokens} rows of {sizes.hidden}", cost, "≥ 85 %", launches, others)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}[dtype]
