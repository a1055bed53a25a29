"""Exports the metrics to Ray, for each node's metrics port, with the labels of the replica, for Ray's own Prometheus.

Ray's recorder takes 4 us for a value (measured, 2 cores), and a histogram takes values one by one. So it gets small
portions, and of very frequent values only a random sample. The sample's quantiles are right, but its counts are lower.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample
from ray.serve import metrics as ray_metrics

from cluster.observability.metrics import Distribution, Metrics

_VALUES_INTERVAL_S = 1.0
_MAX_VALUES_AT_ONCE = 20


class RayExport:
    """Exports changed values to Ray. Must be created in a Serve replica, where Ray Serve adds the replica's labels."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._instruments: dict[str, Any] = {}  # Any, because the three classes have no common base
        self._exported: dict[tuple[str, ...], float] = {}
        self._values_at = 0.0

    def flush(self) -> None:
        """Exports the values since the last call. Call this about ten times a second."""
        now = time.monotonic()
        if is_due := now - self._values_at >= _VALUES_INTERVAL_S:
            self._values_at = now
        for metric in self._metrics.declared:
            if isinstance(metric, Distribution):
                [family] = metric.describe()
                instrument = self._instrument(family, family.name, (), boundaries=metric.bounds.tolist())
                for value in random.sample(metric.pending, min(len(metric.pending), _MAX_VALUES_AT_ONCE)):
                    instrument.observe(value)
                metric.pending.clear()
            elif is_due:
                [family] = metric.collect()
                for sample in family.samples:
                    self._export(family, sample)

    def _export(self, family: Family, sample: Sample) -> None:
        if family.type == "gauge":
            self._instrument(family, sample.name, sample.labels).set(sample.value, tags=sample.labels)
        elif sample.name.endswith("_total"):  # prometheus_client also returns the time when the counter was made
            key = (sample.name, *sample.labels.values())
            grown = sample.value - self._exported.get(key, 0.0)
            if grown > 0:
                self._exported[key] = sample.value
                self._instrument(family, sample.name, sample.labels).inc(grown, tags=sample.labels)

    def _instrument(self, family: Family, name: str, labels: Iterable[str], **more: Any) -> Any:
        """Ray's metric with this name. It is created for the first sample, which determines its labels."""
        if name not in self._instruments:
            kinds = {"counter": ray_metrics.Counter, "gauge": ray_metrics.Gauge, "histogram": ray_metrics.Histogram}
            made: Any = kinds[family.type](name, family.documentation, tag_keys=("model_name", *labels), **more)
            made.set_default_tags({"model_name": self._model_name})
            self._instruments[name] = made
        return self._instruments[name]
