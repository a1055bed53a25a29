"""The committed dashboard and alerts ask only for what is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from cluster.observability.telemetry import Telemetry

MONITORING = Path(__file__).resolve().parents[2] / "docs" / "monitoring"


def test_every_query_of_the_dashboard_and_the_alerts_names_metrics_that_exist() -> None:
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    families = Telemetry().metrics.collect()
    exported = {
        family.name.removeprefix("lockstep_") + suffix
        for family in families
        for suffix in suffixes.get(family.type, ("",))
    }
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    [group] = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    # Above the dashboard stands where the names come from, with the prefix that they have there.
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [
        variable["query"] for variable in dashboard["templating"]["list"] if "label_values" in variable["query"]
    ]
    for query in [*queries, *(rule["expr"] for rule in group["rules"])]:
        asked = re.findall(r"(?:\$\{prefix\}|\(ray_\)\?lockstep_)([a-z0-9_]+)", query)
        assert asked, query
        assert set(asked) <= exported, query
