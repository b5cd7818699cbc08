"""The report's pictures: small PNG files, the same bytes for the same figures. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.contiguous import RULES
from benchmarks.paper.figures import Figures
from benchmarks.paper.recompute import Cost

MEMORY, SHARING, BLOCKS, LATENCY, RECOMPUTE = (
    "memory.png",
    "sharing.png",
    "block_size.png",
    "latency.png",
    "recompute.png",
)


def draw(folder: Path, figures: Figures, costs: Sequence[Cost]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _memory(folder / MEMORY, figures)
    _sharing(folder / SHARING, figures)
    _block_sizes(folder / BLOCKS, figures)
    _latency(folder / LATENCY, figures)
    if costs:
        _recompute(folder / RECOMPUTE, costs)


def _axes(count: int, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(4.2 * count, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _memory(path: Path, figures: Figures) -> None:
    figure, (useful, counts) = _axes(2)
    found = figures.memory["ShareGPT"]
    names = [*RULES, "paged"]
    parts = {"holds K/V": [], "will": [], "never will": [], "outside": []}  # type: dict[str, list[float]]
    for name in RULES:
        use = found.buddy[name]
        for part, value in zip(parts.values(), (use.useful, use.coming, use.never, use.outside), strict=True):
            part.append(100 * value)
    for part, value in zip(parts.values(), (found.paged.useful, 0, 0, 1 - found.paged.useful), strict=True):
        part.append(100 * value)
    bottom = [0.0] * len(names)
    for label, values in parts.items():
        useful.bar(names, values, bottom=bottom, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    useful.set(ylabel="% of K/V memory", title="ShareGPT lengths, buddy allocator", ylim=(0, 118))
    useful.legend(ncols=4, fontsize=7, loc="upper center")
    for offset, (trace, one) in enumerate(figures.memory.items()):
        values = [*(one.buddy[name].requests for name in RULES), one.paged.requests]
        places = [index + 0.4 * offset - 0.2 for index in range(len(names))]
        counts.bar_label(counts.bar(places, values, width=0.4, label=trace), fmt="%.1f", fontsize=7)
    counts.set(ylabel="requests at once", yscale="log", title="in equal memory")
    counts.set_xticks(range(len(names)), names)
    counts.legend(fontsize=7)
    for axes in (useful, counts):
        axes.tick_params(axis="x", labelsize=7)
    _save(figure, path)


def _sharing(path: Path, figures: Figures) -> None:
    figure, panels = _axes(2)
    for axes, title, found in zip(panels, ("outputs drawn", "beams"), (figures.parallel, figures.beams), strict=True):
        for trace, by_width in found.items():
            axes.plot(list(by_width), [100 * use.saved for use in by_width.values()], "o-", label=trace)
        axes.set(xlabel=f"{title} for a request", ylabel="% of blocks saved by sharing", ylim=(0, 100))
        axes.legend()
    _save(figure, path)


def _block_sizes(path: Path, figures: Figures) -> None:
    figure, (useful, shared) = _axes(2)
    sizes = list(figures.block_sizes)
    found = list(figures.block_sizes.values())
    useful.plot(sizes, [100 * one.sharegpt.useful_of_held for one in found], "o-", label="ShareGPT")
    useful.plot(sizes, [100 * one.alpaca.useful_of_held for one in found], "o-", label="Alpaca")
    useful.set(ylabel="% of held slots in use")
    useful.legend()
    shared.plot(sizes, [100 * one.found for one in found], "o-")
    shared.set(ylabel="% of shared prompt tokens found")
    for axes in (useful, shared):
        axes.set(xlabel="tokens of a block", ylim=(0, 105))
        axes.set_xscale("log", base=2)
    _save(figure, path)


def _latency(path: Path, figures: Figures) -> None:
    figure, (chunks, cache) = _axes(2)
    budgets = list(figures.chunking)
    chunks.plot(budgets, [one.itl_p99 for one in figures.chunking.values()], "o-", label="ITL p99 of short requests")
    chunks.plot(budgets, [one.long_ttft_p50 for one in figures.chunking.values()], "o-", label="TTFT p50 of long ones")
    chunks.set(xlabel="tokens of a step, at most", ylabel="ms, simulated", yscale="log")
    chunks.set_xscale("log", base=2)
    chunks.legend(fontsize=8)
    for offset, (on, one) in enumerate(figures.caching.items()):
        bars = cache.bar(
            [index + 0.4 * offset for index in range(2)],
            [one.ttft_p50, one.ttft_p99],
            width=0.4,
            label="cached" if on else "computed",
        )
        cache.bar_label(bars, fmt="%.0f", fontsize=8)
    cache.set(ylabel="TTFT, ms, simulated", title="a shared prompt of 1,024 tokens")
    cache.set_xticks([0.2, 1.2], ["p50", "p99"])
    cache.legend(fontsize=8)
    _save(figure, path)


def _recompute(path: Path, costs: Sequence[Cost]) -> None:
    figure, (axes,) = _axes(1)
    sizes = [cost.block_size for cost in costs]
    axes.plot(sizes, [cost.swap_each for cost in costs], "o-", label="swap, block by block")
    axes.plot(sizes, [cost.swap_layers for cost in costs], "o-", label="swap, a layer at once")
    axes.plot(sizes, [cost.recompute for cost in costs], "o-", label="recompute")
    axes.set(xlabel="tokens of a block", ylabel="ms for 256 tokens", yscale="log")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    _save(figure, path)
