"""What a client sees that looks inside a scheduler: who holds which KV block, and what the latest steps held.

Plain values, as `Client.watch_blocks` gives them; generation.proto says what each field means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.results import Load, load_of
from octavo.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """One output, or one hypothesis of a beam search."""

    sequence_id: int
    group: int  # the same for all outputs of one prompt
    request_id: str
    tenant: str
    index: int
    priority: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step of an executor."""

    step_id: int
    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    num_admitted: int
    num_preempted: int
    num_copies: int
    seconds: float | None  # None: not answered yet

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Columns have one entry for each physical block, by id; block 0 is the null block."""

    target: str
    block_size: int
    sequences: tuple[RunningSequence, ...]
    holders: Sequence[int]  # 1 + place in `sequences` of the first holder; 0: nobody
    ref_counts: Sequence[int]
    num_filled: Sequence[int]  # slots with K/V; of a free block: all where its prefix can still be found
    max_num_seqs: int
    max_num_batched_tokens: int
    num_sampled_tokens: int
    steps: tuple[StepInfo, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """One moment; `seconds` are of a monotonic clock."""

    seconds: float
    model: str
    load: Load
    executors: tuple[BlockMap, ...]


def inspection_of(message: pb.WatchBlocksResponse) -> Inspection:
    return Inspection(
        seconds=message.seconds,
        model=message.model,
        load=load_of(message.load),
        executors=tuple(map(_block_map, message.executors)),
    )


def _block_map(message: pb.BlockMap) -> BlockMap:
    return BlockMap(
        target=message.target,
        block_size=message.block_size,
        sequences=tuple(map(_sequence, message.sequences)),
        holders=tuple(message.holders),
        ref_counts=tuple(message.ref_counts),
        num_filled=tuple(message.num_filled),
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        num_sampled_tokens=message.num_sampled_tokens,
        steps=tuple(map(_step, message.steps)),
    )


def _sequence(message: pb.RunningSequence) -> RunningSequence:
    return RunningSequence(
        sequence_id=message.sequence_id,
        group=message.group,
        request_id=message.request_id,
        tenant=message.tenant,
        index=message.index,
        priority=message.priority,
        num_prompt_tokens=message.num_prompt_tokens,
        num_tokens=message.num_tokens,
        num_computed_tokens=message.num_computed_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_blocks=message.num_blocks,
        num_preemptions=message.num_preemptions,
    )


def _step(message: pb.StepInfo) -> StepInfo:
    return StepInfo(
        step_id=message.step_id,
        num_decodes=message.num_decodes,
        num_prefills=message.num_prefills,
        num_prefill_tokens=message.num_prefill_tokens,
        num_admitted=message.num_admitted,
        num_preempted=message.num_preempted,
        num_copies=message.num_copies,
        seconds=message.seconds if message.HasField("seconds") else None,
    )
