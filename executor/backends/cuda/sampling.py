"""Launches the sampler: a `SamplingBatch` in columns to the device, tokens drawn there, results back in one copy.

Draws as executor/sampler.py defines them (cuda/sample.cu, cuda/adjust_logits.cu). What few rows ask for, alternatives
and beam candidates, torch works out from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor.backends.cuda.formats import check
from executor.backends.cuda.launch import Launcher
from executor.backends.cuda.sources import KernelSource, kernel
from executor.plan import TokenLogprobs
from executor.sampler import NO_TOKEN_LEFT, NON_FINITE, Adjustments, Ints, SamplerOutput, SamplingBatch, TokenColumns

MAX_VOCAB = 1 << 22  # beyond it, sums of weights could overflow
THREADS = 1024
BYTES_PER_DRAW = 20

Array = npt.NDArray[np.generic]
Upload = Callable[[Mapping[str, Array]], Mapping[str, torch.Tensor]]

_ERRORS = {1: NON_FINITE, 2: NO_TOKEN_LEFT}  # the kernel's flags


def sample_source(threads: int = THREADS) -> KernelSource:
    return kernel("sample", "sample.cu", THREADS=threads)


def adjust_source(threads: int = THREADS) -> KernelSource:
    return kernel("adjust_logits", "adjust_logits.cu", THREADS=threads)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a launch leaves on the device; all but the last are views of one buffer."""

    buffer: torch.Tensor  # [BYTES_PER_DRAW * num_draws] uint8
    token_ids: torch.Tensor  # [num_draws] int64; 0 where flagged
    flags: torch.Tensor  # [num_draws] int32; 0 is fine
    logprobs: torch.Tensor  # [num_draws] float32, of the draws that asked
    ranks: torch.Tensor  # [num_draws] int32, likewise
    adjusted: torch.Tensor | None  # [num_adjusted, vocab] float32: logits after bias, masks and penalties


class Sampler:
    """Draws tokens from logits on the launcher's device."""

    def __init__(self, launcher: Launcher, upload: Upload, threads: int = THREADS) -> None:
        """`upload`: host arrays by name to tensors on the device, good until its next call (see staging.py)."""
        self._launcher = launcher
        self._upload = upload
        self._threads = threads
        self._sample, self._adjust = sample_source(threads), adjust_source(threads)

    def prepare(self) -> None:
        self._launcher.prepare(self._sample)
        self._launcher.prepare(self._adjust)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        """logits [num_rows, vocab] float32, left as they are. Waits for the device."""
        if len(batch) == 0:
            return SamplerOutput(np.zeros(0, np.int64))
        drawn = self.launch(logits, batch)
        return self.report(logits, batch, drawn, drawn_in(drawn.buffer.cpu(), None))

    def launch(self, logits: torch.Tensor, batch: SamplingBatch, buffer: torch.Tensor | None = None) -> Drawn:
        """The same without waiting: at least one draw, left in buffer [BYTES_PER_DRAW * num_draws] uint8, if that is
        given, or one of its own."""
        check("logits", logits, torch.float32, None, None)
        vocab = logits.shape[1]
        assert 0 < vocab <= MAX_VOCAB, f"a vocabulary of {vocab}"
        num_draws = len(batch)
        arrays = draw_arrays(batch)
        num_adjusted = len(batch.adjusted)
        if num_adjusted:
            assert batch.adjustments is not None
            arrays |= adjustment_arrays(batch.adjustments, batch.adjusted, _logits_rows(batch))
        columns = self._upload(arrays)
        adjusted = was_finite = None
        if num_adjusted:
            adjusted = logits.new_empty(num_adjusted, vocab)
            was_finite = torch.empty(num_adjusted, dtype=torch.int32, device=logits.device)
            self._launch_adjust(logits, columns, adjusted, was_finite)
        if buffer is None:
            buffer = torch.empty(BYTES_PER_DRAW * num_draws, dtype=torch.uint8, device=logits.device)
        check("buffer", buffer, torch.uint8, BYTES_PER_DRAW * num_draws)
        drawn = drawn_in(buffer, adjusted)
        self._launcher.launch(
            self._sample,
            (num_draws, 1, 1),
            (self._threads, 1, 1),
            0,
            [
                drawn.token_ids,
                drawn.flags,
                drawn.logprobs,
                drawn.ranks,
                logits,
                adjusted,
                was_finite,
                *(columns[name] for name in _COLUMNS),
                np.int32(vocab),
            ],
        )
        return drawn

    def _launch_adjust(
        self,
        logits: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        adjusted: torch.Tensor,
        was_finite: torch.Tensor,
    ) -> None:
        counts = torch.empty(adjusted.shape, dtype=torch.int32, device=logits.device)
        self._launcher.launch(
            self._adjust,
            (len(adjusted), 1, 1),
            (self._threads, 1, 1),
            0,
            [
                adjusted,
                was_finite,
                counts,
                logits,
                *(columns[name] for name in _ADJUSTMENT_COLUMNS),
                np.int32(logits.shape[1]),
            ],
        )

    def report(self, logits: torch.Tensor, batch: SamplingBatch, drawn: Drawn, host: Drawn) -> SamplerOutput:
        """`host`: what was drawn, on the host. Waits for the device where alternatives are asked for, whose logits must
        still stand."""
        flags = host.flags.numpy()
        output = SamplerOutput(
            host.token_ids.numpy(), errors={int(draw): _ERRORS[int(flags[draw])] for draw in np.flatnonzero(flags)}
        )
        rows = _logits_rows(batch)
        for draw, num_top in batch.logprobs:
            if draw not in output.errors:
                top = _best(logits[int(rows[draw])], num_top) if num_top else ()
                output.logprobs[draw] = TokenLogprobs(float(host.logprobs[draw]), int(host.ranks[draw]), top)
        place = {draw: index for index, draw in enumerate(batch.adjusted.tolist())}
        for draw, count in batch.candidates:
            if draw in output.errors:
                continue
            row = logits[int(rows[draw])]
            if draw in place:
                assert drawn.adjusted is not None
                row = drawn.adjusted[place[draw]]
            output.candidates[draw] = tuple(best for best in _best(row, count) if best[1] > -np.inf)
        return output


_COLUMNS = (
    "source_rows",
    "report_rows",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seeds",
    "sample_positions",
    "sample_indices",
)
_ADJUSTMENT_COLUMNS = (
    "adjusted_rows",
    "list_ptrs",
    "list_ids",
    "bias_values",
    "restricted",
    "penalized",
    "penalties",
)


def draw_arrays(batch: SamplingBatch) -> dict[str, Array]:
    """The columns of sample.cu by name, each [num_draws]."""
    rows = _logits_rows(batch)
    source_rows = rows.copy()
    source_rows[batch.adjusted] = ~np.arange(len(batch.adjusted), dtype=np.int32)
    report_rows = np.full(len(batch), -1, np.int32)
    asked = [draw for draw, _ in batch.logprobs]
    report_rows[asked] = rows[asked]
    return {
        "source_rows": source_rows,
        "report_rows": report_rows,
        "temperature": batch.temperature,
        "top_k": batch.top_k.astype(np.int32),
        "top_p": batch.top_p,
        "min_p": batch.min_p,
        "seeds": batch.seeds.view(np.int64),
        "sample_positions": batch.positions.astype(np.int32),
        "sample_indices": batch.sample_indices.astype(np.int32),
    }


def adjustment_arrays(adjustments: Adjustments, draws: Ints, rows: npt.NDArray[np.int32]) -> dict[str, Array]:
    """The columns of adjust_logits.cu by name, of the adjusted draws [n], ascending; rows [num_draws] of logits."""
    num = len(draws)
    penalties = adjustments.penalties
    none = TokenColumns(np.zeros(0, np.int64), np.zeros(0, np.int64))
    prompt = output = none
    penalized = np.zeros(num, np.int32)
    factors = np.zeros((3, num), np.float32)
    if penalties is not None:
        places = np.searchsorted(draws, penalties.draws)
        penalized[places] = 1
        factors[:, places] = penalties.presence, penalties.frequency, penalties.repetition
        prompt, output = (
            TokenColumns(places[pairs.draws], pairs.token_ids) for pairs in (penalties.prompt, penalties.output)
        )
    bias, allowed, forbidden = (
        TokenColumns(np.searchsorted(draws, pairs.draws), pairs.token_ids)
        for pairs in (adjustments.bias, adjustments.allowed, adjustments.forbidden)
    )
    restricted = np.zeros(num, np.int32)
    restricted[np.searchsorted(draws, adjustments.restricted)] = 1
    list_ptrs = np.zeros((5, num + 1), np.int32)
    ids: list[Ints] = []
    start = 0
    for ptrs, pairs in zip(list_ptrs, (bias, allowed, forbidden, prompt, output), strict=True):
        ptrs[0] = start
        ptrs[1:] = start + np.cumsum(np.bincount(pairs.draws, minlength=num))
        start = int(ptrs[-1])
        ids.append(pairs.token_ids[np.argsort(pairs.draws, kind="stable")])
    return {
        "adjusted_rows": rows[draws],
        "list_ptrs": list_ptrs,
        "list_ids": np.concatenate(ids).astype(np.int32),
        "bias_values": adjustments.bias_values[np.argsort(bias.draws, kind="stable")],
        "restricted": restricted,
        "penalized": penalized,
        "penalties": factors,
    }


def _logits_rows(batch: SamplingBatch) -> npt.NDArray[np.int32]:
    """[num_draws] the row of logits each draws from."""
    rows = np.arange(len(batch)) if batch.logits_rows is None else batch.logits_rows
    return rows.astype(np.int32)


def drawn_in(buffer: torch.Tensor, adjusted: torch.Tensor | None) -> Drawn:
    """Views of a buffer [BYTES_PER_DRAW * num_draws] uint8."""
    num_draws = len(buffer) // BYTES_PER_DRAW
    token_ids, flags, logprobs, ranks = torch.split(buffer, [8 * num_draws, *3 * [4 * num_draws]])
    return Drawn(
        buffer,
        token_ids.view(torch.int64),
        flags.view(torch.int32),
        logprobs.view(torch.float32),
        ranks.view(torch.int32),
        adjusted,
    )


def _best(row: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """(token, log probability) of the best tokens of row [vocab], best first, of equal ones the lowest id first."""
    count = min(count, len(row))
    ids = torch.nonzero(row >= row.topk(count).values[-1]).flatten()
    values = row[ids].double() - torch.logsumexp(row.double(), 0)
    found = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0]))[:count])
