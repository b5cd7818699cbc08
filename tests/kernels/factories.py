"""Inputs of attention kernels as the worst caller would hand them over.

Every tensor ends at a page that faults. Block 0, blocks that no table names and slots behind a sequence's end are full
of NaN; unused table entries and unused items point far outside; blocks are handed out in a random order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor.backends.cuda.plan import DecodePlan, decode_plan
from executor.backends.cuda.step import DecodeItems, DecodeRows, Window
from tests.kernels.oracle import gathered
from tests.kernels.sim import address_space, guarded

FAR = 2**30  # what unused indices hold
POISON_BYTE = 0xFF  # NaN in every format


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One launch over rows of given lengths. Fields are what tests override."""

    seq_lens: Sequence[int] = (1, 15, 16, 17, 63, 64, 65, 300)
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: dtype
    window: Window = None
    softcap: float | None = None
    num_ctas: int = 8  # small: nothing is split; large: as much as the plan allows
    q_magnitude: float = 1.0
    equal_keys: bool = False  # all logits of a row equal
    shared_blocks: int = 0  # leading blocks that all tables share
    token_rows: bool = False  # rows lie scattered among other tokens
    spare_items: int = 3  # of the grid, beyond those that count
    deterministic: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Tensors of a case, guarded, and the host's view of its sequences."""

    out: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: DecodeRows
    plan: DecodePlan
    tokens: list[int]  # row r is token tokens[r]
    keys: list[torch.Tensor]  # [length, num_kv_heads, head_size] float64 a row, with the scale of fp8 applied
    values: list[torch.Tensor]

    def first_rows(self, count: int) -> DecodeInputs:
        """The same batch without its later rows, with a plan of its own and a fresh output."""
        lens = self.rows.seq_lens[:count].numpy()
        plan = decode_plan(lens, 1, 1, deterministic=True)
        rows = DecodeRows(
            token_rows=None,
            seq_lens=guarded(self.rows.seq_lens[:count]),
            block_tables=guarded(self.rows.block_tables[:count]),
            items={None: decode_items(plan, spare=0)},
        )
        out = guarded(poisoned((count, *self.out.shape[1:]), self.out.dtype))
        return replace(self, out=out, rows=rows, plan=plan, tokens=list(range(count)))


def decode_items(plan: DecodePlan, spare: int) -> DecodeItems:
    """A plan as the kernels read it, with `spare` items behind those that count."""
    items = torch.full((len(plan.items) + spare, 4), FAR, dtype=torch.int32)
    items[: len(plan.items)] = torch.from_numpy(plan.items)
    return DecodeItems(
        items=guarded(items),
        num_items=guarded(torch.tensor([len(plan.items)], dtype=torch.int32)),
        slot_ptr=guarded(torch.from_numpy(plan.slot_ptr)),
        num_slots=plan.num_slots,
    )


def decode_case(**overrides: object) -> DecodeCase:
    return replace(DecodeCase(), **overrides)  # type: ignore[arg-type]


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Full of NaN (for fp8, of the code that a kernel reads as -480)."""
    raw = torch.full((*shape, dtype.itemsize), POISON_BYTE, dtype=torch.uint8)
    return raw.view(dtype).view(*shape)


def block_tables(
    seq_lens: Sequence[int], block_size: int, generator: torch.Generator, shared_blocks: int = 0
) -> tuple[torch.Tensor, int]:
    """Tables in a random order, and the number of blocks of the cache: two more than the tables name, and block 0."""
    counts = [-(-length // block_size) for length in seq_lens]
    total = shared_blocks + sum(max(0, count - shared_blocks) for count in counts)
    order = (torch.randperm(total + 2, generator=generator) + 1)[:total].tolist()
    shared, free = order[:shared_blocks], order[shared_blocks:]
    tables = torch.full((len(seq_lens), max([*counts, 1])), FAR, dtype=torch.int32)
    for row, count in enumerate(counts):
        own = max(0, count - shared_blocks)
        ids = shared[: min(count, shared_blocks)] + free[:own]
        free = free[own:]
        tables[row, :count] = torch.tensor(ids, dtype=torch.int32)
    return tables, total + 3


def paged_cache(
    seq_lens: Sequence[int],
    tables: torch.Tensor,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    equal: bool = False,
) -> torch.Tensor:
    """[num_blocks, num_kv_heads, block_size, head_size] with values in the slots of sequences and NaN elsewhere."""
    cache = poisoned(shape, dtype)
    block_size = shape[2]
    one = torch.randn((shape[1], shape[3]), generator=generator)
    for row, length in enumerate(seq_lens):
        for start in range(0, length, block_size):
            filled = min(block_size, length - start)
            content = torch.randn((shape[1], filled, shape[3]), generator=generator)
            if equal:
                content = one[:, None, :].expand_as(content)
            cache[int(tables[row, start // block_size]), :, :filled] = content.to(dtype)
    return cache


def decode_inputs(case: DecodeCase) -> DecodeInputs:
    """Builds a case; the same seed gives the same tensors."""
    generator = torch.Generator().manual_seed(case.seed)
    tables, num_blocks = block_tables(case.seq_lens, case.block_size, generator, case.shared_blocks)
    shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    k_cache = guarded(paged_cache(case.seq_lens, tables, shape, case.cache_dtype, generator, case.equal_keys))
    v_cache = guarded(paged_cache(case.seq_lens, tables, shape, case.cache_dtype, generator))

    num_rows = len(case.seq_lens)
    num_tokens = 2 * num_rows + 1 if case.token_rows else num_rows
    tokens = 1 + 2 * torch.arange(num_rows) if case.token_rows else None
    q = _q_in_qkv(case, num_tokens, generator)

    lens = np.array(case.seq_lens, np.int32)
    plan = decode_plan(lens, case.num_kv_heads, case.num_ctas, case.window, case.deterministic)
    rows = DecodeRows(
        token_rows=None if tokens is None else guarded(tokens),
        seq_lens=guarded(torch.from_numpy(lens)),
        block_tables=guarded(tables),
        items={case.window: decode_items(plan, case.spare_items)},
    )
    keys = [gathered(k_cache, tables[row], length) * case.k_scale for row, length in enumerate(case.seq_lens)]
    values = [gathered(v_cache, tables[row], length) * case.v_scale for row, length in enumerate(case.seq_lens)]
    out = guarded(poisoned((num_tokens, case.num_heads, case.head_size), case.dtype))
    listed = list(range(num_rows)) if tokens is None else tokens.tolist()
    return DecodeInputs(out, q, k_cache, v_cache, rows, plan, listed, keys, values)


def _q_in_qkv(case: DecodeCase, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """The q part of fused rows, whose K and V parts are NaN; the last row ends with q at the guard page."""
    width = case.num_heads + 2 * case.num_kv_heads
    fused = poisoned((num_tokens, width, case.head_size), case.dtype)
    q = torch.randn((num_tokens, case.num_heads, case.head_size), generator=generator) * case.q_magnitude
    fused[:, -case.num_heads :] = q.to(case.dtype)
    return guarded(fused)[:, -case.num_heads :]


def cache_beyond_31_bits(inputs: DecodeInputs) -> DecodeInputs:
    """The same batch in caches so large that its blocks' offsets, in elements, need more than 31 bits. The memory is
    address space alone: what is not written takes no room, and reads as zeros."""
    small, tables = inputs.k_cache, inputs.rows.block_tables
    num_blocks = 2**31 // small[0].numel() + small.shape[0]
    shift = num_blocks - small.shape[0]
    moved = torch.where(tables == FAR, tables, tables + shift)
    caches = []
    for cache in (inputs.k_cache, inputs.v_cache):
        large = address_space(num_blocks * small[0].numel(), cache.dtype).view(num_blocks, *small.shape[1:])
        large[shift:] = cache
        caches.append(large)
    rows = replace(inputs.rows, block_tables=guarded(moved))
    return replace(inputs, k_cache=caches[0], v_cache=caches[1], rows=rows)
