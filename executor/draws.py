"""From sequences to a `SamplingBatch`: which draws a step makes, and what each needs.

Owns the gathering of columns, and of the few rows that use more than columns hold. A steady batch of plain rows costs a
handful of gathers, whatever features the sampler has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from executor.sampler import Adjustments, Ints, Penalties, SamplingBatch, TokenColumns
from executor.sequences import Sequences, Slots


def sampling_batch(sequences: Sequences, slots: Slots, logits_rows: Ints | None) -> SamplingBatch:
    """One draw for each slot [num_draws]; the tokens known now are the history that penalties count."""
    positions = sequences.num_tokens[slots] - sequences.num_prompt_tokens[slots]
    special = np.flatnonzero(~sequences.is_plain[slots]).tolist()
    adjustments, adjusted = _adjustments(sequences, slots, positions, special) if special else (None, [])
    logprobs: list[tuple[int, int]] = []
    candidates: list[tuple[int, int]] = []
    for draw in special:
        sampling = sequences.sampling[slots[draw]]
        if sampling.beam_candidates is not None:
            candidates.append((draw, sampling.beam_candidates))
        elif sampling.logprobs is not None:
            logprobs.append((draw, sampling.logprobs))
    return SamplingBatch(
        logits_rows=logits_rows,
        temperature=sequences.temperature[slots],
        top_k=sequences.top_k[slots],
        top_p=sequences.top_p[slots],
        min_p=sequences.min_p[slots],
        seeds=sequences.seed[slots],
        positions=positions,
        sample_indices=sequences.sample_index[slots],
        adjustments=adjustments if adjusted else None,
        adjusted=np.array(adjusted, np.int64),
        logprobs=logprobs,
        candidates=candidates,
    )


def _adjustments(
    sequences: Sequences, slots: Slots, positions: Ints, special: Sequence[int]
) -> tuple[Adjustments, list[int]]:
    bias, allowed, forbidden = _Pairs(), _Pairs(), _Pairs()
    bias_values: list[float] = []
    restricted: list[int] = []
    penalized: list[int] = []
    adjusted: list[int] = []
    for draw in special:
        sampling = sequences.sampling[slots[draw]]
        below_minimum = positions[draw] < sampling.min_tokens and len(sampling.stop_token_ids) > 0
        if not (sampling.logit_bias or sampling.allowed_token_ids or below_minimum or sampling.penalizes):
            continue
        adjusted.append(draw)
        if sampling.logit_bias:
            bias.add(draw, list(sampling.logit_bias))
            bias_values.extend(sampling.logit_bias.values())
        if sampling.allowed_token_ids:
            restricted.append(draw)
            allowed.add(draw, sampling.allowed_token_ids)
        if below_minimum:
            forbidden.add(draw, sampling.stop_token_ids)
        if sampling.penalizes:
            penalized.append(draw)
    adjustments = Adjustments(
        bias=bias.columns(),
        bias_values=np.array(bias_values, np.float32),
        restricted=np.array(restricted, np.int64),
        allowed=allowed.columns(),
        forbidden=forbidden.columns(),
        penalties=_penalties(sequences, slots, penalized) if penalized else None,
    )
    return adjustments, adjusted


def _penalties(sequences: Sequences, slots: Slots, penalized: list[int]) -> Penalties:
    prompt, output = _Pairs(), _Pairs()
    samplings = [sequences.sampling[slots[draw]] for draw in penalized]
    for index, draw in enumerate(penalized):
        tokens = sequences.tokens(int(slots[draw]))
        num_prompt = sequences.num_prompt_tokens[slots[draw]]
        prompt.add(index, tokens[:num_prompt])
        output.add(index, tokens[num_prompt:])
    return Penalties(
        draws=np.array(penalized, np.int64),
        presence=np.array([sampling.presence_penalty for sampling in samplings], np.float32),
        frequency=np.array([sampling.frequency_penalty for sampling in samplings], np.float32),
        repetition=np.array([sampling.repetition_penalty for sampling in samplings], np.float32),
        prompt=prompt.columns(),
        output=output.columns(),
    )


class _Pairs:
    """Collects TokenColumns."""

    def __init__(self) -> None:
        self._draws: list[Ints] = []
        self._token_ids: list[Ints] = []

    def add(self, draw: int, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        ids = np.asarray(token_ids, np.int64)
        self._draws.append(np.full(len(ids), draw, np.int64))
        self._token_ids.append(ids)

    def columns(self) -> TokenColumns:
        if not self._draws:
            return TokenColumns(np.zeros(0, np.int64), np.zeros(0, np.int64))
        return TokenColumns(np.concatenate(self._draws), np.concatenate(self._token_ids))
