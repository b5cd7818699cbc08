"""What the executor knows of each sequence, in columns indexed by slot, so that a batch is gathered, not looped over.

Owns tokens, block tables, `num_computed_tokens` and sampling of the sequences that plans have named; a slot is one
sequence's place in every column and serves another once it is removed. Knows nothing of tensors or the model.
Invariant: of a sequence's tokens `[0, num_computed_tokens)` are in cache, `[num_computed_tokens, num_tokens)` are known
and not computed, and its block table is zero behind its last block. A known token that stands as a number below 0 has
been drawn on a device, which alone has its value so far (see in_flight.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from executor.plan import BatchPlan, Fork, InvalidPlan, Limits, NewSequence, Sampling, TableUpdate

Slots = npt.NDArray[np.int64]

_PLAIN = Sampling()


class Sequences:
    """All sequences of one session."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots: dict[int, int] = {}
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        capacity = limits.max_num_seqs
        # One column more than max_model_len: the last token drawn needs a place, though it is never computed.
        self.token_ids = np.zeros((capacity, limits.max_model_len + 1), np.int32)
        self.block_tables = np.zeros((capacity, self._max_blocks), np.int32)
        self.num_blocks = np.zeros(capacity, np.int64)
        self.ids = np.zeros(capacity, np.uint64)
        self.num_tokens = np.zeros(capacity, np.int64)
        self.num_prompt_tokens = np.zeros(capacity, np.int64)
        self.num_computed_tokens = np.zeros(capacity, np.int64)
        self.temperature = np.zeros(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.seed = np.zeros(capacity, np.uint64)
        self.sample_index = np.zeros(capacity, np.int64)
        self.is_plain = np.ones(capacity, np.bool_)
        self.failed = np.zeros(capacity, np.bool_)
        self.sampling: list[Sampling] = [_PLAIN] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slots

    def slot(self, sequence_id: int) -> int:
        """The slot of a known sequence. Raises InvalidPlan for an unknown one."""
        try:
            return self._slots[sequence_id]
        except KeyError:
            raise InvalidPlan(f"sequence {sequence_id} is not known") from None

    def slots(self, sequence_ids: Sequence[int]) -> Slots:
        """[num_rows] int64. Raises InvalidPlan naming the first unknown id."""
        try:
            return np.fromiter(map(self._slots.__getitem__, sequence_ids), np.int64, len(sequence_ids))
        except KeyError as missing:
            raise InvalidPlan(f"sequence {missing.args[0]} is not known") from None

    def tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """A view of the known tokens: prompt, then outputs."""
        known: npt.NDArray[np.int32] = self.token_ids[slot, : self.num_tokens[slot]]
        return known

    def clear(self) -> None:
        """Forgets everything: a session starts with no sequence."""
        for sequence_id in list(self._slots):
            self._remove(sequence_id)

    def apply(self, plan: BatchPlan) -> dict[int, str]:
        """Everything of a plan that comes before its rows run. Returns the new sequences that failed at once.

        To forget an unknown sequence is no error: the state asked for is already there.
        """
        for sequence_id in plan.finished:
            self._remove(sequence_id)
        for sequence_id in plan.preempted:
            self._remove(sequence_id)
        errors: dict[int, str] = {}
        for new in plan.new:
            error = self._add(new)
            if error is not None:
                errors[new.sequence_id] = error
        if plan.tokens:
            errors.update(self._append_chosen(plan.tokens))
        for table in plan.tables:
            self._update_table(table)
        return errors

    def fork(self, fork: Fork) -> int:
        """Makes the child a copy of its parent; returns its slot."""
        if fork.child in self._slots:
            raise InvalidPlan(f"fork: child {fork.child} is already known")
        parent = self.slot(fork.parent)
        child = self._take_slot(fork.child)
        length, blocks = self.num_tokens[parent], self.num_blocks[parent]
        self.token_ids[child, :length] = self.token_ids[parent, :length]
        self.block_tables[child, :blocks] = self.block_tables[parent, :blocks]
        for column in (
            self.num_blocks,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.failed,
        ):
            column[child] = column[parent]
        self._set_sampling(child, self.sampling[parent], fork.sample_index)
        return child

    def append(self, slots: Slots, token_ids: npt.NDArray[np.int64]) -> None:
        """The tokens drawn become the next inputs: slots [n], each at most once, token_ids [n]; below 0 where one is
        to be told by `fill`."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def fill(
        self,
        slots: Slots,
        ids: npt.NDArray[np.uint64],
        places: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
    ) -> None:
        """The tokens at `places` [n] have become known. Whoever of `ids` [n] has lost its slot to another is passed
        over; the token of one that was only removed falls into a column that nobody reads."""
        here = self.ids[slots] == ids
        if not here.all():
            slots, places, token_ids = slots[here], places[here], token_ids[here]
        self.token_ids[slots, places] = token_ids

    def _add(self, new: NewSequence) -> str | None:
        self._check_new(new)
        self._remove(new.sequence_id)
        slot = self._take_slot(new.sequence_id)
        num_tokens, limits = len(new.token_ids), self._limits
        error = None
        if num_tokens > limits.max_model_len:
            error = f"{num_tokens} tokens exceed max_model_len {limits.max_model_len}"
        elif max(new.token_ids) >= limits.vocab_size:
            error = f"token id {max(new.token_ids)} is not in the vocabulary of {limits.vocab_size}"
        else:
            error = _sampling_error(new.sampling, limits.vocab_size)
        if error is None:
            self.token_ids[slot, :num_tokens] = new.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.num_computed_tokens[slot] = new.num_computed_tokens
        self._set_table(slot, 0, new.block_ids)
        self.failed[slot] = error is not None
        self._set_sampling(slot, new.sampling, new.sample_index)
        return error

    def _check_new(self, new: NewSequence) -> None:
        name, num_tokens = f"new sequence {new.sequence_id}", len(new.token_ids)
        if num_tokens == 0:
            raise InvalidPlan(f"{name} has no tokens")
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            raise InvalidPlan(f"{name}: num_prompt_tokens {new.num_prompt_tokens} is not in [1, {num_tokens}]")
        if new.num_computed_tokens >= num_tokens:
            raise InvalidPlan(f"{name}: num_computed_tokens {new.num_computed_tokens} leaves none of {num_tokens}")

    def _append_chosen(self, tokens: Sequence[tuple[int, int]]) -> dict[int, str]:
        errors: dict[int, str] = {}
        for sequence_id, token_id in tokens:
            slot = self.slot(sequence_id)
            if self.failed[slot]:
                continue
            if token_id >= self._limits.vocab_size:
                errors[sequence_id] = f"token id {token_id} is not in the vocabulary of {self._limits.vocab_size}"
            elif self.num_tokens[slot] > self._limits.max_model_len:
                errors[sequence_id] = f"no place for a token behind max_model_len {self._limits.max_model_len}"
            if sequence_id in errors:
                self.failed[slot] = True
            else:
                self.token_ids[slot, self.num_tokens[slot]] = token_id
                self.num_tokens[slot] += 1
        return errors

    def _update_table(self, table: TableUpdate) -> None:
        slot = self.slot(table.sequence_id)
        if table.start > self.num_blocks[slot]:
            raise InvalidPlan(
                f"the block table of sequence {table.sequence_id} has {self.num_blocks[slot]} blocks, "
                f"its update starts at {table.start}"
            )
        self._set_table(slot, table.start, table.block_ids)

    def _set_table(self, slot: int, start: int, block_ids: Sequence[int]) -> None:
        end = start + len(block_ids)
        if end > self._max_blocks:
            raise InvalidPlan(
                f"the block table of sequence {self.ids[slot]} would have {end} blocks, max_model_len allows "
                f"{self._max_blocks}"
            )
        row = self.block_tables[slot]
        row[start:end] = block_ids
        row[end : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = end

    def _set_sampling(self, slot: int, sampling: Sampling, sample_index: int) -> None:
        self.sampling[slot] = sampling
        self.temperature[slot] = sampling.temperature if sampling.beam_candidates is None else 0
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.sample_index[slot] = sample_index
        self.is_plain[slot] = sampling.is_plain

    def _remove(self, sequence_id: int) -> None:
        slot = self._slots.pop(sequence_id, None)
        if slot is None:
            return
        self.block_tables[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0
        self.failed[slot] = False
        self.sampling[slot] = _PLAIN
        self._free.append(slot)

    def _take_slot(self, sequence_id: int) -> int:
        assert self._free, "BatchPlan.check bounds the sequences to keep"
        slot = self._free.pop()
        self._slots[sequence_id] = slot
        self.ids[slot] = sequence_id
        return slot


def _sampling_error(sampling: Sampling, vocab_size: int) -> str | None:
    """Why this sequence cannot be sampled, if so."""
    columns: Mapping[str, Sequence[int]] = {
        "logit_bias": tuple(sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, token_ids in columns.items():
        if token_ids and max(token_ids) >= vocab_size:
            return f"{name}: token id {max(token_ids)} is not in the vocabulary of {vocab_size}"
    if not all(math.isfinite(value) for value in sampling.logit_bias.values()):
        return "logit_bias: not all values are finite"
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            return f"{name} {getattr(sampling, name)} is not finite"
    if sampling.temperature < 0:
        return f"temperature {sampling.temperature} is less than 0"
    if sampling.repetition_penalty <= 0:
        return f"repetition_penalty {sampling.repetition_penalty} is not above 0"
    if sampling.beam_candidates is not None and sampling.beam_candidates < 1:
        return f"beam_candidates {sampling.beam_candidates} is less than 1"
    return None
