"""The metrics as Ray's: on every node's metrics port, with the labels of the replica, for Ray's own Prometheus.

A value costs Ray's recorder 4 us (measured, 2 cores), and a histogram takes them one by one. So it gets them in small
portions, and of very frequent ones a random part: its quantiles hold, its counts are of that part.
"""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve import metrics as ray_metrics

from cluster.observability.metrics import Metrics
from cluster.observability.table import METRICS, Kind, Metric

_VALUES_INTERVAL_S = 1.0
_MAX_VALUES_AT_ONCE = 20


class RayExport:
    """Hands what has changed to Ray. To be made in a Serve replica, which gives the other labels."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        # Any: instruments of three classes without a common one.
        self._instruments: dict[Metric, Any] = {metric: self._make(metric) for metric in METRICS}
        self._exported: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._values_at = 0.0

    def flush(self) -> None:
        """Takes what came since the last call; to be called some ten times a second."""
        for metric, distribution in self._metrics.distributions.items():
            values, distribution.pending = distribution.pending, []
            if len(values) > _MAX_VALUES_AT_ONCE:
                values = random.sample(values, _MAX_VALUES_AT_ONCE)
            for value in values:
                self._instruments[metric].observe(value)
        now = time.monotonic()
        if now - self._values_at >= _VALUES_INTERVAL_S:
            self._values_at = now
            for metric, by_label in self._metrics.values.items():
                for labels, value in by_label.items():
                    self._export(metric, labels, value)

    def _export(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        tags = dict(zip(metric.labels, labels, strict=True))
        if metric.kind is Kind.GAUGE:
            self._instruments[metric].set(value, tags=tags)
            return
        grown = value - self._exported.get((metric, labels), 0.0)
        if grown > 0:
            self._exported[metric, labels] = value
            self._instruments[metric].inc(grown, tags=tags)

    def _make(self, metric: Metric) -> Any:
        made: Any
        tag_keys: Any = ("model_name", *metric.labels)  # Ray's annotation says a tuple of one
        if metric.kind is Kind.HISTOGRAM:
            made = ray_metrics.Histogram(
                metric.full_name, metric.help, boundaries=list(metric.buckets), tag_keys=tag_keys
            )
        else:
            make = ray_metrics.Counter if metric.kind is Kind.COUNTER else ray_metrics.Gauge
            made = make(metric.full_name, metric.help, tag_keys=tag_keys)
        made.set_default_tags({"model_name": self._model_name})
        return made
