"""Draws tokens from logits: the definition, and the CPU's implementation of it. A kernel must draw the same way.

Each draw is a function of its row of logits, its sampling, seed, output position and sample index; never of the other
rows. Order: logit bias, allowed ids, stop ids below min_tokens, penalties (repetition over prompt and output, then
frequency and presence over output), temperature, top-k, top-p, min-p, then one uniform number through the inverse CDF.
Bias and penalties leave a finite logit finite: what would overflow float32 becomes its largest or least finite number.

- greedy (temperature 0): the largest logit; of equal ones the lowest id.
- top-k keeps every token whose logit is at least the k-th largest: all that tie with it.
- top-p keeps token i if the tokens strictly more probable than i hold less than top_p of what top-k left: a threshold
  on the probability, so all that tie with the last one stay. min-p keeps p(i) >= min_p * max p.
- the draw: with weights w over ids in id order, the first id whose running sum exceeds uniform * sum(w); no sort.
- log probabilities are log-softmax of the model's own logits; of equal ones the lowest id comes first. Beam candidates
  are that of the logits after bias, masks and penalties.

A row with NaN or +inf, or with no token left, is an error of that draw alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor.philox import uniforms
from executor.plan import PromptLogprobs, TokenLogprobs

NON_FINITE = "non-finite logits"
NO_TOKEN_LEFT = "logit_bias, allowed_token_ids and min_tokens leave no token to draw"

_CHUNK = 256  # ids summed at once on the way to the inverse CDF
_LARGEST = np.finfo(np.float32).max
_LIKELY = np.float32(2.0**-14)  # tokens no less likely than this, against the best, are tried first for top-p

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# rows [n, vocab] -> the ids of their largest values [n], of equal ones the lowest, and the values [n], NaN where a row
# holds one.
Largest = Callable[[Floats], tuple[Ints, Floats]]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Pairs of a draw and a token id, in columns."""

    draws: Ints  # [num_pairs]
    token_ids: Ints  # [num_pairs]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the draws that have any, and the tokens they count."""

    draws: Ints  # [n]
    presence: Floats  # [n]
    frequency: Floats  # [n]
    repetition: Floats  # [n]
    prompt: TokenColumns  # draws: index into this [n]
    output: TokenColumns  # draws: index into this [n]; a token that stands twice is counted twice


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What changes logits before temperature. Draws that are not named are left alone."""

    bias: TokenColumns
    bias_values: Floats  # [num_pairs]
    restricted: Ints  # [n] draws that may draw only their allowed ids
    allowed: TokenColumns
    forbidden: TokenColumns  # stop ids of draws below min_tokens
    penalties: Penalties | None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The draws of one step, in columns."""

    logits_rows: Ints | None  # [num_draws] row of logits each draws from; None: draw i from row i
    temperature: Floats  # [num_draws]
    top_k: Ints  # [num_draws] 0 keeps all
    top_p: Floats  # [num_draws]
    min_p: Floats  # [num_draws]
    seeds: npt.NDArray[np.uint64]  # [num_draws]
    positions: Ints  # [num_draws] output position of the token to draw
    sample_indices: Ints  # [num_draws]
    adjustments: Adjustments | None = None
    adjusted: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # draws that `adjustments` names, ascending
    logprobs: Sequence[tuple[int, int]] = ()  # (draw, number of alternatives) of those that asked
    candidates: Sequence[tuple[int, int]] = ()  # (draw, number of best tokens): beams, whose token is not used

    def __len__(self) -> int:
        return len(self.temperature)


class Draws(Protocol):
    """The draws of one step, which a device may still have to make."""

    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self) -> SamplerOutput:
        """Waits for the draws; called once."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a draw; 0 where `errors` names the draw. `Draws` that are known."""

    token_ids: Ints  # [num_draws]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by draw, as the others
    candidates: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def is_ready(self) -> bool:
        return True

    def collect(self) -> SamplerOutput:
        return self


def sample(logits: torch.Tensor, batch: SamplingBatch, largest: Largest | None = None) -> SamplerOutput:
    """logits [num_rows, vocab] float32 on the CPU, left as they are.

    `largest` is all that greedy rows need; a backend may have a faster one. The rest is numpy on one thread: a step's
    sampling is a few passes over some megabytes, and waking threads for each costs more, above all where another
    process wants the cores.
    """
    num_draws = len(batch)
    output = SamplerOutput(np.zeros(num_draws, np.int64))
    if num_draws == 0:
        return output
    rows = logits.numpy()
    largest = largest or _largest
    if batch.adjusted.size == 0:
        _draw_into(output, _rows(rows, batch, None), batch, None, NON_FINITE, largest)
    else:
        plain = np.setdiff1d(np.arange(num_draws), batch.adjusted, assume_unique=True)
        if plain.size:
            _draw_into(output, _rows(rows, batch, plain), batch, plain, NON_FINITE, largest)
        _sample_adjusted(output, rows, batch, largest)
    _report(output, rows, batch)
    return output


def prompt_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int32], first_position: int, num_top: int
) -> PromptLogprobs | None:
    """logits [n, vocab] float32 at the positions before each of token_ids [n]. None where a row is not finite."""
    rows = logits.numpy()
    if not np.isfinite(rows.max(axis=1)).all():
        return None
    entries = tuple(_describe(row, int(token), num_top) for row, token in zip(rows, token_ids, strict=True))
    return PromptLogprobs(first_position, entries)


def _rows(rows: Floats, batch: SamplingBatch, draws: Ints | None) -> Floats:
    """The draws' rows: the logits themselves where that is all of them, a copy otherwise."""
    wanted = batch.logits_rows
    if draws is not None:
        wanted = draws if wanted is None else wanted[draws]
    return rows if wanted is None else rows[wanted]


def _sample_adjusted(output: SamplerOutput, logits: Floats, batch: SamplingBatch, largest: Largest) -> None:
    assert batch.adjustments is not None
    rows = _rows(logits, batch, batch.adjusted)
    finite = np.isfinite(largest(rows)[1])
    _adjust(rows, batch.adjusted, batch.adjustments)
    _draw_into(output, rows, batch, batch.adjusted, NO_TOKEN_LEFT, largest)
    for draw in batch.adjusted[~finite].tolist():
        output.token_ids[draw] = 0
        output.errors[draw] = NON_FINITE
    place = {draw: index for index, draw in enumerate(batch.adjusted.tolist())}
    for draw, count in batch.candidates:
        if draw in place and draw not in output.errors:
            output.candidates[draw] = _candidates(rows[place[draw]], count)


def _adjust(rows: Floats, draws: Ints, adjustments: Adjustments) -> None:
    """Changes rows [len(draws), vocab] in place: bias, allowed ids, forbidden ids, penalties."""

    def place(wanted: Ints) -> Ints:
        found: Ints = np.searchsorted(draws, wanted)
        return found

    bias, allowed, forbidden = adjustments.bias, adjustments.allowed, adjustments.forbidden
    unbiased = rows[place(bias.draws), bias.token_ids]
    with np.errstate(over="ignore"):
        rows[place(bias.draws), bias.token_ids] = _finite(unbiased + adjustments.bias_values, unbiased)
    if adjustments.restricted.size:
        kept = rows[place(allowed.draws), allowed.token_ids]
        rows[place(adjustments.restricted)] = -np.inf
        rows[place(allowed.draws), allowed.token_ids] = kept
    rows[place(forbidden.draws), forbidden.token_ids] = -np.inf
    if adjustments.penalties is not None:
        penalties = adjustments.penalties
        places = place(penalties.draws)
        rows[places] = _penalized(rows[places], penalties)


def _penalized(rows: Floats, penalties: Penalties) -> Floats:
    counts = np.zeros(rows.shape, np.float32)
    np.add.at(counts, (penalties.output.draws, penalties.output.token_ids), np.float32(1))
    present = counts > 0
    seen = present.copy()
    seen[penalties.prompt.draws, penalties.prompt.token_ids] = True
    repetition = penalties.repetition[:, None]
    # Penalties as far apart as float32 reaches overflow; a forbidden token's -inf may even meet another one.
    with np.errstate(over="ignore", invalid="ignore"):
        repeated = np.where(rows > 0, rows / repetition, rows * repetition)
        penalized = np.where(seen, np.clip(repeated, -_LARGEST, _LARGEST), rows)
        penalized -= counts * penalties.frequency[:, None]
        penalized -= present * penalties.presence[:, None]
    return _finite(penalized, rows)


def _finite(values: Floats, before: Floats) -> Floats:
    """Values kept finite; a token that was forbidden `before` stays so."""
    kept: Floats = np.where(np.isneginf(before), before, np.clip(values, -_LARGEST, _LARGEST))
    return kept


def _draw_into(
    output: SamplerOutput, rows: Floats, batch: SamplingBatch, draws: Ints | None, error: str, largest: Largest
) -> None:
    """Draws from rows [n, vocab]; `draws` [n] says whose they are, None means all in order."""
    best, maxima = largest(rows)
    finite = np.isfinite(maxima)
    temperature = batch.temperature if draws is None else batch.temperature[draws]
    random = np.flatnonzero(finite & (temperature > 0))
    tokens = best
    if random.size:
        chosen = random if draws is None else draws[random]
        picked = rows if random.size == len(rows) else rows[random]
        tokens[random] = _draw_random(picked, maxima[random], batch, chosen)
    if not finite.all():
        tokens[~finite] = 0
        bad = np.flatnonzero(~finite) if draws is None else draws[~finite]
        output.errors.update(dict.fromkeys(bad.tolist(), error))
    if draws is None:
        output.token_ids[:] = tokens
    else:
        output.token_ids[draws] = tokens


def _largest(rows: Floats) -> tuple[Ints, Floats]:
    best: Ints = rows.argmax(axis=1)  # the place of a NaN, if there is one
    return best, rows[np.arange(len(rows)), best]


def _draw_random(rows: Floats, maxima: Floats, batch: SamplingBatch, draws: Ints) -> Ints:
    """rows [n, vocab], left as they are, with their largest values [n]; all temperatures above 0."""
    num, vocab = rows.shape
    weights = np.zeros((num, -(-vocab // _CHUNK) * _CHUNK), np.float32)
    inner = weights[:, :vocab]
    # Far below the best, and by a tiny temperature, -inf is reached, whose weight is 0; never NaN: the best token's 0
    # stays 0.
    with np.errstate(over="ignore"):
        np.subtract(rows, maxima[:, None], out=inner)
        np.divide(inner, batch.temperature[draws][:, None], out=inner)
    top_k = batch.top_k[draws]
    for row in np.flatnonzero((top_k > 0) & (top_k < vocab)).tolist():
        inner[row, inner[row] < _kth_largest(inner[row], int(top_k[row]))] = -np.inf
    with np.errstate(under="ignore"):
        np.exp(inner, out=inner)
    sums = weights.reshape(num, -1, _CHUNK).sum(axis=-1)
    if _truncate(inner, sums, batch.top_p[draws], batch.min_p[draws]):
        sums = weights.reshape(num, -1, _CHUNK).sum(axis=-1)
    uniform = uniforms(batch.seeds[draws], batch.positions[draws], batch.sample_indices[draws])
    return _inverse_cdf(weights, sums, uniform)


def _kth_largest(row: Floats, k: int) -> np.float32:
    """Of k chunks' largest values the least is no more than the k-th largest of all: few values need looking at."""
    chunks = len(row) // _CHUNK
    if k <= chunks:
        largest = row[: chunks * _CHUNK].reshape(chunks, _CHUNK).max(axis=1)
        row = row[row >= np.partition(largest, chunks - k)[chunks - k]]
    found: np.float32 = np.partition(row, len(row) - k)[len(row) - k]
    return found


def _truncate(weights: Floats, sums: Floats, top_p: Floats, min_p: Floats) -> bool:
    """top-p and min-p, as thresholds on weights [n, vocab] of which the largest is 1; False if no row uses them."""
    nucleus = np.flatnonzero(top_p < 1)
    if nucleus.size == 0 and not min_p.any():
        return False
    pivots = np.minimum(min_p, np.float32(1))
    for row in nucleus.tolist():
        mass = sums[row].sum(dtype=np.float64) * float(top_p[row])
        pivots[row] = max(pivots[row], _nucleus_pivot(weights[row], mass))
    for row in np.flatnonzero(pivots > 0).tolist():
        weights[row, weights[row] < pivots[row]] = 0
    return True


def _nucleus_pivot(weights: Floats, mass: float) -> np.float32:
    """The weight [vocab] at which the running sum from the largest on reaches the mass."""
    pivot: np.float32
    for least in (_LIKELY, np.float32(0)):
        falling = np.sort(weights[weights >= least])[::-1]
        running = falling.cumsum(dtype=np.float64)
        if running[-1] >= mass:
            pivot = falling[np.searchsorted(running, mass)]
            return pivot
    pivot = falling[-1]
    return pivot


def _inverse_cdf(weights: Floats, sums: Floats, uniform: npt.NDArray[np.float64]) -> Ints:
    """The chunk in which uniform * total falls, then the id inside it. Ids of weight 0 are never drawn."""
    num = len(weights)
    rows = np.arange(num)
    ends = sums.cumsum(axis=1, dtype=np.float64)
    target = uniform * ends[:, -1]
    chunk = (ends <= target[:, None]).sum(axis=1)
    before = np.where(chunk > 0, ends[rows, np.maximum(chunk - 1, 0)], 0.0)
    inside = weights.reshape(num, -1, _CHUNK)[rows, chunk]
    running = inside.cumsum(axis=1, dtype=np.float64)
    offset = (running <= (target - before)[:, None]).sum(axis=1)
    # The chunk's sum is rounded differently from its running sum: a target between the two falls on its last token.
    last = _CHUNK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    token_ids: Ints = chunk * _CHUNK + np.minimum(offset, last)
    return token_ids


def _report(output: SamplerOutput, logits: Floats, batch: SamplingBatch) -> None:
    def row(draw: int) -> Floats:
        values: Floats = logits[draw if batch.logits_rows is None else batch.logits_rows[draw]]
        return values

    for draw, num_top in batch.logprobs:
        if draw not in output.errors:
            output.logprobs[draw] = _describe(row(draw), int(output.token_ids[draw]), num_top)
    for draw, count in batch.candidates:
        if draw not in output.errors and draw not in output.candidates:
            output.candidates[draw] = _candidates(row(draw), count)


def _describe(row: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    value = row[token_id]
    rank = int((row > value).sum()) + 1
    top = _top_logprobs(row, num_top) if num_top else ()
    return TokenLogprobs(float(value - _log_sum_exp(row)), rank, top)


def _top_logprobs(row: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The best tokens, best first, of equal ones the lowest id first."""
    count = min(count, len(row))
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= threshold)
    ids = ids[np.lexsort((ids, -row[ids]))][:count]
    with np.errstate(over="ignore"):
        logprobs = row[ids] - _log_sum_exp(row)
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _candidates(row: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The same, without tokens that a mask forbids."""
    return tuple(best for best in _top_logprobs(row, count) if best[1] > -np.inf)


def _log_sum_exp(row: Floats) -> float:
    maximum = row.max()
    with np.errstate(over="ignore", under="ignore"):  # the least logit may lie further below than float32 reaches
        total = np.exp(row - maximum).sum(dtype=np.float64)
    return float(maximum) + math.log(total)
