"""What a benchmark's records say: throughput, latencies, goodput. Pure arithmetic over times that others took.

Times are seconds of one clock. TTFT: from when a request was to be sent to its first token. ITL: between two messages
with tokens of one request, as a reader sees them. TPOT: from the first message to the last, over the tokens after the
first message. What was cut off when the run ended counts with the tokens that came, and as neither done nor failed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request. Its sender writes it; once the run is over nobody does."""

    start: float  # when it was to be sent
    num_prompt_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # messages: when, and how many tokens
    end: float | None = None  # None: it is, or was, under way
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.error is None

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0][0] - self.start if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        if len(self.arrivals) < 2:
            return None
        tokens_after_first = self.num_output_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / tokens_after_first


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to be of use (SLO), in milliseconds: its TTFT, and the longest of its gaps."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def is_met_by(self, record: Record) -> bool:
        """A request that failed, or did not end, meets none."""
        if not record.is_done or record.ttft is None:
            return False
        longest = max(record.gaps, default=0.0)
        return (self.ttft_ms is None or record.ttft * 1000 <= self.ttft_ms) and (
            self.itl_ms is None or longest * 1000 <= self.itl_ms
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met the objective: how many a second, and their share of all that ended, well or not."""

    requests_per_second: float
    share: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. A latency is None where nothing showed it."""

    seconds: float
    num_done: int
    num_unfinished: int
    errors: dict[str, int]  # what was said, and how often
    num_prompt_tokens: int  # of the requests that began to answer
    num_output_tokens: int
    num_cached_tokens: int  # of the prompts of those done
    num_preemptions: int  # of those done
    requests_per_second: float  # done
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    goodput: Goodput | None  # None: no objective was given

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())


def percentile(values: Sequence[float], share: float) -> float:
    """Of ascending values, at least one; between two neighbours, on the line that joins them."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def percentiles_ms(seconds: Iterable[float]) -> Percentiles | None:
    values = sorted(value * 1000 for value in seconds)
    if not values:
        return None
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(sum(values) / len(values), p50, p90, p99)


def summarize(records: Sequence[Record], seconds: float, objective: Objective | None = None) -> Summary:
    """Of a run that lasted so long."""
    done = [record for record in records if record.is_done]
    begun = [record for record in records if record.arrivals]
    prompt_tokens = sum(record.num_prompt_tokens for record in begun)
    output_tokens = sum(record.num_output_tokens for record in begun)
    return Summary(
        seconds=seconds,
        num_done=len(done),
        num_unfinished=sum(record.end is None for record in records),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=output_tokens,
        num_cached_tokens=sum(record.num_cached_tokens for record in done),
        num_preemptions=sum(record.num_preemptions for record in done),
        requests_per_second=_rate(len(done), seconds),
        output_tokens_per_second=_rate(output_tokens, seconds),
        total_tokens_per_second=_rate(prompt_tokens + output_tokens, seconds),
        ttft_ms=percentiles_ms(record.ttft for record in begun if record.ttft is not None),
        tpot_ms=percentiles_ms(record.tpot for record in done if record.tpot is not None),
        itl_ms=percentiles_ms(gap for record in begun for gap in record.gaps),
        goodput=None if objective is None else _goodput(records, seconds, objective),
    )


def _goodput(records: Sequence[Record], seconds: float, objective: Objective) -> Goodput:
    ended = sum(record.end is not None for record in records)
    good = sum(map(objective.is_met_by, records))
    return Goodput(_rate(good, seconds), good / ended if ended else 0.0)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
