"""The Grafana dashboard and the Prometheus alerts, made from the table of metrics.

    python -m cluster.observability.grafana docs/monitoring

writes `grafana.json` and `alerts.yml` there. They are committed; a test says when they are out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.observability import table
from cluster.observability.table import PREFIX, Metric

DASHBOARD_FILE = "grafana.json"
ALERTS_FILE = "alerts.yml"

# Scraped from a replica the names begin with `lockstep_`, from a node of Ray with `ray_lockstep_`.
_PREFIX_VARIABLE = "${prefix}"
_FILTER = '{model_name=~"$model",replica=~"$replica"}'
_RANGE = "[$__rate_interval]"
_WIDTH, _HEIGHT = 8, 8
_COLUMNS = 24 // _WIDTH


@dataclass(frozen=True)
class Query:
    """One line of a panel, or several that `by` tells apart."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph."""

    title: str
    unit: str
    """Grafana's name for it."""
    queries: Sequence[Query]
    about: Metric
    """What its help is taken from."""


def _quantiles(metric: Metric) -> list[Query]:
    rate = f"sum by (le) (rate({_PREFIX_VARIABLE}{metric.name}_bucket{_FILTER}{_RANGE}))"
    return [Query(f"histogram_quantile({q}, {rate})", f"p{100 * q:g}") for q in (0.5, 0.9, 0.99)]


def _rate(metric: Metric, *by: str) -> Query:
    legend = " ".join(f"{{{{{label}}}}}" for label in by) if by else metric.name.removesuffix("_total")
    return Query(f"{_sum_by(by)} (rate({_PREFIX_VARIABLE}{metric.name}{_FILTER}{_RANGE}))", legend)


def _value(metric: Metric, *by: str, aggregate: str = "sum") -> Query:
    legend = " ".join(f"{{{{{label}}}}}" for label in by) if by else metric.name
    return Query(f"{_sum_by(by, aggregate)} ({_PREFIX_VARIABLE}{metric.name}{_FILTER})", legend)


def _sum_by(labels: Sequence[str], aggregate: str = "sum") -> str:
    return f"{aggregate} by ({', '.join(labels)})" if labels else aggregate


def _share(part: Metric, whole: Metric) -> Query:
    def rate(metric: Metric) -> str:
        return f"sum(rate({_PREFIX_VARIABLE}{metric.name}{_FILTER}{_RANGE}))"

    return Query(f"{rate(part)} / {rate(whole)}", "share")


def _of_peak(amount: Metric, peak: Metric) -> list[Query]:
    """Shares of a peak, while steps ran and over all time."""
    total = f"sum by (replica) (rate({_PREFIX_VARIABLE}{amount.name}{_FILTER}{_RANGE}))"
    most = f"sum by (replica) ({_PREFIX_VARIABLE}{peak.name}{_FILTER})"
    return [
        Query(f"{total} / {most} / {_busy().expression}", "{{replica}} in steps"),
        Query(f"{total} / {most}", "{{replica}} over all time"),
    ]


def _busy() -> Query:
    """Share of the time that steps take, the rest being gaps and rest."""
    return Query(
        f"sum by (replica) (rate({_PREFIX_VARIABLE}{table.STEP_TIME.name}_sum{_FILTER}{_RANGE}))", "{{replica}}"
    )


ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel("Time to first token", "s", _quantiles(table.TTFT), table.TTFT),
        Panel("Between tokens", "s", _quantiles(table.ITL), table.ITL),
        Panel("Whole request", "s", _quantiles(table.E2E), table.E2E),
        Panel("Ended sequences", "reqps", [_rate(table.FINISHED, "finished_reason")], table.FINISHED),
        Panel("Errors", "reqps", [_rate(table.REFUSED, "status", "code")], table.REFUSED),
        Panel("Time per output token", "s", _quantiles(table.TPOT), table.TPOT),
    ],
    "Throughput": [
        Panel("Tokens generated", "tps", [_rate(table.GENERATION_TOKENS, "replica")], table.GENERATION_TOKENS),
        Panel("Prompt tokens computed", "tps", [_rate(table.PREFILL_TOKENS, "replica")], table.PREFILL_TOKENS),
        Panel("Prompt tokens of requests", "tps", [_rate(table.PROMPT_TOKENS, "replica")], table.PROMPT_TOKENS),
        Panel("Prompt length", "short", _quantiles(table.REQUEST_PROMPT_TOKENS), table.REQUEST_PROMPT_TOKENS),
        Panel("Answer length", "short", _quantiles(table.REQUEST_GENERATION_TOKENS), table.REQUEST_GENERATION_TOKENS),
        Panel("Prefix cache hits", "percentunit", [_share(table.PREFIX_HITS, table.PREFIX_QUERIES)], table.PREFIX_HITS),
    ],
    "Load": [
        Panel("Running", "short", [_value(table.RUNNING, "replica")], table.RUNNING),
        Panel("Waiting", "short", [_value(table.WAITING, "replica")], table.WAITING),
        Panel("Waiting prompt tokens", "short", [_value(table.WAITING_TOKENS, "replica")], table.WAITING_TOKENS),
        Panel("KV cache in use", "percentunit", [_value(table.KV_USAGE, "replica", aggregate="max")], table.KV_USAGE),
        Panel("KV pages", "short", [_value(table.KV_PAGES, "state")], table.KV_PAGES),
        Panel("Preemptions", "ops", [_rate(table.PREEMPTIONS, "replica")], table.PREEMPTIONS),
        Panel("Time in the queue", "s", _quantiles(table.QUEUE_TIME), table.QUEUE_TIME),
        Panel("Time of prefill", "s", _quantiles(table.PREFILL_TIME), table.PREFILL_TIME),
        Panel("Time of decode", "s", _quantiles(table.DECODE_TIME), table.DECODE_TIME),
    ],
    "Engine": [
        Panel("Step", "s", _quantiles(table.STEP_TIME), table.STEP_TIME),
        Panel("Gap between steps", "s", _quantiles(table.STEP_GAP), table.STEP_GAP),
        Panel("Tokens of a step", "short", _quantiles(table.STEP_TOKENS), table.STEP_TOKENS),
        Panel("Steps", "ops", [_rate(table.STEPS, "replica")], table.STEPS),
        Panel("Time spent in steps", "percentunit", [_busy()], table.STEP_TIME),
        Panel(
            "Memory bandwidth used (MBU)",
            "percentunit",
            _of_peak(table.READ_BYTES, table.PEAK_BANDWIDTH),
            table.READ_BYTES,
        ),
        Panel("FLOP/s used (MFU)", "percentunit", _of_peak(table.MODEL_FLOPS, table.PEAK_FLOPS), table.MODEL_FLOPS),
        Panel(
            "Ranks replaced",
            "short",
            [_value(table.REBUILDS, "replica")],
            table.REBUILDS,
        ),
        Panel("State", "short", [_value(table.STATE, "state")], table.STATE),
        Panel("Age of the step in flight", "s", [_value(table.STEP_AGE, "replica", aggregate="max")], table.STEP_AGE),
        Panel(
            "Heartbeat of each rank",
            "s",
            [_value(table.HEARTBEAT_AGE, "replica", "rank", aggregate="max")],
            table.HEARTBEAT_AGE,
        ),
        Panel(
            "Report of the coordinator",
            "s",
            [_value(table.REPORT_AGE, "replica", aggregate="max")],
            table.REPORT_AGE,
        ),
        Panel("Start, by phase", "s", [_value(table.STARTUP, "replica", "phase", aggregate="max")], table.STARTUP),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, for Grafana's import."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(row):
            place = {
                "x": index % _COLUMNS * _WIDTH,
                "y": y + index // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            }
            panels.append({"id": len(panels) + 1, "gridPos": place, **_graph(panel)})
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "title": "Lockstep",
        "uid": "lockstep",
        "tags": ["llm", "lockstep"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.expression, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def choices(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    running = f"{_PREFIX_VARIABLE}{table.RUNNING.name}"
    prefixes = (f"ray_{PREFIX}", PREFIX)
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "prefix",
            "label": "Scraped from",
            "type": "custom",
            "query": f"Ray's nodes : {prefixes[0]}, replicas' /metrics : {prefixes[1]}",
            "current": {"text": "Ray's nodes", "value": prefixes[0]},
            "options": [
                {"text": text, "value": value, "selected": value == prefixes[0]}
                for text, value in zip(("Ray's nodes", "replicas' /metrics"), prefixes, strict=True)
            ],
        },
        choices("model", "Model", f"label_values({running}, model_name)"),
        choices("replica", "Replica", f'label_values({running}{{model_name=~"$model"}}, replica)'),
    ]


# ---- alerts


@dataclass(frozen=True)
class Alert:
    """One rule of Prometheus."""

    name: str
    expression: str
    minutes: int
    """How long it must hold."""
    severity: str
    summary: str
    advice: str


def _series(metric: Metric, suffix: str = "") -> str:
    """Selects this metric, wherever it was scraped: by no one name, since it may come from both."""
    return f'{{__name__=~"(ray_)?{metric.full_name}{suffix}"}}'


_BY = "model_name, replica"

ALERTS = (
    Alert(
        "LockstepSlowFirstToken",
        f"histogram_quantile(0.99, sum by (le, model_name) (rate({_series(table.TTFT, '_bucket')}[5m]))) > 5",
        5,
        "warning",
        "One request in a hundred waits more than 5 s for its first token.",
        "Look at the queue and at the lengths of prompts; add replicas or ranks.",
    ),
    Alert(
        "LockstepQueue",
        f"min by ({_BY}) ({_series(table.WAITING)}) > 0",
        5,
        "warning",
        "Requests have waited without a break for five minutes.",
        "Raise max_replicas, or scheduler.max_num_seqs where the KV cache has room.",
    ),
    Alert(
        "LockstepKVCacheFull",
        f"max by ({_BY}) ({_series(table.KV_USAGE)}) > 0.95",
        5,
        "warning",
        "More than 95 % of the KV pages are held by running requests.",
        "Expect preemptions: more ranks, a larger kv_cache.memory_fraction, or a shorter max_model_len.",
    ),
    Alert(
        "LockstepPreemptions",
        f"sum by ({_BY}) (rate({_series(table.PREEMPTIONS)}[5m])) > 0.1",
        10,
        "warning",
        "Requests give up their pages and begin again, more than six a minute.",
        "The KV cache is too small for scheduler.max_num_seqs requests of this length.",
    ),
    Alert(
        "LockstepRefusing",
        f'sum by (model_name) (rate({_series(table.REFUSED)[:-1]},status=~"503|429"}}[5m])) > 0.1',
        5,
        "warning",
        "Requests are refused for load, more than six a minute.",
        "The queue's limits (scheduler.max_num_queued_*) or a key's quota are reached; add replicas.",
    ),
    Alert(
        "LockstepErrors",
        f'sum by (model_name) (rate({_series(table.REFUSED)[:-1]},status=~"5..",status!="503"}}[5m])) > 0',
        5,
        "critical",
        "Requests fail by the server's fault.",
        "The replica's log names each by its request id.",
    ),
    Alert(
        "LockstepCoordinatorSilent",
        f"max by ({_BY}) ({_series(table.REPORT_AGE)}) > 10",
        1,
        "critical",
        "A coordinator has not reported for ten seconds; it does at least once a second.",
        "Its process is stuck or starved of CPU.",
    ),
    Alert(
        "LockstepStepStuck",
        f"max by ({_BY}) ({_series(table.STEP_AGE)}) > 30",
        0,
        "critical",
        "A step has run for more than 30 s.",
        "A rank hangs: the coordinator's log shows where each is. Past parallel.step_timeout_s the group is replaced.",
    ),
)


def alerts() -> dict[str, Any]:
    """The rules, as Prometheus reads them."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.advice},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "lockstep", "rules": rules}]}


def files() -> dict[str, str]:
    """What `docs/monitoring` holds, by name."""
    return {
        DASHBOARD_FILE: json.dumps(dashboard(), indent=2) + "\n",
        ALERTS_FILE: "# Made by python -m cluster.observability.grafana; do not edit.\n"
        + yaml.safe_dump(alerts(), sort_keys=False, width=120),
    }


def main() -> None:
    """Writes the files into the directory that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
