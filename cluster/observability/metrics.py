"""The values of the metrics in one replica. Filled in a few numpy calls a report, read by the exporters.

Values are only added and set here; who wants rates or quantiles computes them elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.observability.table import METRICS, Kind, Metric

# Values kept for a listener that takes them one by one; it looks ten times a second.
_MAX_PENDING = 4096


class Distribution:
    """The values of one histogram."""

    def __init__(self, metric: Metric) -> None:
        self.counts = np.zeros(len(metric.buckets) + 1, np.int64)
        """[num_buckets + 1] values by bucket, not cumulated; the last has no upper bound."""
        self.sum = 0.0
        self.pending: list[float] = []
        """The last values, until a listener takes them."""
        self._bounds = np.array(metric.buckets)

    def add(self, values: float | Sequence[float] | npt.NDArray[np.floating]) -> None:
        """Counts one value or several."""
        array = np.atleast_1d(np.asarray(values, np.float64))
        # A bound belongs to the bucket below it: Prometheus counts "at most".
        self.counts += np.bincount(np.searchsorted(self._bounds, array), minlength=len(self.counts))
        self.sum += float(array.sum())
        self.pending += array.tolist()
        if len(self.pending) > _MAX_PENDING:
            del self.pending[:-_MAX_PENDING]


class Metrics:
    """All metrics of one replica. One thread writes."""

    def __init__(self) -> None:
        self.values: dict[Metric, dict[tuple[str, ...], float]] = {
            metric: {} if metric.labels else {(): 0.0} for metric in METRICS if metric.kind is not Kind.HISTOGRAM
        }
        """Values of counters and gauges, by those of their labels."""
        self.distributions = {metric: Distribution(metric) for metric in METRICS if metric.kind is Kind.HISTOGRAM}
        """Distributions of histograms."""

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Lets a counter grow; `labels` are the values of `metric.labels`."""
        values = self.values[metric]
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets a gauge, or a counter to what it has grown to elsewhere."""
        self.values[metric][labels] = value

    def observe(self, metric: Metric, values: float | Sequence[float] | npt.NDArray[np.floating]) -> None:
        """Counts one value or several in a histogram."""
        self.distributions[metric].add(values)

    def value(self, metric: Metric, *labels: str) -> float:
        """The value of a counter or a gauge; 0 if it was never set."""
        return self.values[metric].get(labels, 0.0)
