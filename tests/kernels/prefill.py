"""Prefill cases: built as the worst caller would hand them over, run on a launcher, compared with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor.backends.cuda.attention_prefill import PrefillAttention, PrefillSpec
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.plan import prefill_tiles
from tests.kernels.factories import block_tables, paged_cache, poisoned
from tests.kernels.oracle import attention, attention_tolerance, gathered
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, guarded


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One launch: chunks of several sequences over one cache. Fields are what tests override."""

    query_lens: Sequence[int] = (20,)
    seq_lens: Sequence[int] = (50,)
    num_heads: int = 2
    num_kv_heads: int = 1
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: dtype
    window: int | None = None
    softcap: float | None = None
    q_magnitude: float = 1.0
    equal_keys: bool = False  # all logits of a row equal
    shared_blocks: int = 0  # leading blocks that all tables share
    not_chunked: Sequence[int] = ()  # sequences that the work list leaves out: decode rows
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0

    @property
    def spec(self) -> PrefillSpec:
        return PrefillSpec(
            self.num_heads, self.num_kv_heads, self.head_size, self.block_size, self.dtype, self.kv_dtype or self.dtype
        )

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Tensors of a case, each ending at a page that faults; what must not be read is NaN or far outside."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tiles: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


def prefill_case(**overrides: object) -> PrefillCase:
    return replace(PrefillCase(), **overrides)  # type: ignore[arg-type]


def prefill_inputs(case: PrefillCase) -> PrefillInputs:
    """Builds a case; the same seed gives the same tensors."""
    spec = case.spec
    generator = torch.Generator().manual_seed(case.seed)
    tables, num_blocks = block_tables(case.seq_lens, case.block_size, generator, case.shared_blocks)
    shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    k_cache = paged_cache(case.seq_lens, tables, shape, spec.kv_dtype, generator, case.equal_keys)
    v_cache = paged_cache(case.seq_lens, tables, shape, spec.kv_dtype, generator)
    num_tokens = sum(case.query_lens)
    fused = poisoned((num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_size), case.dtype)
    q = torch.randn((num_tokens, case.num_heads, case.head_size), generator=generator) * case.q_magnitude
    fused[:, -case.num_heads :] = q.to(case.dtype)
    query_lens = np.array(case.query_lens)
    query_lens[list(case.not_chunked)] = 0
    tiles = prefill_tiles(query_lens, np.array(case.seq_lens), spec.tile_tokens)
    starts = np.concatenate(([0], np.cumsum(case.query_lens))).astype(np.int32)
    return PrefillInputs(
        q=guarded(fused)[:, -case.num_heads :],
        k_cache=guarded(k_cache),
        v_cache=guarded(v_cache),
        tiles=guarded(torch.from_numpy(tiles)),
        query_start_loc=guarded(torch.from_numpy(starts)),
        seq_lens=guarded(torch.tensor(case.seq_lens, dtype=torch.int32)),
        block_tables=guarded(tables),
    )


def run_prefill(case: PrefillCase, launcher: Launcher, inputs: PrefillInputs) -> torch.Tensor:
    """What the kernel writes, [num_tokens, num_heads, head_size]; NaN where it writes nothing."""
    out = guarded(poisoned((sum(case.query_lens), case.num_heads, case.head_size), case.dtype))
    PrefillAttention(launcher, case.spec)(
        out,
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.tiles,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        case.scale,
        window=case.window,
        softcap=case.softcap,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    return out


def check_prefill(case: PrefillCase, build: SimulatorBuild | None = None, inputs: PrefillInputs | None = None) -> None:
    """Under every schedule: the same bits, and right ones."""
    inputs = inputs or prefill_inputs(case)
    (out,) = identical_on_every_schedule(lambda launcher: [run_prefill(case, launcher, inputs)], build)
    check_output(case, out, inputs)


def check_output(case: PrefillCase, out: torch.Tensor, inputs: PrefillInputs) -> None:
    """Every chunk is right, twice decode's tolerance allowed for weights rounded on their way to V; sequences that have
    no tile were not written."""
    starts = inputs.query_start_loc.tolist()
    for sequence, length in enumerate(case.seq_lens):
        written = out[starts[sequence] : starts[sequence + 1]]
        if sequence in case.not_chunked:
            assert torch.isnan(written.float()).all(), f"sequence {sequence} has no tile and was written"
            continue
        table = inputs.block_tables[sequence]
        keys = gathered(inputs.k_cache, table, length) * case.k_scale
        values = gathered(inputs.v_cache, table, length) * case.v_scale
        q = inputs.q[starts[sequence] : starts[sequence + 1]]
        want, _ = attention(q, keys, values, case.scale, case.window, case.softcap)
        error = float((written.double() - want).abs().max())
        tolerance = 2 * attention_tolerance(case.dtype, [values])
        assert error <= tolerance, f"sequence {sequence}, {len(q)} of {length}: off by {error:.2e} > {tolerance:.2e}"


FAR_CASE = prefill_case(kv_dtype=torch.float8_e4m3fn, query_lens=(5,), seq_lens=(16,), num_heads=1)


def beyond_31_bits(inputs: PrefillInputs) -> PrefillInputs:
    """FAR_CASE's batch with its one block so far in the cache that its offset, in elements, needs more than 31 bits.
    The memory is address space alone: what is not written takes no room."""
    near = int(inputs.block_tables[0, 0])
    far = 2**31 // inputs.k_cache[0].numel()
    caches = []
    for cache in (inputs.k_cache, inputs.v_cache):
        large = torch.empty((far + 1, *cache.shape[1:]), dtype=torch.uint8).view(cache.dtype)
        large[far] = cache[near]
        caches.append(large)
    tables = guarded(torch.full_like(inputs.block_tables, far))
    return replace(inputs, k_cache=caches[0], v_cache=caches[1], block_tables=tables)
