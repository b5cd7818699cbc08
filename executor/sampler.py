"""Draws tokens from logits: the definition, and the CPU's implementation of it. A kernel must draw the same way.

Each draw is a function of its row of logits, its sampling, seed, output position and sample index; never of the other
rows. Order: logit bias, allowed ids, stop ids below min_tokens, penalties (repetition over prompt and output, then
frequency and presence over output), temperature, top-k, top-p, min-p, then one uniform number through the inverse CDF.

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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from executor.philox import uniforms
from executor.plan import PromptLogprobs, TokenLogprobs

NON_FINITE = "non-finite logits"
NO_TOKEN_LEFT = "logit_bias, allowed_token_ids and min_tokens leave no token to draw"

_CHUNK = 256  # ids summed at once on the way to the inverse CDF
_FEW = 1024  # tokens sorted for top-p before the whole vocabulary is

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


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


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a draw; 0 where `errors` names the draw."""

    token_ids: Ints  # [num_draws]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by draw, as the others
    candidates: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
    """logits [num_rows, vocab] float32 on the CPU, left as they are."""
    num_draws = len(batch)
    token_ids = np.zeros(num_draws, np.int64)
    output = SamplerOutput(token_ids)
    if num_draws == 0:
        return output
    adjusted = batch.adjusted
    if adjusted.size == 0:
        _draw_into(output, _rows(logits, batch, None), batch, None, NON_FINITE)
    else:
        plain = np.setdiff1d(np.arange(num_draws), adjusted, assume_unique=True)
        if plain.size:
            _draw_into(output, _rows(logits, batch, plain), batch, plain, NON_FINITE)
        _sample_adjusted(output, logits, batch)
    _report(output, logits, batch)
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


def _rows(logits: torch.Tensor, batch: SamplingBatch, draws: Ints | None) -> torch.Tensor:
    """The draws' rows: the logits themselves where that is all of them, a copy otherwise."""
    rows = batch.logits_rows
    if draws is not None:
        rows = draws if rows is None else rows[draws]
    return logits if rows is None else logits.index_select(0, torch.from_numpy(rows))


def _sample_adjusted(output: SamplerOutput, logits: torch.Tensor, batch: SamplingBatch) -> None:
    assert batch.adjustments is not None
    raw = _rows(logits, batch, batch.adjusted)
    finite = np.isfinite(raw.numpy().max(axis=1))
    rows = _adjust(raw.clone() if raw is logits else raw, batch.adjusted, batch.adjustments)
    _draw_into(output, rows, batch, batch.adjusted, NO_TOKEN_LEFT)
    for draw in batch.adjusted[~finite].tolist():
        output.token_ids[draw] = 0
        output.errors[draw] = NON_FINITE
    place = {draw: index for index, draw in enumerate(batch.adjusted.tolist())}
    for draw, count in batch.candidates:
        if draw in place and draw not in output.errors:
            output.candidates[draw] = _candidates(rows[place[draw]].numpy(), count)


def _adjust(rows: torch.Tensor, draws: Ints, adjustments: Adjustments) -> torch.Tensor:
    """Changes rows [len(draws), vocab] in place: bias, allowed ids, forbidden ids, penalties."""

    def place(wanted: Ints) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(draws, wanted))

    bias = adjustments.bias
    if bias.draws.size:
        at = (place(bias.draws), torch.from_numpy(bias.token_ids))
        rows.index_put_(at, torch.from_numpy(adjustments.bias_values), accumulate=True)
    if adjustments.restricted.size:
        at = (place(adjustments.allowed.draws), torch.from_numpy(adjustments.allowed.token_ids))
        kept = rows[at]
        rows[place(adjustments.restricted)] = float("-inf")
        rows[at] = kept
    forbidden = adjustments.forbidden
    if forbidden.draws.size:
        rows[place(forbidden.draws), torch.from_numpy(forbidden.token_ids)] = float("-inf")
    if adjustments.penalties is not None:
        _penalize(rows, place(adjustments.penalties.draws), adjustments.penalties)
    return rows


def _penalize(rows: torch.Tensor, places: torch.Tensor, penalties: Penalties) -> None:
    num, vocab = len(places), rows.shape[1]
    counts = torch.zeros(num, vocab)
    at = (torch.from_numpy(penalties.output.draws), torch.from_numpy(penalties.output.token_ids))
    counts.index_put_(at, torch.ones(len(at[0])), accumulate=True)
    seen = counts > 0
    present = seen.clone()
    seen[torch.from_numpy(penalties.prompt.draws), torch.from_numpy(penalties.prompt.token_ids)] = True
    logits = rows[places]
    repetition = torch.from_numpy(penalties.repetition)[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= counts * torch.from_numpy(penalties.frequency)[:, None]
    logits -= present * torch.from_numpy(penalties.presence)[:, None]
    rows[places] = logits


def _draw_into(output: SamplerOutput, rows: torch.Tensor, batch: SamplingBatch, draws: Ints | None, error: str) -> None:
    """Draws from rows [n, vocab]; `draws` [n] says whose they are, None means all in order."""
    array = rows.numpy()
    best = array.argmax(axis=1)  # the first of equal ones; the place of a NaN, if there is one
    maxima = np.take_along_axis(array, best[:, None], axis=1)[:, 0]
    finite = np.isfinite(maxima)
    temperature = batch.temperature if draws is None else batch.temperature[draws]
    random = np.flatnonzero(finite & (temperature > 0))
    tokens = best
    if random.size:
        chosen = random if draws is None else draws[random]
        picked = rows if random.size == len(array) else rows.index_select(0, torch.from_numpy(random))
        tokens[random] = _draw_random(picked, maxima[random], batch, chosen)
    if not finite.all():
        tokens[~finite] = 0
        bad = np.flatnonzero(~finite) if draws is None else draws[~finite]
        output.errors.update(dict.fromkeys(bad.tolist(), error))
    if draws is None:
        output.token_ids[:] = tokens
    else:
        output.token_ids[draws] = tokens


def _draw_random(rows: torch.Tensor, maxima: Floats, batch: SamplingBatch, draws: Ints) -> Ints:
    """rows [n, vocab], left as they are, with their largest values [n]; all temperatures above 0."""
    num, vocab = rows.shape
    padded = -(-vocab // _CHUNK) * _CHUNK
    weights = torch.empty(num, padded)
    weights[:, vocab:] = 0
    inner = weights[:, :vocab]
    torch.sub(rows, torch.from_numpy(maxima)[:, None], out=inner)
    # A float32 division by a tiny temperature may reach -inf, whose weight is 0; never NaN, for the maximum gives 0.
    inner.div_(torch.from_numpy(batch.temperature[draws])[:, None])
    top_k = batch.top_k[draws]
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab))
    if limited.size:
        _keep_top_k(inner, limited, top_k[limited])
    inner.exp_()
    sums = weights.view(num, padded // _CHUNK, _CHUNK).sum(dim=-1)
    pivots = _pivots(inner, sums, batch, draws)
    if pivots is not None:
        inner.masked_fill_(inner < torch.from_numpy(pivots)[:, None], 0)
        sums = weights.view(num, padded // _CHUNK, _CHUNK).sum(dim=-1)
    uniform = uniforms(batch.seeds[draws], batch.positions[draws], batch.sample_indices[draws])
    return _inverse_cdf(weights.numpy(), sums.numpy(), uniform)


def _keep_top_k(rows: torch.Tensor, limited: Ints, top_k: Ints) -> None:
    at = torch.from_numpy(limited)
    some = rows.index_select(0, at)
    best = some.topk(int(top_k.max()), dim=-1, sorted=True).values
    pivot = best.gather(1, torch.from_numpy(top_k - 1)[:, None])
    rows[at] = some.masked_fill_(some < pivot, float("-inf"))


def _pivots(weights: torch.Tensor, sums: torch.Tensor, batch: SamplingBatch, draws: Ints) -> Floats | None:
    """The smallest weight that top-p and min-p keep, for each row; None: no row uses them. The largest weight is 1."""
    top_p, min_p = batch.top_p[draws], batch.min_p[draws]
    nucleus = np.flatnonzero(top_p < 1)
    if nucleus.size == 0 and not min_p.any():
        return None
    pivots = min_p.astype(np.float32, copy=True)
    if nucleus.size:
        masses = sums.numpy()[nucleus].sum(axis=1, dtype=np.float64) * top_p[nucleus]
        found = _nucleus_pivots(weights.index_select(0, torch.from_numpy(nucleus)), masses)
        pivots[nucleus] = np.maximum(pivots[nucleus], found)
    return pivots


def _nucleus_pivots(weights: torch.Tensor, masses: npt.NDArray[np.float64]) -> Floats:
    """The weight at which the running sum from the largest on reaches the mass: weights [n, vocab], masses [n]."""
    vocab = weights.shape[1]
    few = min(_FEW, vocab)
    best = weights.topk(few, dim=-1, sorted=True).values.numpy()
    running = best.cumsum(axis=1, dtype=np.float64)
    pivots: Floats = best[np.arange(len(best)), np.minimum((running < masses[:, None]).sum(axis=1), few - 1)]
    beyond = np.flatnonzero(running[:, -1] < masses)
    if few < vocab and beyond.size:
        every = np.sort(weights.numpy()[beyond], axis=1)[:, ::-1]
        running = every.cumsum(axis=1, dtype=np.float64)
        index = np.minimum((running < masses[beyond, None]).sum(axis=1), vocab - 1)
        pivots[beyond] = every[np.arange(len(beyond)), index]
    return pivots


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


def _report(output: SamplerOutput, logits: torch.Tensor, batch: SamplingBatch) -> None:
    def row(draw: int) -> Floats:
        index = draw if batch.logits_rows is None else int(batch.logits_rows[draw])
        values: Floats = logits[index].numpy()
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
    logprobs = row[ids] - _log_sum_exp(row)
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _candidates(row: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The same, without tokens that a mask forbids."""
    return tuple(best for best in _top_logprobs(row, count) if best[1] > -np.inf)


def _log_sum_exp(row: Floats) -> float:
    maximum = row.max()
    total = np.exp(row - maximum).sum(dtype=np.float64)
    return float(maximum) + math.log(total)
