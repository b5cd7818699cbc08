"""Every figure of the report but the measured one, as a function of a size and a seed: same arguments, same values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paper import contiguous, latency, paged
from benchmarks.paper.contiguous import RULES, Buddy, FirstFit, Use
from benchmarks.paper.latency import Caching, Chunking
from benchmarks.paper.lengths import ALPACA, SHAREGPT, SPREAD, Lengths, Trace, draw
from benchmarks.paper.paged import PagedUse, Saturated
from benchmarks.paper.prefixes import found_share

NUM_SLOTS = 15_700  # of OPT-13B's K/V on an A100 with 40 GB (the paper's Table 1)
BLOCK_SIZE = 16
SPREADS = (0.5, 0.75, 1.0, 1.25)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (2, 4, 6)  # outputs of a request
BUDGETS = (64, 128, 256, 512, 1024, 4096)  # tokens of a step; the last takes every prompt whole
TRACES = (SHAREGPT, ALPACA)
_ROOMY = 200_000  # slots: memory never runs out
_SEATS = {SHAREGPT.name: 8, ALPACA.name: 16}  # requests at a time, where memory never runs out


@dataclass(frozen=True, slots=True)
class Size:
    """Steps of each kind of run with ShareGPT's lengths; Alpaca's requests are short, and a quarter does."""

    contiguous: int
    paged: int
    drawn: int
    beams: int
    blocks: int  # for each block size
    groups: int  # of requests with one system prompt
    requests: int  # in simulated time


FULL = Size(contiguous=18_000, paged=6000, drawn=6000, beams=2400, blocks=1500, groups=60, requests=400)
SHORT = Size(contiguous=8000, paged=4000, drawn=2400, beams=1000, blocks=600, groups=15, requests=120)
_WARM = {SHAREGPT.name: 1000, ALPACA.name: 300}


@dataclass(frozen=True, slots=True)
class Memory:
    """One trace under every way to keep K/V. By name: the rule for buddy and first fit."""

    buddy: dict[str, Use]
    first_fit: dict[str, Use]
    paged: PagedUse


@dataclass(frozen=True, slots=True)
class BlockSize:
    sharegpt: PagedUse
    alpaca: PagedUse
    found: float  # share of the shared prompt tokens that the prefix cache finds


@dataclass(frozen=True, slots=True)
class Figures:
    memory: dict[str, Memory]  # by trace
    spreads: dict[float, Memory]  # ShareGPT's means, by spread
    parallel: dict[str, dict[int, PagedUse]]  # by trace and number of outputs
    beams: dict[str, dict[int, PagedUse]]  # by trace and width
    block_sizes: dict[int, BlockSize]
    chunking: dict[int, Chunking]  # by tokens of a step
    caching: dict[bool, Caching]


def _steps(trace: Trace, steps: int) -> int:
    return steps if trace is SHAREGPT else steps // 4


def memory(trace: Trace, size: Size, seed: int, spread: float = SPREAD) -> Memory:
    steps, warm = _steps(trace, size.contiguous), _WARM[trace.name]

    def coming() -> Iterator[Lengths]:
        return draw(trace, seed, spread)

    return Memory(
        buddy={n: contiguous.run(NUM_SLOTS, rule, Buddy, coming(), steps, warm) for n, rule in RULES.items()},
        first_fit={n: contiguous.run(NUM_SLOTS, rule, FirstFit, coming(), steps, warm) for n, rule in RULES.items()},
        paged=paged.run(Saturated(NUM_SLOTS, BLOCK_SIZE, coming()), _steps(trace, size.paged), warm),
    )


def parallel(trace: Trace, samples: int, size: Size, seed: int) -> PagedUse:
    system = Saturated(
        _ROOMY, BLOCK_SIZE, draw(trace, seed), samples=samples, max_num_seqs=samples * _SEATS[trace.name]
    )
    return paged.run(system, _steps(trace, size.drawn), _WARM[trace.name])


def beams(trace: Trace, width: int, size: Size, seed: int) -> PagedUse:
    system = Saturated(
        _ROOMY, BLOCK_SIZE, draw(trace, seed), beam_width=width, seed=seed, max_num_seqs=width * _SEATS[trace.name]
    )
    return paged.run(system, _steps(trace, size.beams), _WARM[trace.name])


def block_size(tokens: int, size: Size, seed: int) -> BlockSize:
    def used(trace: Trace) -> PagedUse:
        steps = _steps(trace, size.blocks)
        return paged.run(Saturated(NUM_SLOTS, tokens, draw(trace, seed)), steps, _WARM[trace.name])

    return BlockSize(used(SHAREGPT), used(ALPACA), found_share(NUM_SLOTS, tokens, range(64, 321), size.groups, seed))


def compute(size: Size, seed: int) -> Figures:
    usual = {trace.name: memory(trace, size, seed) for trace in TRACES}
    others = {s: memory(SHAREGPT, size, seed, s) for s in SPREADS if s != SPREAD}
    return Figures(
        memory=usual,
        spreads=dict(sorted({**others, SPREAD: usual[SHAREGPT.name]}.items())),
        parallel={trace.name: {n: parallel(trace, n, size, seed) for n in WIDTHS} for trace in TRACES},
        beams={trace.name: {n: beams(trace, n, size, seed) for n in WIDTHS} for trace in TRACES},
        block_sizes={tokens: block_size(tokens, size, seed) for tokens in BLOCK_SIZES},
        chunking={budget: latency.chunking(budget, seed, size.requests) for budget in BUDGETS},
        caching={on: latency.caching(on, seed, size.requests) for on in (False, True)},
    )
