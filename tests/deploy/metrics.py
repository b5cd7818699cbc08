"""Metrics that queries name, and those that the scheduler has."""

from __future__ import annotations

import re

from scheduler.metrics import Metrics

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def metrics_named(query: str) -> set[str]:
    """Names of ours in a PromQL expression, as Prometheus has them."""
    return set(re.findall(r"\boctavo_\w+", query))


def series() -> set[str]:
    """Every name under which the scheduler has a series."""
    return {f"{metric.name}{suffix}" for metric in Metrics().registry.collect() for suffix in SUFFIXES[metric.type]}
