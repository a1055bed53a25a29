"""Every metric of a replica: its name, its meaning, and what it counts. prometheus_client stores the values.

`telemetry.py` reports events, and `ray_export.py` exports the values to Ray. The dashboard and the alerts in
`docs/monitoring` use the names. To add a metric, declare it here, next to what it counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.messages.engine import EngineStats, FinishReason, Miss
from cluster.messages.state import EngineLife, EngineState
from cluster.observability.board import StatsBoard
from cluster.observability.record import Identity, RequestRecord

CONFIG = ["version", "tensor_parallel_size", "dtype", "max_model_len", "page_size", "num_pages", "weights_version"]
"""The labels that describe the running configuration."""
# Maximum number of values that wait for Ray, which takes them one by one, ten times a second.
_MAX_PENDING = 4096


def _bounds(low: float, high: float) -> tuple[float, ...]:
    """1, 1.5, 2, 3, 5, 7 times the powers of ten from `low` to `high`. Neighbours differ by a factor of 5/3 at most."""
    found = (float(f"{step}e{power}") for power in range(-9, 9) for step in (1, 1.5, 2, 3, 5, 7))
    return tuple(bound for bound in found if low <= bound <= high)


_SECONDS, _SHORT_SECONDS, _LONG_SECONDS = _bounds(0.001, 300.0), _bounds(0.0001, 10.0), _bounds(0.001, 3000.0)
_TOKENS = tuple(float(1 << power) for power in range(18))


class Distribution(Histogram):
    """A histogram that counts many values at once: 256 values in 12 us, where `observe` takes 300 us (2 cores)."""

    def __init__(
        self, name: str, about: str, bounds: Sequence[float], *, namespace: str, registry: CollectorRegistry
    ) -> None:
        """`bounds` are the upper bounds of the buckets, ascending and above 0."""
        super().__init__(name, about, namespace=namespace, registry=registry, buckets=bounds)
        self.bounds = np.array(bounds)
        self.pending: deque[float] = deque(maxlen=_MAX_PENDING)
        """The last values that `ray_export` has not taken yet."""

    def add(self, values: float | Sequence[float] | npt.NDArray[np.number]) -> None:
        """Counts one value or several."""
        array = np.atleast_1d(np.asarray(values, np.float64))
        # A bound belongs to the bucket below it, because Prometheus counts "at most".
        counts = np.bincount(self.bounds.searchsorted(array))
        for index in counts.nonzero()[0].tolist():
            self._buckets[index].inc(int(counts[index]))
        self._sum.inc(float(array.sum()))
        self.pending.extend(array.tolist())


class Metrics(CollectorRegistry):
    """All metrics of one replica. Only one thread writes.

    Names end with the base unit. Labels have few values each: never an id, a user, or text of a request.
    """

    def __init__(self, identity: Identity, board: StatsBoard, life: EngineLife) -> None:
        """Args:
        identity: labels that every sample has in addition to its own.
        board: the engine's figures. The board must get each report before `report` is called.
        life: the engine's state.
        """
        super().__init__(auto_describe=False)
        self._common = asdict(identity)
        self.declared: list[Collector] = []
        counter = partial(Counter, namespace="lockstep", registry=self)
        gauge = partial(Gauge, namespace="lockstep", registry=self)
        histogram = partial(Distribution, namespace="lockstep", registry=self)

        self.ttft = histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", _SECONDS
        )
        self.itl = histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of one sequence, as they reach the replica.",
            _SHORT_SECONDS,
        )
        self._of_answered: Mapping[Distribution, Callable[[RequestRecord], float | None]] = {
            histogram(
                "request_time_per_output_token_seconds",
                "Mean time of a request per token after the first one.",
                _SHORT_SECONDS,
            ): lambda it: it.tpot_s,
            histogram(
                "e2e_request_latency_seconds", "Time from a request's arrival to the end of its answer.", _LONG_SECONDS
            ): lambda it: it.e2e_s,
            histogram(
                "request_queue_time_seconds",
                "Time from a request's arrival at the scheduler to its admission.",
                _SECONDS,
            ): lambda it: None if it.prefilled is None else it.prefilled.queue_s,
            histogram(
                "request_prefill_time_seconds", "Time from a request's admission to its first token.", _SECONDS
            ): lambda it: None if it.prefilled is None else it.prefilled.prefill_s,
            histogram(
                "request_decode_time_seconds",
                "Time from a request's first token to the end of its answer.",
                _LONG_SECONDS,
            ): lambda it: None if it.first_token_s is None else it.ended_s - it.first_token_s,
            histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS): lambda it: it.num_prompt_tokens,
            histogram("request_generation_tokens", "Tokens of a request's answer.", _TOKENS): lambda it: (
                it.num_generated_tokens
            ),
        }
        self._of_steps: Mapping[Distribution, Callable[[npt.NDArray[np.void]], npt.NDArray[np.number]]] = {
            histogram(
                "step_time_seconds",
                "Time of one step, from its launch or from the end of the step before, whichever is later.",
                _SHORT_SECONDS,
            ): lambda steps: steps["duration_s"],
            histogram(
                "step_gap_seconds",
                "Time between two steps while there was work: the ranks waited for the host.",
                _bounds(0.00001, 1.0),
            ): lambda steps: steps["gap_s"],
            histogram("step_tokens", "Tokens that one step computed, prompt tokens included.", _TOKENS): lambda steps: (
                steps["num_prefill_tokens"] + steps["num_decodes"]
            ),
        }
        self._prompt_tokens = counter(
            "prompt_tokens_total", "Prompt tokens of answered requests, cached ones included."
        )
        self._finished = counter(
            "requests_finished_total",
            "Sequences that ended, by reason: stop, length, abort (the client left), error.",
            ["finished_reason"],
        )
        self._aborted = counter("requests_aborted_total", "Sequences whose client left before the end.")
        self.refused = counter(
            "requests_refused_total", "Requests that got an error, by its code and HTTP status.", ["code", "status"]
        )

        totals = board.totals
        self._counted: dict[Counter, float] = {}
        pages = gauge(
            "kv_cache_pages",
            "KV pages, the same on every rank: free, cached (in the prefix cache), owned (by one sequence).",
            ["state"],
        )
        missed = counter(
            "prefix_cache_misses_total",
            "Prompt tokens that were computed although the prefix cache has or had them, by reason: no_state (of the "
            "recurrent layers, after them), no_window (in the window pool), evicted (of the last 65,536 pages), "
            "other_salt (cached under another one, or with earlier weights).",
            ["reason"],
        )
        self._of_report: Mapping[Counter | Gauge, Callable[[EngineStats], float]] = {
            counter("steps_total", "Steps of the engine."): lambda _: totals.num_steps,
            counter("prefill_tokens_total", "Prompt tokens that were computed."): lambda _: totals.num_prefill_tokens,
            counter("generation_tokens_total", "Tokens generated."): lambda _: totals.num_generated_tokens,
            counter(
                "model_flops_total",
                "FLOPs that the model needed for what was computed, all ranks together: matrix products and attention.",
            ): lambda _: totals.flops,
            counter(
                "model_read_bytes_total",
                "Bytes of weights, keys and values that the steps had to read, all ranks together.",
            ): lambda _: totals.read_bytes,
            counter(
                "prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache."
            ): lambda it: it.scheduler.total_prompt_tokens,
            counter("prefix_cache_hits_total", "Prompt tokens that the prefix cache held."): lambda it: (
                it.scheduler.total_prefix_hit_tokens
            ),
            **{missed.labels(why): partial(lambda why, it: it.scheduler.total_missed.get(why, 0), why) for why in Miss},
            counter(
                "prefix_cache_dropped_states_total",
                "States of recurrent layers that the prefix cache dropped for others.",
            ): lambda it: it.scheduler.total_dropped_states,
            counter(
                "preemptions_total", "Number of preemptions: a running request gave up its pages, to be computed again."
            ): lambda it: it.scheduler.total_preemptions,
            counter("spec_decode_num_draft_tokens_total", "Drafts that steps verified."): lambda it: (
                it.scheduler.total_drafted
            ),
            counter("spec_decode_num_accepted_tokens_total", "Drafts that became tokens."): lambda it: (
                it.scheduler.total_accepted
            ),
            counter(
                "rebuilds_total", "Number of rebuilds: failed ranks were replaced while requests waited."
            ): lambda it: it.num_rebuilds,
            gauge("num_requests_running", "Sequences that hold a row of the batch."): lambda it: (
                it.scheduler.num_running
            ),
            gauge("num_requests_waiting", "Sequences that wait for a row or for pages."): lambda it: (
                it.scheduler.num_waiting
            ),
            gauge("num_tokens_waiting", "Prompt tokens of waiting sequences."): lambda it: (
                it.scheduler.num_waiting_tokens
            ),
            gauge(
                "kv_cache_usage_ratio",
                "Share of the KV pages that running sequences hold, 0 to 1; unused cached pages count as free.",
            ): lambda _: board.kv_usage,
            pages.labels("free"): lambda it: it.scheduler.num_free_pages,
            pages.labels("cached"): lambda it: it.scheduler.num_cached_pages,
            pages.labels("owned"): lambda it: it.scheduler.num_owned_pages,
            gauge(
                "prefix_cache_hit_ratio", "Share of all prompt tokens since the start that the prefix cache held."
            ): lambda it: it.scheduler.prefix_hit_ratio,
            gauge("step_age_seconds", "Age of the oldest step in flight; 0 if none is."): lambda it: it.step_age_s,
        }
        self._heartbeat_age = gauge(
            "rank_heartbeat_age_seconds",
            "Time since a rank last took a step or waited for one. It grows while a step runs.",
            ["rank"],
        )
        gauge(
            "coordinator_report_age_seconds",
            "Time since the coordinator's last report; above two seconds, it is stuck.",
        ).set_function(lambda: board.age_s)
        states = gauge(
            "engine_state",
            "1 for what the engine is: starting, running, rebuilding (ranks are replaced: no step runs, requests "
            "wait), sleeping (the devices are free for others), draining or dead. 0 for the others.",
            ["state"],
        )
        for state in EngineState:
            states.labels(state).set_function(partial(lambda state: life.state is state, state))
        self._startup = gauge("startup_phase_seconds", "Time of each phase of the start.", ["phase"])
        gauge(
            "peak_flops_per_second",
            "FLOP/s of large matrix products that all ranks together were measured to do at the start: MFU is the rate "
            "of model_flops_total over it.",
        ).set_function(lambda: board.peak_flops)
        gauge(
            "peak_memory_bytes_per_second",
            "Bytes per second that all ranks together were measured to copy at the start, read and written: MBU is the "
            "rate of model_read_bytes_total over it.",
        ).set_function(lambda: board.peak_bandwidth)
        self._config = gauge(
            "engine_config_info",
            "1; its labels say what runs. 0 for what ran before another size or other weights.",
            CONFIG,
        )
        self._runs: dict[str, object] = {}

    def register(self, collector: Collector) -> None:
        """Registers a metric when it is declared. Raises ValueError if another metric has its name."""
        super().register(collector)
        self.declared.append(collector)

    def collect(self) -> Iterable[Family]:
        """Every metric with its samples, including the labels of the replica."""
        for family in super().collect():
            samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            family.samples = [sample._replace(labels=self._common | sample.labels) for sample in samples]
            yield family

    def started(self, phases: Mapping[str, float], config: Mapping[str, object]) -> None:
        """Handles that the engine is ready. `Telemetry.started` explains the arguments."""
        for phase, seconds in phases.items():
            self._startup.labels(phase.replace(" ", "_")).set(seconds)
        self._set_config(config)

    def report(self, stats: EngineStats, steps: npt.NDArray[np.void]) -> None:
        """Handles a report of the engine. `steps` are the report's steps, [num_steps] of STEP_DTYPE."""
        for histogram, column in self._of_steps.items():
            histogram.add(column(steps))
        for metric, read in self._of_report.items():
            if isinstance(metric, Gauge):
                metric.set(read(stats))
            elif (grown := read(stats) - self._counted.get(metric, 0.0)) > 0:
                metric.inc(grown)
                self._counted[metric] = read(stats)
        for rank, age in enumerate(stats.heartbeat_age_s):
            self._heartbeat_age.labels(rank).set(age)
        if stats.devices and self._runs:
            version = "" if stats.weights is None else stats.weights.version
            self._set_config({"tensor_parallel_size": len(stats.devices), "weights_version": version})

    def finished(self, record: RequestRecord) -> None:
        """Handles the end of a request, whether it succeeded or not."""
        for reason in record.finish_reasons:
            self._finished.labels(reason).inc()
        self._aborted.inc(record.finish_reasons.count(FinishReason.ABORT))
        if record.first_token_s is None:
            return  # the request was refused or left while it waited, so its times do not count
        self._prompt_tokens.inc(record.num_prompt_tokens)
        for histogram, read in self._of_answered.items():
            if (value := read(record)) is not None:
                histogram.add(value)

    def _set_config(self, changes: Mapping[str, object]) -> None:
        if changes.items() <= self._runs.items():
            return
        if self._runs:
            self._config.labels(**self._runs).set(0)
        self._runs |= changes
        self._config.labels(**self._runs).set(1)
