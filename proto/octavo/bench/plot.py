"""A picture of a run: tokens a second, the cache in use, and how TTFT and ITL are spread.

matplotlib is imported when a picture is wanted and not before; it is no part of what a client needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from octavo.bench.measures import Record
from octavo.bench.pool import Sample

_NUM_BINS = 60


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(
    path: Path, title: str, records: Sequence[Record], samples: Sequence[Sample], began: float, end: float
) -> None:
    """Writes the picture; the ending of the name says in which form. Raises OSError or ValueError where that fails."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title)
    (tokens, pool), (ttft, itl) = figure.subplots(2, 2)
    edges, rates = tokens_per_second(records, began, end)
    tokens.stairs(rates, edges, fill=True)
    tokens.set(xlabel="s", ylabel="output tokens/s")
    pool.plot([s.time for s in samples], [100 * s.used for s in samples])
    pool.set(xlabel="s", ylabel="% of KV blocks in use", ylim=(0, 105))
    firsts = sorted(record.ttft * 1000 for record in records if record.ttft is not None)
    gaps = sorted(gap * 1000 for record in records for gap in record.gaps)
    for axes, name, values in ((ttft, "TTFT", firsts), (itl, "ITL", gaps)):
        axes.plot(values, [(index + 1) / len(values) for index in range(len(values))])
        axes.set(xlabel=f"{name}, ms", ylabel="share of them below", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def tokens_per_second(records: Sequence[Record], began: float, end: float) -> tuple[list[float], list[float]]:
    """(edges of the bins in seconds since the beginning, one more than bins; tokens a second in each)."""
    width = max(end - began, 1e-9) / _NUM_BINS
    counts = [0] * _NUM_BINS
    for record in records:
        for when, count in record.arrivals:
            counts[min(_NUM_BINS - 1, max(0, int((when - began) / width)))] += count
    return [index * width for index in range(_NUM_BINS + 1)], [count / width for count in counts]
