"""`GET /metrics`: this replica's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.observability.metrics import Metrics
from cluster.observability.table import Kind


def exposition(metrics: Metrics, labels: dict[str, str]) -> bytes:
    """The text that Prometheus scrapes; every sample has `labels`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics, labels))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, metrics: Metrics, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._names = tuple(labels)
        self._common = tuple(labels.values())

    def collect(self) -> Iterable[Family]:
        for metric, values in self._metrics.values.items():
            make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = make(metric.full_name, metric.help, labels=(*self._names, *metric.labels))
            for labels, value in values.items():
                family.add_metric((*self._common, *labels), value)
            yield family
        for metric, distribution in self._metrics.distributions.items():
            histogram = HistogramMetricFamily(metric.full_name, metric.help, labels=self._names)
            bounds = [*map(str, metric.buckets), "+Inf"]
            cumulated = distribution.counts.cumsum().tolist()
            histogram.add_metric(self._common, list(zip(bounds, cumulated, strict=True)), distribution.sum)
            yield histogram
