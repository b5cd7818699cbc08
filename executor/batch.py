"""One step's input: the tokens of the plan's rows, where they stand, and which of them give logits.

Derives positions, slots and padded block tables from sequences.py's columns by gathering; no loop over tokens. Row i of
the batch is row i of the plan, failed sequences left out. Logits come in this order: one row for each sequence that
samples, in row order, then the prompt positions of those that asked for prompt log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from executor.backends.base import AttentionMetadata
from executor.plan import InvalidPlan
from executor.sequences import Sequences, Slots


class PromptRange(NamedTuple):
    """Rows [logits_start, logits_end) of the logits predict the prompt's tokens from first_position on."""

    slot: int
    first_position: int
    logits_start: int
    logits_end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What `Decoder.forward` takes, and what becomes of its logits."""

    token_ids: torch.Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    logits_indices: torch.Tensor  # [num_logits] int64 into the tokens
    slots: Slots  # [num_rows]
    ends: npt.NDArray[np.int64]  # [num_rows] num_computed_tokens once the step has run
    sampling_slots: Slots  # [num_sampling_rows]: row i of the logits is theirs
    prompt_ranges: Sequence[PromptRange]


def check_rows(sequences: Sequences, slots: Slots, row_tokens: npt.NDArray[np.int64], block_size: int) -> None:
    """Raises InvalidPlan for a row that outruns its sequence's tokens or its blocks."""
    ends = sequences.num_computed_tokens[slots] + row_tokens
    short = np.flatnonzero(ends > sequences.num_tokens[slots])
    if short.size:
        slot, end = slots[short[0]], ends[short[0]]
        raise InvalidPlan(
            f"sequence {sequences.ids[slot]}: a row up to token {end}, of which {sequences.num_tokens[slot]} are known"
        )
    bare = np.flatnonzero(ends > sequences.num_blocks[slots] * block_size)
    if bare.size:
        slot, end = slots[bare[0]], ends[bare[0]]
        raise InvalidPlan(
            f"sequence {sequences.ids[slot]}: {sequences.num_blocks[slot]} blocks of {block_size} "
            f"do not hold {end} tokens"
        )


def build_batch(sequences: Sequences, slots: Slots, row_tokens: npt.NDArray[np.int64], block_size: int) -> Batch:
    """slots [num_rows], row_tokens [num_rows]: at least one row, all checked by `check_rows`."""
    num_rows = len(slots)
    starts = sequences.num_computed_tokens[slots]
    ends = starts + row_tokens
    query_start_loc = np.zeros(num_rows + 1, np.int64)
    np.cumsum(row_tokens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    if num_tokens == num_rows:
        positions, token_slots = starts, slots
    else:
        positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], row_tokens)
        token_slots = np.repeat(slots, row_tokens)
    block_index, offset = np.divmod(positions, block_size)
    slot_mapping = sequences.block_tables[token_slots, block_index].astype(np.int64) * block_size + offset
    max_seq_len = int(ends.max())
    block_tables = sequences.block_tables[slots, : -(-max_seq_len // block_size)]
    samples = ends == sequences.num_tokens[slots]
    logits_indices = query_start_loc[1:][samples] - 1
    prompt_ranges: list[PromptRange] = []
    if not sequences.is_plain[slots].all():
        prompt_ranges, logits_indices = _add_prompt_ranges(
            sequences, slots, starts, ends, query_start_loc, logits_indices
        )
    return Batch(
        token_ids=torch.from_numpy(sequences.token_ids[token_slots, positions].astype(np.int64)),
        metadata=AttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc.astype(np.int32)),
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            block_tables=torch.from_numpy(np.ascontiguousarray(block_tables)),
            slot_mapping=torch.from_numpy(slot_mapping),
            positions=torch.from_numpy(positions),
            max_query_len=int(row_tokens.max()),
            max_seq_len=max_seq_len,
        ),
        logits_indices=torch.from_numpy(logits_indices),
        slots=slots,
        ends=ends,
        sampling_slots=slots[samples],
        prompt_ranges=prompt_ranges,
    )


def _add_prompt_ranges(
    sequences: Sequences,
    slots: Slots,
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    query_start_loc: npt.NDArray[np.int64],
    logits_indices: npt.NDArray[np.int64],
) -> tuple[list[PromptRange], npt.NDArray[np.int64]]:
    """The logits at position p speak of token p + 1: a row [start, end) tells of prompt positions [start + 1, end]."""
    ranges: list[PromptRange] = []
    pieces = [logits_indices]
    num_logits = len(logits_indices)
    for row, slot in enumerate(slots.tolist()):
        if sequences.sampling[slot].prompt_logprobs is None:
            continue
        count = int(min(ends[row], sequences.num_prompt_tokens[slot] - 1) - starts[row])
        if count <= 0:
            continue
        ranges.append(PromptRange(slot, int(starts[row]) + 1, num_logits, num_logits + count))
        pieces.append(np.arange(query_start_loc[row], query_start_loc[row] + count))
        num_logits += count
    return ranges, np.concatenate(pieces)
