"""The ops of a step such that a row's result does not depend on the other rows, bit for bit.

Products run in tiles of ROW_TILE rows, always full: the library picks its kernel and its order of summation by the
shape, so the shape never varies, and a kernel that treats all rows of a full tile alike does the rest. Attention reads
K and V in partitions of PARTITION keys counted from position 0, always full, and merges them in order: whether a
position is computed in a prefill, in a chunk of one or alone, it sums the same numbers in the same order. A partition
that a query does not see changes nothing, exactly: its weights are 0 and its rescaling is 1. Elementwise ops use only
instructions that are correctly rounded, and exp, which gives the same bits wherever an element stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor.backends.base import AttentionMetadata
from executor.backends.cpu import linear
from executor.backends.cpu.attention import visible_keys
from executor.backends.cpu.kv_cache import KVCache

ROW_TILE = 8  # rows of a product
QUERY_TILE = 8  # queries of one sequence that share a read of K and V
PARTITION = 64  # keys; a multiple of the block sizes


def tiled_linear(x: torch.Tensor, packed: linear.PackedLinear) -> torch.Tensor:
    """x [num_rows, in_features] -> [num_rows, out_features], one product for each tile of rows."""
    num_rows = len(x)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
    tiles = [linear.apply(tile, packed) for tile in torch.split(padded, ROW_TILE)]
    return torch.cat(tiles)[:num_rows]


def check_tiles(packed: linear.PackedLinear, dtype: torch.dtype) -> None:
    """Asks the library, once a shape, for what this module rests on. Raises NotDeterministic."""
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(ROW_TILE, packed.in_features, generator=generator).to(dtype)
    together = linear.apply(tile, packed)
    for row in range(ROW_TILE):
        alone = torch.zeros_like(tile)
        alone[0] = tile[row]
        if not torch.equal(linear.apply(alone, packed)[0], together[row]):
            raise NotDeterministic(
                f"on this CPU a {dtype} product of {packed.in_features} by {packed.out_features} depends on the rows "
                "beside it: the deterministic mode cannot be kept"
            )


class NotDeterministic(Exception):
    """This machine's libraries do not give what the deterministic mode needs."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension. 1 / sqrt, because the library's rsqrt is approximate, and differs between vector lanes
    and remainder."""
    wide = x.float()
    scale = 1.0 / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (wide * scale).to(x.dtype) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu spelled out, because the library's differs between vector lanes and remainder."""
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-wide))).to(gate.dtype) * up


@dataclass(frozen=True, slots=True)
class DeterministicLayout:
    """A step's batch as tiles of queries, those with the most partitions first."""

    write_rows: torch.Tensor  # [num_tokens * num_kv_heads] int64
    queries: torch.Tensor  # [num_tiles * QUERY_TILE] int64: rows in the step; padding repeats a row
    results: torch.Tensor  # [num_tokens] int64: where in `queries` each row's result stands
    positions: torch.Tensor  # [num_tiles, QUERY_TILE] int64
    partition_rows: list[torch.Tensor]  # for each partition, the cache rows that its tiles read
    partition_tiles: list[int]  # and how many tiles, counted from the first, have it


def deterministic_layout(cache: KVCache, metadata: AttentionMetadata) -> DeterministicLayout:
    starts = metadata.query_start_loc.tolist()
    tiles: list[tuple[int, int, int]] = []  # (sequence, first row, rows)
    for sequence in range(len(starts) - 1):
        for first in range(starts[sequence], starts[sequence + 1], QUERY_TILE):
            tiles.append((sequence, first, min(QUERY_TILE, starts[sequence + 1] - first)))
    positions = metadata.positions.tolist()
    partitions = [positions[first + rows - 1] // PARTITION + 1 for _, first, rows in tiles]
    order = sorted(range(len(tiles)), key=lambda index: -partitions[index])
    tiles = [tiles[index] for index in order]
    counts = [partitions[index] for index in order]

    lanes = torch.arange(QUERY_TILE)
    firsts = torch.tensor([first for _, first, _ in tiles])[:, None]
    sizes = torch.tensor([rows for _, _, rows in tiles])[:, None]
    queries = firsts + torch.minimum(lanes, sizes - 1)  # [num_tiles, QUERY_TILE]
    results = torch.empty(len(positions), dtype=torch.int64)
    own = lanes < sizes
    results[queries[own]] = own.flatten().nonzero().flatten()

    blocks_per_partition = PARTITION // cache.spec.block_size
    num_partitions = counts[0]
    tables = metadata.block_tables[[sequence for sequence, _, _ in tiles]].long()
    tables = torch.nn.functional.pad(tables, (0, max(0, num_partitions * blocks_per_partition - tables.shape[1])))
    partition_tiles = [sum(count > partition for count in counts) for partition in range(num_partitions)]
    partition_rows = [
        cache.block_rows(tables[:used, partition * blocks_per_partition : (partition + 1) * blocks_per_partition])
        for partition, used in enumerate(partition_tiles)
    ]
    return DeterministicLayout(
        write_rows=cache.token_rows(metadata.slot_mapping),
        queries=queries.flatten(),
        results=results,
        positions=metadata.positions[queries],
        partition_rows=partition_rows,
        partition_tiles=partition_tiles,
    )


def paged_attention(
    cache: KVCache,
    layer: int,
    q: torch.Tensor,
    layout: DeterministicLayout,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [num_tokens, num_heads, head_size], same shape back; see Backend.paged_attention. fp32 inside."""
    spec = cache.spec
    num_tiles, num_kv_heads = len(layout.positions), spec.num_kv_heads
    ratio = q.shape[1] // num_kv_heads
    # [num_tiles, num_kv_heads, ratio * QUERY_TILE, head_size]: the queries of one K/V head are one matrix
    tiles = q[layout.queries].view(num_tiles, QUERY_TILE, num_kv_heads, ratio, spec.head_size).float()
    queries = tiles.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, ratio * QUERY_TILE, spec.head_size)
    queries = queries * softmax_scale
    state = _Softmax.empty(queries)
    for partition, used in enumerate(layout.partition_tiles):
        rows = layout.partition_rows[partition]
        k = cache.gather(cache.keys[layer], rows, used).float()
        v = cache.gather(cache.values[layer], rows, used).float()
        keys = torch.arange(partition * PARTITION, (partition + 1) * PARTITION)
        positions = layout.positions[:used]
        visible = visible_keys(positions[:, :, None], keys, sliding_window)  # [used, QUERY_TILE, PARTITION]
        # Stale or padding; its weight is 0, but 0 * NaN is NaN.
        v.masked_fill_((keys > positions.amax(1)[:, None])[:, None, :, None], 0.0)
        scores = _product(queries[:used], k.transpose(2, 3))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores.masked_fill_(~visible.repeat(1, ratio, 1)[:, None], -torch.inf)
        state.merge(used, scores, v)
    out = state.normalized().view(num_tiles, num_kv_heads, ratio, QUERY_TILE, spec.head_size)
    by_query = out.permute(0, 3, 1, 2, 4).reshape(num_tiles * QUERY_TILE, q.shape[1], spec.head_size)
    return by_query[layout.results].to(q.dtype)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, heads, rows, inner] times [n, heads, inner, columns]: n * heads products of one shape."""
    shape = (*a.shape[:3], b.shape[3])
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(shape)


@dataclass(slots=True)
class _Softmax:
    """The online softmax of all tiles: running maximum, sum of weights, weighted sum of values."""

    maximum: torch.Tensor  # [num_tiles, num_kv_heads, rows, 1]
    weight: torch.Tensor  # the same
    values: torch.Tensor  # [num_tiles, num_kv_heads, rows, head_size]

    @classmethod
    def empty(cls, queries: torch.Tensor) -> _Softmax:
        column = queries.new_zeros((*queries.shape[:3], 1))
        return cls(torch.full_like(column, -torch.inf), column, torch.zeros_like(queries))

    def merge(self, used: int, scores: torch.Tensor, v: torch.Tensor) -> None:
        """Adds one partition to the first `used` tiles. Rows that see none of it, or nothing yet, stay as they are."""
        before = self.maximum[:used]
        maximum = torch.maximum(before, scores.amax(-1, keepdim=True))
        finite = torch.where(maximum == -torch.inf, 0.0, maximum)
        rescale = torch.exp(before - finite)  # exactly 1 where the maximum stays
        weights = torch.exp(scores - finite)
        self.weight[:used] = self.weight[:used] * rescale + weights.sum(-1, keepdim=True)
        self.values[:used] = self.values[:used] * rescale + _product(weights, v)
        self.maximum[:used] = maximum

    def normalized(self) -> torch.Tensor:
        return self.values / self.weight
