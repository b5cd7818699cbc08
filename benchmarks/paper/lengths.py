"""Requests of the lengths that the PagedAttention paper's traces have, drawn, since the traces are not at hand.

Prompt and output are drawn apart from log-normal distributions, cut at a bound. The means are the paper's (section
6.1, Fig. 11), after the cut; the spread is a choice, one for both, and the report shows what another choice would do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

MAX_MODEL_LEN = 2048  # of OPT, which the paper served
LONGEST = 1024  # of a prompt, and of an output, so that both together fit
SPREAD = 1.0  # standard deviation of the logarithm


class Lengths(NamedTuple):
    prompt: int
    output: int


class Trace(NamedTuple):
    """Mean tokens of prompts and outputs."""

    name: str
    prompt: float
    output: float


SHAREGPT = Trace("ShareGPT", 161, 338)
ALPACA = Trace("Alpaca", 19, 58)


def cut_mean(mu: float, sigma: float, longest: float) -> float:
    """Mean of min(X, longest), where log X is normal."""
    normal, log_longest = NormalDist(), math.log(longest)
    below = math.exp(mu + sigma**2 / 2) * normal.cdf((log_longest - mu - sigma**2) / sigma)
    return below + longest * (1 - normal.cdf((log_longest - mu) / sigma))


def mu_for(mean: float, sigma: float, longest: float) -> float:
    """The parameter that gives a mean after the cut."""
    low, high = -5.0, math.log(longest) + 5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle, sigma, longest) < mean else (low, middle)
    return low


def draw(trace: Trace, seed: int, spread: float = SPREAD) -> Iterator[Lengths]:
    """Without end; every length is at least 1."""
    r = random.Random(f"{trace.name}/{seed}")
    prompt_mu, output_mu = (mu_for(mean, spread, LONGEST) for mean in (trace.prompt, trace.output))

    def one(mu: float) -> int:
        return max(1, round(min(float(LONGEST), r.lognormvariate(mu, spread))))

    while True:
        yield Lengths(one(prompt_mu), one(output_mu))
