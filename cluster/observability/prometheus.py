"""`GET /metrics`: this replica's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.observability.metrics import Distribution, Metrics
from cluster.observability.table import Kind, Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(metrics: Metrics, labels: dict[str, str], aliases: str = "none") -> bytes:
    """The text that Prometheus scrapes.

    Args:
        labels: that every sample carries.
        aliases: `vllm` or `sglang`: the figures these have come under their names too, `vllm:...`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics, labels, aliases))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, metrics: Metrics, labels: dict[str, str], aliases: str) -> None:
        self._metrics = metrics
        self._names = tuple(labels)
        self._common = tuple(labels.values())
        self._aliases = aliases

    def collect(self) -> Iterable[Family]:
        for metric, values in self._metrics.values():
            for name in metric.names(self._aliases, separator=":"):
                yield self._family(name, metric, values)
        for distribution in self._metrics.distributions():
            for name in distribution.metric.names(self._aliases, separator=":"):
                yield self._histogram(name, distribution)

    def _family(self, name: str, metric: Metric, values: dict[tuple[str, ...], float]) -> Family:
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(name, metric.help, labels=(*self._names, *metric.labels))
        for labels, value in values.items():
            family.add_metric((*self._common, *labels), value)
        return family

    def _histogram(self, name: str, distribution: Distribution) -> Family:
        family = HistogramMetricFamily(name, distribution.metric.help, labels=self._names)
        bounds = [*map(str, distribution.metric.buckets), "+Inf"]
        cumulated = distribution.counts.cumsum().tolist()
        family.add_metric(self._common, list(zip(bounds, cumulated, strict=True)), distribution.sum)
        return family
