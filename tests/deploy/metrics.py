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
    """Of one expression: its series by name, the labels that it asks of them, and the values of these that it names."""

    series: frozenset[str]
    labels: frozenset[str]
    values: frozenset[tuple[str, str]]


def read_query(text: str) -> Query:
    """Raises ValueError for what is no PromQL."""
    for variable, value in GRAFANA.items():
        text = text.replace(variable, value)
    names: set[str] = set()
    labels: set[str] = set()
    values: set[tuple[str, str]] = set()

    def visit(node: object) -> None:
        match node:
            case promql_parser.VectorSelector():
                names.add(node.name)
                values.update((matcher.name, matcher.value) for matcher in node.matchers.matchers)
                labels.update(matcher.name for matcher in node.matchers.matchers)
            case promql_parser.MatrixSelector():
                visit(node.vector_selector)
            case promql_parser.AggregateExpr() if node.modifier is not None:
                labels.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(text), visit)
    return Query(frozenset(names), frozenset(labels), frozenset(values))


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
