"""The dashboard and the alerts: in step with the table they are made from, and asking only for what is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from cluster.observability import grafana
from cluster.observability.table import METRICS, PREFIX, Kind

MONITORING = Path(__file__).resolve().parent.parent / "docs" / "monitoring"


def exported() -> set[str]:
    """Names of all series, without the prefix."""
    names = set()
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    return names


def expressions() -> list[str]:
    """Every query of the committed files, the dashboard's with its variables filled in."""
    dashboard = json.loads((MONITORING / grafana.DASHBOARD_FILE).read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    filled = [
        query.replace("${prefix}", f"ray_{PREFIX}").replace("$__rate_interval", "1m").replace("$model", ".*")
        for query in queries
    ]
    rules = yaml.safe_load((MONITORING / grafana.ALERTS_FILE).read_text())["groups"][0]["rules"]
    return [query.replace("$replica", ".*") for query in filled] + [rule["expr"] for rule in rules]


def test_the_committed_files_are_what_the_table_gives() -> None:
    for name, text in grafana.files().items():
        assert (MONITORING / name).read_text() == text, "run python -m cluster.observability.grafana docs/monitoring"


def test_every_query_names_series_that_are_exported() -> None:
    names = exported()
    for expression in expressions():
        asked = re.findall(rf"(?:ray_|\(ray_\)\?){PREFIX}([a-z0-9_]+)", expression)
        assert asked
        assert set(asked) <= names
        assert "$" not in expression
        assert all(expression.count(left) == expression.count(right) for left, right in ("()", "{}", "[]"))


def test_every_metric_but_those_of_one_value_has_its_panel() -> None:
    dashboard = (MONITORING / grafana.DASHBOARD_FILE).read_text()
    shown = {metric.name for metric in METRICS if metric.name in dashboard}
    # What is left says the same as another panel, or is a fact and no course.
    assert {metric.name for metric in METRICS} - shown == {
        "requests_aborted_total",
        "prefix_cache_hit_ratio",
        "engine_config_info",
    }


def test_panels_do_not_overlap_and_fill_their_rows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in grafana.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells)
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("name", [grafana.DASHBOARD_FILE, grafana.ALERTS_FILE])
def test_the_files_hold_nothing_of_a_machine(name: str) -> None:
    text = (MONITORING / name).read_text()
    assert not re.search(r"/home/|/tmp/|\d+\.\d+\.\d+\.\d+|localhost", text)
