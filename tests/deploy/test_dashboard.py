"""Grafana's dashboard asks for what the scheduler serves, shows all of it, and lies as it was meant to."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from tests.deploy.manifests import DEPLOY, values_of
from tests.deploy.metrics import read_query, served_series

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


@pytest.mark.parametrize("expression", QUERIES)
def test_a_query_asks_for_series_and_labels_that_there_are(expression: str) -> None:
    served, query = served_series(), read_query(expression)
    assert query.series
    assert query.series <= set(served)
    assert query.labels <= set().union(*(served[name] for name in query.series))
    assert "instance" in query.labels  # that of the schedulers chosen


def test_legends_name_labels_that_their_query_keeps() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= read_query(target["expr"]).labels | {"executor", "instance"}, target


def test_every_metric_is_shown() -> None:
    shown = {name for query in QUERIES for name in read_query(query).series}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served_series() if name.startswith("octavo_")}
    assert {name for name in families if not any(each.startswith(name) for each in shown)} == set()


def test_variables_are_defined() -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in DASHBOARD["templating"]["list"]}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    covered = [
        (x, y)
        for grid in values_of(PANELS, "gridPos")
        for x, y in itertools.product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"]))
    ]
    assert len(set(covered)) == len(covered)
    assert all(x < 24 for x, _ in covered)


@pytest.mark.parametrize("wrong", ["sum(rate(octavo_requests_total[1m])", "rate(octavo_requests_total)"])
def test_what_is_no_query_would_be_found(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_query(wrong)
