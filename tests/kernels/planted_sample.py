"""Mistakes in the sampling kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from executor.sampler import SamplingBatch
from tests.executor.factories import create_new
from tests.kernels.draws import batch_of, check_draws, varied_rows
from tests.kernels.planted import PlantedBug
from tests.kernels.sim import SimulatorBuild


@cache
def mixed() -> tuple[torch.Tensor, SamplingBatch]:
    return varied_rows(72, 700, seed=11)


def varied(build: SimulatorBuild) -> object:
    """Rows of every kind."""
    return check_draws(*mixed(), build)


def rows(
    count: int, values: torch.Tensor, tokens: Sequence[int] = (0,), **sampling: object
) -> Callable[[SimulatorBuild], object]:
    """`count` draws, by seed, from one row of logits; the first of the tokens is the prompt."""
    parameters = {"num_prompt_tokens": 1, "temperature": 1.0, **sampling}
    new = [create_new(i + 1, tokens, [1], seed=i, **parameters) for i in range(count)]
    batch = batch_of(new, len(values))
    return lambda build: check_draws(values.expand(count, -1).contiguous(), batch, build)


def steps(vocab: int, levels: int) -> torch.Tensor:
    """Logits of few levels, each held by many tokens."""
    return torch.from_numpy(np.random.default_rng(3).integers(0, levels, vocab).astype(np.float32))


# One token of weight 1, many of e^-1, many of e^-2: top-p ends a little short of all of e^-1, by less than the carries
# of their sum.
CARRYING = -torch.cat((torch.zeros(1), torch.ones(500), torch.full((500,), 2.0)))
CARRYING_TOP_P = (1 + 500 * math.exp(-1) - 0.17) / (1 + 500 * math.exp(-1) + 500 * math.exp(-2))

BUGS = (
    PlantedBug(
        "of equal logits the highest id is the best",
        "sample.cu",
        "(value == than.value && id < than.id)",
        "(value == than.value && id > than.id)",
        rows(4, steps(300, 3), temperature=0.0),
    ),
    PlantedBug(
        "a bin's carry is lost",
        "sample.cu",
        "(before + low < before ? 1u : 0u)",
        "0u",
        rows(24, CARRYING, top_p=CARRYING_TOP_P),
    ),
    PlantedBug(
        "bins are filled before all are cleared",
        "sample.cu",
        "shared.low[bin] = shared.high[bin] = 0;\n        __syncthreads();\n",
        "shared.low[bin] = shared.high[bin] = 0;\n",
        varied,
    ),
    PlantedBug(
        "the mass above the bin is forgotten",
        "sample.cu",
        "        above = shared.found_mass;\n",
        "",
        varied,
    ),
    PlantedBug(
        "top-k drops what ties with its last",
        "sample.cu",
        "rank_key(x) < draw.rank_pivot",
        "rank_key(x) <= draw.rank_pivot",
        rows(40, steps(50, 3), top_k=5),
    ),
    PlantedBug(
        "logits of one step of the leading digit are one rank",
        "sample.cu",
        "return Mass(BINS - 1 - steps) << 31 | Mass(0x7f800000u - magnitude);",
        "return Mass(BINS - 1 - steps) << 31 | Mass(0x7f800000u - (magnitude & ~0xfffffu));",
        rows(40, torch.cat((torch.zeros(1), torch.linspace(-0.02, -0.0201, 60))), top_k=3),
    ),
    PlantedBug(
        "nine rounds of Philox",
        "sample.cu",
        "round < 10; round++",
        "round < 9; round++",
        varied,
    ),
    PlantedBug(
        "a span's sum is overwritten before all have read it",
        "sample.cu",
        "        __syncthreads();  // all have read the sums\n",
        "",
        rows(8, torch.linspace(0.0, -3.0, 5000)),
    ),
    PlantedBug(
        "penalties count a token once however often it stands there",
        "adjust_logits.cu",
        "atomicAdd(&count[list_ids[i]], 1);",
        "count[list_ids[i]] = 1;",
        rows(2, torch.tensor([0.0, 1.2, -1.0]), [0, 1, 1, 1], temperature=0.0, frequency_penalty=0.5),
    ),
    PlantedBug(
        "a bias is added before the allowed ids are back",
        "adjust_logits.cu",
        "own[list_ids[i]] = row[list_ids[i]];\n        __syncthreads();\n",
        "own[list_ids[i]] = row[list_ids[i]];\n",
        rows(
            4, steps(300, 3), allowed_token_ids=tuple(range(299, 0, -1)), logit_bias=dict.fromkeys(range(1, 200), 1.0)
        ),
    ),
)

# Caught as well; only the long run shows it.
MORE_BUGS = (
    PlantedBug(
        "the best of the warps before all have told theirs",
        "sample.cu",
        "    if (lane == 0) shared.warp_best[warp] = best;\n    __syncthreads();\n",
        "    if (lane == 0) shared.warp_best[warp] = best;\n",
        varied,
    ),
    PlantedBug(
        "a NaN is passed over",
        "sample.cu",
        "        if (value != value) value = -negative_infinity();\n",
        "",
        rows(2, torch.tensor([0.0, float("nan"), 1.0]), temperature=0.0),
    ),
    PlantedBug(
        "bins are cleared before all have read them",
        "sample.cu",
        "        __syncthreads();  // all have read the bins and the find before they are cleared\n",
        "",
        varied,
    ),
    PlantedBug(
        "top-k keeps one token more",
        "sample.cu",
        "[&](Mass) { return Mass(top_k); }",
        "[&](Mass) { return Mass(top_k) + 1; }",
        rows(40, steps(50, 50), top_k=1),
    ),
    PlantedBug(
        "top-p counts what top-k dropped",
        "sample.cu",
        "[&](float logit) { return weight_key(kept_weight(logit, draw)); }",
        "[&](float logit) { return weight_key(expf(scaled(logit, draw))); }",
        rows(40, torch.linspace(0.0, -2.0, 60), top_k=20, top_p=0.5),
    ),
    PlantedBug(
        "min-p drops the tokens that are just likely enough",
        "sample.cu",
        "return weight < draw.weight_pivot ? 0.0f : weight;",
        "return weight <= draw.weight_pivot ? 0.0f : weight;",
        rows(40, steps(50, 3), min_p=1.0),
    ),
    PlantedBug(
        "the upper half of the seed is not used",
        "sample.cu",
        "k1 = unsigned(seed >> 32);",
        "k1 = 0;",
        varied,
    ),
    PlantedBug(
        "the upper half of the total is not used",
        "sample.cu",
        "high = (total >> 32) * word;",
        "high = 0;",
        varied,
    ),
    PlantedBug(
        "the id before the one that exceeds the target",
        "sample.cu",
        "token = begin + lane * (LEAF / 32) + i + 1;",
        "token = begin + lane * (LEAF / 32) + i;",
        varied,
    ),
    PlantedBug(
        "a span's sum is read before all are written",
        "sample.cu",
        "        if (lane == 0) shared.warp_mass[warp] = sum;\n        __syncthreads();\n        if (whole)",
        "        if (lane == 0) shared.warp_mass[warp] = sum;\n        if (whole)",
        varied,
    ),
    PlantedBug(
        "the rank counts the token itself",
        "sample.cu",
        "larger += logit > value ? 1 : 0;",
        "larger += logit >= value ? 1 : 0;",
        varied,
    ),
    PlantedBug(
        "log probabilities of the adjusted logits",
        "sample.cu",
        "const float* __restrict__ own = logits + int64_t(report_rows[index]) * vocab;",
        "const float* __restrict__ own = row;",
        varied,
    ),
    PlantedBug(
        "penalties on counts of the draw before",
        "adjust_logits.cu",
        "count[id] = 0;",
        "count[id] &= 0;\n    for (int id = thread; id < 1; id += THREADS) count[id] = 5;",
        varied,
    ),
    PlantedBug(
        "forbidden ids are not forbidden",
        "adjust_logits.cu",
        "i < forbidden[1]; i += THREADS",
        "i < forbidden[0]; i += THREADS",
        rows(8, torch.tensor([0.0, 5.0, 5.0, 1.0]), min_tokens=3, stop_token_ids=(1, 2)),
    ),
    PlantedBug(
        "repetition makes negative logits likelier",
        "adjust_logits.cu",
        "value > 0.0f ? value / repetition : value * repetition",
        "value / repetition",
        varied,
    ),
)
