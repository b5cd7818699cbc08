"""What the layers of one step share on the device: where tokens stand, and the work lists of attention.

Owns the split of a batch into decode rows (one query) and prefill chunks (several), the host arrays that this takes,
and their views once they are staged. Knows neither kernels nor the model. In the deterministic mode every token is a
decode row, whose K/V is cut at fixed multiples, so that a position is summed alike however it came.

A step of a graph has the shapes of its bucket: rows behind the real ones have length 0 and slot -1, and nothing is
computed or written for them; the lists of items have room for the most that the bucket can bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from executor.backends.base import AttentionMetadata
from executor.backends.cuda.plan import DecodePlan, Ints, decode_plan, max_items, padded, prefill_tiles

Window = int | None
Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class WorkShape:
    """What the lists depend on besides lengths; fixed for the life of a backend."""

    ctas_per_item: int  # thread blocks of the decode kernel that one item takes: K/V heads times groups of their heads
    num_ctas: int  # thread blocks of the decode kernel that run on the device at once
    tile_tokens: int  # queries of one sequence in a prefill tile
    deterministic: bool


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """One window's `DecodePlan` on the device."""

    items: torch.Tensor  # [capacity, 4] int32: row, kv_begin, kv_end, slot
    num_items: torch.Tensor  # [1] int32: how many of them are valid
    slot_ptr: torch.Tensor  # [num_rows + 1] int32
    num_slots: int  # room for partial results that the items may ask for


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one query each. Row r reads the K/V of its table's first seq_lens[r] tokens."""

    token_rows: torch.Tensor | None  # [num_rows] int64: their rows among the step's tokens; None: row r is token r
    seq_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks] int32
    items: Mapping[Window, DecodeItems]


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Tiles of the sequences with several queries; the arrays tell of all sequences, tiles name those with chunks."""

    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32
    tiles: torch.Tensor  # [num_tiles, 2] int32: sequence, first query


@dataclass(frozen=True, slots=True)
class Step:
    """A step's batch on the device."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64, -1 writes nothing
    logits_indices: torch.Tensor  # [num_logits] int64
    decode: DecodeRows | None
    prefill: PrefillChunks | None


@dataclass(frozen=True, slots=True)
class HostStep:
    """The same before it is staged: arrays by name, and what no array tells."""

    arrays: Mapping[str, Array]
    windows: Sequence[Window]
    num_slots: Mapping[Window, int]

    def staged(self, tensors: Mapping[str, torch.Tensor]) -> Step:
        """`tensors`: the arrays on the device, by the same names."""
        decode = prefill = None
        if "decode.seq_lens" in tensors:
            decode = DecodeRows(
                token_rows=tensors.get("decode.token_rows"),
                seq_lens=tensors["decode.seq_lens"],
                block_tables=tensors["decode.block_tables"],
                items={
                    window: DecodeItems(
                        tensors[f"items.{window}"],
                        tensors[f"num_items.{window}"],
                        tensors[f"slot_ptr.{window}"],
                        self.num_slots[window],
                    )
                    for window in self.windows
                },
            )
        if "tiles" in tensors:
            prefill = PrefillChunks(
                query_start_loc=tensors["query_start_loc"],
                seq_lens=tensors["seq_lens"],
                block_tables=tensors["block_tables"],
                tiles=tensors["tiles"],
            )
        return Step(
            token_ids=tensors["token_ids"],
            positions=tensors["positions"],
            slot_mapping=tensors["slot_mapping"],
            logits_indices=tensors["logits_indices"],
            decode=decode,
            prefill=prefill,
        )


def eager_step(
    token_ids: torch.Tensor,
    metadata: AttentionMetadata,
    logits_indices: torch.Tensor,
    shape: WorkShape,
    windows: Sequence[Window],
) -> HostStep:
    """Any batch, in the shapes it has. All tensors are on the CPU."""
    starts, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
    tables = metadata.block_tables.numpy()
    query_lens = np.diff(starts)
    arrays: dict[str, Array] = {
        "token_ids": token_ids.numpy(),
        "positions": metadata.positions.numpy(),
        "slot_mapping": metadata.slot_mapping.numpy(),
        "logits_indices": logits_indices.numpy(),
    }
    num_slots: dict[Window, int] = {}
    if shape.deterministic:
        owners = np.repeat(np.arange(len(seq_lens)), query_lens)
        lengths = (metadata.positions.numpy() + 1).astype(np.int32)
        num_slots = _add_decode(arrays, None, lengths, tables[owners], shape, windows)
        return HostStep(arrays, windows, num_slots)
    single = query_lens == 1
    if single.any():
        rows = None if single.all() else starts[:-1][single].astype(np.int64)
        num_slots = _add_decode(arrays, rows, seq_lens[single], tables[single], shape, windows)
    if not single.all():
        chunked = np.where(single, 0, query_lens)
        arrays["query_start_loc"], arrays["seq_lens"], arrays["block_tables"] = starts, seq_lens, tables
        arrays["tiles"] = prefill_tiles(chunked, np.where(single, 0, seq_lens), shape.tile_tokens)
    return HostStep(arrays, windows, num_slots)


def _add_decode(
    arrays: dict[str, Array],
    token_rows: npt.NDArray[np.int64] | None,
    seq_lens: Ints,
    tables: Ints,
    shape: WorkShape,
    windows: Sequence[Window],
) -> dict[Window, int]:
    """Returns the slots that each window's items use."""
    if token_rows is not None:
        arrays["decode.token_rows"] = token_rows
    arrays["decode.seq_lens"] = seq_lens
    arrays["decode.block_tables"] = tables
    num_slots: dict[Window, int] = {}
    for window in windows:
        plan = decode_plan(seq_lens, shape.ctas_per_item, shape.num_ctas, window, shape.deterministic)
        _add_plan(arrays, window, plan, len(plan.items))
        num_slots[window] = plan.num_slots
    return num_slots


def _add_plan(arrays: dict[str, Array], window: Window, plan: DecodePlan, capacity: int) -> None:
    arrays[f"items.{window}"] = padded(plan.items, capacity)
    arrays[f"num_items.{window}"] = np.array([len(plan.items)], np.int32)
    arrays[f"slot_ptr.{window}"] = plan.slot_ptr


def bucket_step(
    num_rows: int,
    token_ids: npt.NDArray[np.int64],
    metadata: AttentionMetadata,
    shape: WorkShape,
    windows: Sequence[Window],
) -> HostStep:
    """Decode rows in the shapes of a bucket of `num_rows`, all arrays but the block tables, which a graph keeps."""
    seq_lens = _filled(metadata.seq_lens.numpy(), num_rows, 0)
    arrays: dict[str, Array] = {
        "token_ids": _filled(token_ids, num_rows, 0),
        "positions": _filled(metadata.positions.numpy(), num_rows, 0),
        "slot_mapping": _filled(metadata.slot_mapping.numpy(), num_rows, -1),
        "logits_indices": np.arange(num_rows),
        "decode.seq_lens": seq_lens,
    }
    capacity = max_items(num_rows, shape.ctas_per_item, shape.num_ctas)
    for window in windows:
        plan = decode_plan(seq_lens, shape.ctas_per_item, shape.num_ctas, window)
        _add_plan(arrays, window, plan, capacity)
    return HostStep(arrays, windows, dict.fromkeys(windows, capacity))


_Number = TypeVar("_Number", np.int32, np.int64)


def _filled(values: npt.NDArray[_Number], num_rows: int, fill: int) -> npt.NDArray[_Number]:
    whole: npt.NDArray[_Number] = np.full(num_rows, fill, values.dtype)
    whole[: len(values)] = values
    return whole
