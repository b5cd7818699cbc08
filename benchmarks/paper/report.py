"""The report as Markdown: what the paper says, what came out here, and why they differ where they do."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.paper import latency, pictures
from benchmarks.paper.contiguous import RULES, Use
from benchmarks.paper.figures import BLOCK_SIZE, BUDGETS, NUM_SLOTS, Figures, Memory
from benchmarks.paper.lengths import ALPACA, LONGEST, SHAREGPT, SPREAD
from benchmarks.paper.recompute import NUM_TOKENS, Cost

PAPER_USEFUL = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "paged": 96.3}  # %, Fig. 2
PAPER_REQUESTS = {  # Fig. 13
    "ShareGPT": {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "paged": 30.42},
    "Alpaca": {"Orca (Max)": 7.00, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "paged": 132.44},
}
PAPER_SAVED = {  # %, section 6.3, over widths 2 to 6
    ("ShareGPT", "parallel"): (16.2, 30.5),
    ("ShareGPT", "beams"): (44.3, 66.3),
    ("Alpaca", "parallel"): (6.1, 9.8),
    ("Alpaca", "beams"): (37.6, 55.2),
}


def render(figures: Figures, costs: Sequence[Cost], command: str, folder: str) -> str:
    """`folder` is where the pictures lie, seen from the report."""
    parts = [
        _head(command),
        _useful(figures, folder),
        _requests(figures),
        _spreads(figures),
        _sharing(figures, folder),
        _block_sizes(figures, folder),
        _recompute(costs, folder),
        _chunking(figures, folder),
        _caching(figures),
        _left_out(),
    ]
    return "\n\n".join(map(_filled, "\n\n".join(parts).split("\n\n"))) + "\n"


def _head(command: str) -> str:
    return f"""\
# The PagedAttention paper's claims, tried on Octavo

Written by `{command}`; do not edit. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), is "the paper".

Paged figures come from the real `scheduler.core.Scheduler`; a fake executor answers its plans, so no model is computed
and time is counted in steps. The contiguous baselines are small allocators written for this report. The paper's traces
are not at hand: lengths are drawn from log-normal distributions with the paper's means ({SHAREGPT.prompt:g} prompt and
{SHAREGPT.output:g} output tokens for ShareGPT, {ALPACA.prompt:g} and {ALPACA.output:g} for Alpaca), cut at {LONGEST}
tokens each, standard deviation of the logarithm {SPREAD:g}. Memory is {NUM_SLOTS:,} slots of one token, what OPT-13B
leaves on an A100 with 40 GB (the paper's Table 1); blocks are of {BLOCK_SIZE} tokens.

One thing differs throughout: the paper sends requests at a fixed rate and averages over an hour, here the queue is
never empty, so memory alone decides how many requests run."""


def _useful(figures: Figures, folder: str) -> str:
    rows = []
    found = figures.memory["ShareGPT"]
    for name in RULES:
        buddy, first = found.buddy[name], found.first_fit[name]
        rows.append((name, f"{PAPER_USEFUL[name]} %", _percent(buddy.useful), *_rest(buddy), _percent(first.useful)))
    paged = found.paged
    rows.append(
        (
            "paged, of the blocks that sequences hold",
            f"{PAPER_USEFUL['paged']} %",
            _percent(paged.useful_of_held),
            "0 %",
            _percent(1 - paged.useful_of_held),
            "-",
            "-",
        )
    )
    rows.append(("paged, of all memory", "", _percent(paged.useful), "", "", _percent(1 - paged.useful), "-"))
    heads = (
        "",
        "paper, useful",
        "here, useful",
        "reserved and filled later",
        "reserved, never filled",
        "outside",
        "useful, first fit",
    )
    return f"""\
## Useful share of K/V memory (Fig. 2)

ShareGPT lengths. "Useful" is what holds K/V now. The baselines' pieces lie in a buddy allocator, as the paper supposes
of Orca; the last column has them first fit.

{_table(heads, rows)}

![Useful share and requests at once]({folder}/{pictures.MEMORY})

- Max depends on no allocator: seven reservations of 2,048 slots fit, and the rest is arithmetic on lengths. The spread
  of {SPREAD:g} was chosen because it brings this row nearest to the paper's.
- A buddy allocator rounds every piece up to a power of two, which is most of what Oracle loses here; first fit would
  have spared it that. The paper supposes the former.
- Paged: what is lost in blocks that sequences hold is the last block of each, half empty on average. Of all memory, the
  core leaves a part free on purpose: it admits a request only with one more block for each running one at hand, so that
  what it computes is not thrown away at once. The price of reserving nothing is that memory runs out at times:
  {paged.preemptions} preemptions, {_percent(paged.recomputed)} of all computed tokens computed again. That is with a
  queue that is never empty and requests whose lengths nobody knows."""


def _requests(figures: Figures) -> str:
    rows = []
    for trace, found in figures.memory.items():
        for name in (*RULES, "paged"):
            value = found.paged.requests if name == "paged" else found.buddy[name].requests
            first = "-" if name == "paged" else f"{found.first_fit[name].requests:.1f}"
            rows.append((trace, name, f"{PAPER_REQUESTS[trace][name]:.2f}", f"{value:.1f}", first))
    share, alpaca = figures.memory["ShareGPT"], figures.memory["Alpaca"]
    return f"""\
## Requests at once in equal memory (Fig. 13)

{_table(("lengths", "", "paper", "here", "first fit"), rows)}

ShareGPT: paged runs {_ratio(share, "Orca (Oracle)")} times the requests of Oracle (paper: 2.2) and
{_ratio(share, "Orca (Max)")} times those of Max (paper: 4.3); against Oracle first fit it is
{share.paged.requests / share.first_fit["Orca (Oracle)"].requests:.1f}. Alpaca: {_ratio(alpaca, "Orca (Oracle)")} and
{_ratio(alpaca, "Orca (Max)")} times (paper: 1.8 and 18.9). With Alpaca's short requests
{_percent(alpaca.paged.requests * BLOCK_SIZE / NUM_SLOTS)} of the memory is what the core keeps free, one block for each
running request."""


def _spreads(figures: Figures) -> str:
    rows = [
        (
            f"{spread:g}",
            *(_percent(found.buddy[name].useful) for name in RULES),
            _percent(found.paged.useful_of_held),
            _ratio(found, "Orca (Oracle)"),
            _ratio(found, "Orca (Max)"),
        )
        for spread, found in figures.spreads.items()
    ]
    paper = ("paper", *(f"{PAPER_USEFUL[name]} %" for name in RULES), f"{PAPER_USEFUL['paged']} %", "2.2", "4.3")
    return f"""\
### How much of that is the choice of a distribution

ShareGPT's means with other spreads, buddy allocator:

{_table(("spread", "Max", "Pow2", "Oracle", "paged, of held", "paged / Oracle", "paged / Max"), [*rows, paper])}"""


def _sharing(figures: Figures, folder: str) -> str:
    rows = []
    for kind, found in (("parallel", figures.parallel), ("beams", figures.beams)):
        for trace, by_width in found.items():
            low, high = PAPER_SAVED[trace, kind]
            rows.append(
                (
                    "outputs drawn" if kind == "parallel" else "beams",
                    trace,
                    f"{low} to {high} %",
                    *(_percent(use.saved) for use in by_width.values()),
                )
            )
    return f"""\
## Memory saved by sharing (Fig. 15)

Blocks that sequences would hold without sharing, less those that they hold, over the former; memory is ample here, so
that nobody is preempted.

{_table(("", "lengths", "paper, 2 to 6", "2", "4", "6"), rows)}

![Memory saved by sharing]({folder}/{pictures.SHARING})

Outputs drawn share their prompt, so the figure follows from the lengths. What beams share depends on how long their
common beginning is, and so on the model's scores. Those are made up here: the best token's probability has a Beta(2, 1)
distribution, each further one half of the rest, alike for all hypotheses. Wide beams share more than in the paper under
that rule."""


def _block_sizes(figures: Figures, folder: str) -> str:
    rows = [
        (
            str(tokens),
            _percent(one.sharegpt.useful_of_held),
            f"{one.sharegpt.requests:.1f}",
            _percent(one.sharegpt.recomputed),
            _percent(one.alpaca.useful_of_held),
            f"{one.alpaca.requests:.1f}",
            _percent(one.found),
        )
        for tokens, one in figures.block_sizes.items()
    ]
    heads = (
        "block size",
        "ShareGPT: useful of held",
        "requests",
        "recomputed",
        "Alpaca: useful of held",
        "requests",
        "shared prompts found",
    )
    return f"""\
## Block size (Fig. 18b)

The paper measures latency at a given rate: best from 16 to 128 on ShareGPT, 16 and 32 on Alpaca, worse above. Here is
what lies behind it on the side of memory; what small blocks cost the kernels is not in it. The last column: groups of
requests with a system prompt of 64 to 320 tokens, and the share of it that the prefix cache finds, whole blocks only.

{_table(heads, rows)}

![Block size]({folder}/{pictures.BLOCKS})

Below 16 little is gained; from 64 on Alpaca's short requests leave much of their blocks empty, and few run, as the
paper says. Very small blocks let more requests in than will fit to their ends, which shows as recomputation: the block
that the core keeps free for each running request is then no reserve to speak of."""


def _recompute(costs: Sequence[Cost], folder: str) -> str:
    head = "## Recomputation against swapping (Fig. 19)"
    if not costs:
        return f"{head}\n\nNot measured in this run (`--no-measure`)."
    rows = [(str(c.block_size), f"{c.swap_each:.1f}", f"{c.swap_layers:.1f}", f"{c.recompute:.0f}") for c in costs]
    at = next((c for c in costs if c.block_size == BLOCK_SIZE), costs[0])
    return f"""\
{head}

Measured, on the CPU backend of the machine that wrote this, on one core, with other work beside it: times differ from
run to run, the least of some is told. Milliseconds to move the K/V of {NUM_TOKENS} tokens out to a buffer and back
(SmolLM2-135M's shape, bfloat16), and to compute it again. Octavo does not swap; it recomputes.

{_table(("block size", "swap, block by block", "swap, a layer at once", "recompute"), rows)}

![Recomputation against swapping]({folder}/{pictures.RECOMPUTE})

As in the paper, small blocks make swapping dear (many small copies) and leave recomputation as it is. Unlike there,
where the two come close at 16 to 64, copying wins by a factor of {at.recompute / at.swap_each:.0f} at {BLOCK_SIZE}: a
CPU's cache lies in host memory already, so no bus is in the way, and one core computes slowly. It says little of GPUs,
where recomputation also spares the host memory; and nothing swapped would survive the executor, whereas the tokens
do."""


def _chunking(figures: Figures, folder: str) -> str:
    rows = [
        (str(budget), f"{one.itl_p50:.1f}", f"{one.itl_p99:.1f}", f"{one.long_ttft_p50:.0f}")
        for budget, one in figures.chunking.items()
    ]
    whole, some = figures.chunking[BUDGETS[-1]], figures.chunking[256]
    return f"""\
## Chunked prefill and ITL (simulated)

Not in the paper, which runs prompts whole. Simulated: a step takes {latency.STEP_MS:g} ms and {latency.TOKEN_MS:g} ms
for each of its tokens. Short chats and, one in eight, prompts of {latency.LONG:,} tokens come at random times, 12.5 a
second.

{_table(("tokens of a step", "ITL p50, ms", "ITL p99, ms", "TTFT p50 of long prompts, ms"), rows)}

![Latency, simulated]({folder}/{pictures.LATENCY})

Steps of 256 tokens bring the ITL p99 of the short requests to {some.itl_p99 / whole.itl_p99:.2f} of what it is when
prompts run whole, for a TTFT of the long ones {some.long_ttft_p50 / whole.long_ttft_p50:.2f} times as long. Steps of
64 spend so much on their fixed cost that long prompts pile up."""


def _caching(figures: Figures) -> str:
    off, on = figures.caching[False], figures.caching[True]
    rows = [(name, f"{one.ttft_p50:.0f}", f"{one.ttft_p99:.0f}") for name, one in (("off", off), ("on", on))]
    return f"""\
## Prefix caching and TTFT (simulated)

The same clock, steps of 512 tokens. Five requests a second, each with one of eight system prompts of {latency.PREFIX:,}
tokens and {latency.TAIL} tokens of its own.

{_table(("prefix caching", "TTFT p50, ms", "TTFT p99, ms"), rows)}

With the cache, the median TTFT is {on.ttft_p50 / off.ttft_p50:.2f} of that without; the p99 with it are the requests
that meet a prompt first. (The paper's own figure on shared prefixes, Fig. 16, is throughput.)"""


def _left_out() -> str:
    return """\
## What is not here

Throughput (the paper's 2 to 4 times, Fig. 12, 14, 16 and 17): it needs the baselines to drive a real executor with
their own admission, and is left out. Kernel overhead (Fig. 18a): `docs/kernels.md` has what is known of the kernels."""


def _filled(paragraph: str) -> str:
    """Prose in lines of one width, whatever was put into it; headings, tables and pictures as they are."""
    if paragraph[0] in "#|!":
        return paragraph
    items = paragraph.split("\n- ")
    indent = "  " if paragraph.startswith("- ") else ""
    lines = [items[0], *(f"- {item}" for item in items[1:])]
    return "\n".join(
        textwrap.fill(
            " ".join(line.split()), 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    )


def _rest(use: Use) -> tuple[str, str, str]:
    return _percent(use.coming), _percent(use.never), _percent(use.outside)


def _ratio(found: Memory, name: str) -> str:
    return f"{found.paged.requests / found.buddy[name].requests:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
