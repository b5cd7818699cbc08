"""How a run is told: a table for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from octavo.bench.measures import Objective, Percentiles, Summary
from octavo.bench.pool import PoolUse


@dataclass(frozen=True, slots=True)
class Setting:
    """What was run where."""

    server: str
    model: str
    workload: str
    pace: str
    seed: int


def as_json(setting: Setting, summary: Summary, pool: PoolUse, objective: Objective | None) -> dict[str, object]:
    return {
        **asdict(setting),
        **asdict(summary),
        "num_errors": summary.num_errors,
        "objective": None if objective is None else asdict(objective),
        "kv": asdict(pool),
    }


def as_lines(setting: Setting, summary: Summary, pool: PoolUse, objective: Objective | None) -> list[str]:
    rows: list[tuple[str, str]] = [
        ("server", f"{setting.server}, {setting.model}"),
        ("workload", f"{setting.workload}, {setting.pace}, seed {setting.seed}"),
        ("time", f"{summary.seconds:.2f} s"),
        ("requests", _requests(summary)),
        ("output tokens/s", f"{summary.output_tokens_per_second:.1f}"),
        ("total tokens/s", f"{summary.total_tokens_per_second:.1f} (prompts and outputs)"),
    ]
    lines = _aligned(rows)
    lines += ["", *_latencies(summary), ""]
    rows = [
        ("KV blocks in use", _used(pool)),
        ("KV waste", "not known here" if pool.waste is None else f"at most {pool.waste:.1%} of the blocks in use"),
        ("prefix hit rate", "-" if pool.hit_rate is None else f"{pool.hit_rate:.1%} of prompt tokens"),
        ("preemptions", str(pool.num_preemptions)),
    ]
    if summary.goodput is not None and objective is not None:
        good = summary.goodput
        rows.append(("goodput", f"{good.requests_per_second:.2f} requests/s, {good.share:.0%} {_told(objective)}"))
    lines += _aligned(rows)
    lines += [f"error, {count} times: {text}" for text, count in summary.errors.items()]
    return lines


def _requests(summary: Summary) -> str:
    parts = [f"{summary.num_done} done ({summary.requests_per_second:.2f}/s)", f"{summary.num_errors} failed"]
    return ", ".join([*parts, f"{summary.num_unfinished} cut off"] if summary.num_unfinished else parts)


def _latencies(summary: Summary) -> list[str]:
    def cells(found: Percentiles | None) -> tuple[str, ...]:
        if found is None:
            return ("-",) * 4
        return tuple(f"{value:.1f}" for value in (found.p50, found.p90, found.p99, found.mean))

    rows = [
        ("ms", "p50", "p90", "p99", "mean"),
        ("TTFT", *cells(summary.ttft_ms)),
        ("TPOT", *cells(summary.tpot_ms)),
        ("ITL", *cells(summary.itl_ms)),
    ]
    return [f"{row[0]:<16}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]


def _used(pool: PoolUse) -> str:
    if pool.mean_used is None or pool.peak_used is None:
        return "-"
    return f"{pool.mean_used:.1%} on average, {pool.peak_used:.1%} at most"


def _told(objective: Objective) -> str:
    bounds = [("TTFT", objective.ttft_ms), ("every ITL", objective.itl_ms)]
    return "with " + " and ".join(f"{name} ≤ {value:g} ms" for name, value in bounds if value is not None)


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:<17} {value}" for name, value in rows]
