"""What a PromQL query asks for, and what the scheduler has."""

from __future__ import annotations

from dataclasses import dataclass

import promql_parser

from scheduler.metrics import Metrics

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
GRAFANA = {"$__rate_interval": "1m", "$instance": "here"}  # variables, and something that they may stand for
SCRAPED = {"instance", "job", "namespace", "pod"}  # labels that Prometheus adds


@dataclass(frozen=True)
class Query:
    """Of one expression: each series by its name, and the labels that are asked of each."""

    series: frozenset[str]
    labels: frozenset[str]


def read_query(text: str) -> Query:
    """Raises ValueError for what is no PromQL."""
    for variable, value in GRAFANA.items():
        text = text.replace(variable, value)
    names: set[str] = set()
    labels: set[str] = set()

    def visit(node: object) -> None:
        match node:
            case promql_parser.VectorSelector():
                names.add(node.name)
                labels.update(matcher.name for matcher in node.matchers.matchers)
            case promql_parser.MatrixSelector():
                visit(node.vector_selector)
            case promql_parser.AggregateExpr() if node.modifier is not None:
                labels.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(text), visit)
    return Query(frozenset(names), frozenset(labels))


def served_series() -> dict[str, set[str]]:
    """Every series that the scheduler has, with its labels."""
    metrics = Metrics()
    found: dict[str, set[str]] = {}
    for metric in metrics.registry.collect():
        for suffix in SUFFIXES[metric.type]:
            bucket = {"le"} if suffix == "_bucket" else set()
            found[f"{metric.name}{suffix}"] = {*labels_of(metrics, metric.name), *bucket, *SCRAPED}
    return found


def labels_of(metrics: Metrics, name: str) -> tuple[str, ...]:
    """Of a metric of ours; those of the process have none."""
    for metric in vars(metrics).values():
        if getattr(metric, "_name", None) == name:
            labels: tuple[str, ...] = metric._labelnames
            return labels
    return ()
