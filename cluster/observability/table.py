"""Every metric: its name, what it means, and its buckets. Data only.

The replica fills them (`metrics.py`, `telemetry.py`), and Prometheus and Ray get them (`prometheus.py`,
`ray_export.py`); the dashboard and the alerts in `docs/monitoring` ask for them. Names are given without the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

PREFIX = "lockstep_"


class Kind(StrEnum):
    """The kind of a metric's value."""

    COUNTER = "counter"
    """Only grows; its name ends in `_total`."""
    GAUGE = "gauge"
    """The value of this moment."""
    HISTOGRAM = "histogram"
    """How many values fell below each of its buckets' bounds, and their sum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric. All carry the labels `model_name`, `application`, `deployment` and `replica`."""

    name: str
    """The name without the prefix; values are in base units, which it names."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """The metric's own labels, of few values each: never an id, a user, or text of a request."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, all above 0; one without a bound follows."""

    @property
    def full_name(self) -> str:
        """The name with its prefix."""
        return PREFIX + self.name


def _bounds(low: float, high: float) -> tuple[float, ...]:
    """1, 1.5, 2, 3, 5, 7 times the powers of ten from `low` to `high`: no two further apart than a factor of 5/3."""
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    bounds: list[float] = []
    power = low
    while power <= high:
        bounds += [float(f"{power * step:.3g}") for step in steps if power * step <= high * 1.0001]
        power *= 10
    return tuple(bounds)


def _histogram(name: str, about: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, help=about, buckets=buckets)


def _plain(kind: Kind, name: str, about: str, *labels: str) -> Metric:
    return Metric(name=name, kind=kind, help=about, labels=labels)


_counter, _gauge = partial(_plain, Kind.COUNTER), partial(_plain, Kind.GAUGE)
_SECONDS = _bounds(0.001, 300.0)
_SHORT_SECONDS = _bounds(0.0001, 10.0)
_TOKENS = tuple(float(1 << power) for power in range(18))

TTFT = _histogram("time_to_first_token_seconds", "From a request's arrival to the first token of its answer.", _SECONDS)
ITL = _histogram(
    "inter_token_latency_seconds", "Between two tokens of one sequence, as they reach the replica.", _SHORT_SECONDS
)
TPOT = _histogram(
    "request_time_per_output_token_seconds",
    "Of one request: time after its first token, per token after the first.",
    _SHORT_SECONDS,
)
E2E = _histogram(
    "e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", _bounds(0.001, 3000.0)
)
QUEUE_TIME = _histogram(
    "request_queue_time_seconds", "From a request's arrival at the scheduler to its admission.", _SECONDS
)
PREFILL_TIME = _histogram("request_prefill_time_seconds", "From a request's admission to its first token.", _SECONDS)
DECODE_TIME = _histogram(
    "request_decode_time_seconds", "From a request's first token to the end of its answer.", _bounds(0.001, 3000.0)
)
REQUEST_PROMPT_TOKENS = _histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
REQUEST_GENERATION_TOKENS = _histogram("request_generation_tokens", "Tokens of a request's answer.", _TOKENS)
STEP_TIME = _histogram(
    "step_time_seconds", "One step of the engine, from the end of the one before it or from its launch.", _SHORT_SECONDS
)
STEP_GAP = _histogram(
    "step_gap_seconds",
    "Between two steps, though there was work: time in which the ranks waited for the host.",
    _bounds(0.00001, 1.0),
)
STEP_TOKENS = _histogram("step_tokens", "Tokens that one step computed, prompt tokens included.", _TOKENS)

STEPS = _counter("steps_total", "Steps of the engine.")
PROMPT_TOKENS = _counter("prompt_tokens_total", "Prompt tokens of answered requests, cached ones included.")
PREFILL_TOKENS = _counter("prefill_tokens_total", "Prompt tokens that were computed.")
GENERATION_TOKENS = _counter("generation_tokens_total", "Tokens generated.")
PREFIX_QUERIES = _counter("prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache.")
PREFIX_HITS = _counter("prefix_cache_hits_total", "Prompt tokens that the prefix cache held.")
PREEMPTIONS = _counter("preemptions_total", "Times that a running request gave up its pages and began again.")
DRAFT_TOKENS = _counter("spec_decode_num_draft_tokens_total", "Drafts of tokens that steps verified.")
ACCEPTED_TOKENS = _counter("spec_decode_num_accepted_tokens_total", "Drafts that became tokens.")
REBUILDS = _counter(
    "rebuilds_total", "Times that ranks which died or stopped were replaced while their requests waited."
)
MODEL_FLOPS = _counter(
    "model_flops_total",
    "FLOPs that the model needed for what was computed, all ranks together: matrix products and attention.",
)
READ_BYTES = _counter(
    "model_read_bytes_total", "Bytes of weights, keys and values that the steps had to read, all ranks together."
)
FINISHED = _counter(
    "requests_finished_total",
    "Sequences that ended, by reason: stop, length, abort (the client left), error.",
    "finished_reason",
)
ABORTED = _counter("requests_aborted_total", "Sequences whose client left before the end.")
REFUSED = _counter(
    "requests_refused_total", "Requests that got an error, by its code and HTTP status.", "code", "status"
)

RUNNING = _gauge("num_requests_running", "Sequences that hold a row of the batch.")
WAITING = _gauge("num_requests_waiting", "Sequences that wait for a row or for pages.")
WAITING_TOKENS = _gauge("num_tokens_waiting", "Prompt tokens of waiting sequences.")
KV_USAGE = _gauge(
    "kv_cache_usage_ratio",
    "Share of the KV pages that running sequences hold, 0 to 1; unused cached pages count as free.",
)
KV_PAGES = _gauge(
    "kv_cache_pages",
    "KV pages, the same on every rank: free, cached (in the prefix cache), owned (by one sequence).",
    "state",
)
PREFIX_HIT_RATIO = _gauge(
    "prefix_cache_hit_ratio", "Share of all prompt tokens since the start that the prefix cache held."
)
HEARTBEAT_AGE = _gauge(
    "rank_heartbeat_age_seconds", "Since a rank last took or awaited a step. It grows while a step runs.", "rank"
)
STATE = _gauge(
    "engine_state",
    "1 for what the engine is: starting, running, rebuilding (ranks are replaced: no step runs, requests wait), "
    "sleeping (the devices are free for others), draining or dead. 0 for the others.",
    "state",
)
STEP_AGE = _gauge("step_age_seconds", "Age of the oldest step in flight; 0 if none is.")
REPORT_AGE = _gauge(
    "coordinator_report_age_seconds", "Since the coordinator last reported; above two seconds it is stuck."
)
STARTUP = _gauge("startup_phase_seconds", "What each phase of the start took.", "phase")
PEAK_FLOPS = _gauge(
    "peak_flops_per_second",
    "FLOP/s of large matrix products that all ranks together were measured to do at the start: MFU is the rate of "
    "model_flops_total over it.",
)
PEAK_BANDWIDTH = _gauge(
    "peak_memory_bytes_per_second",
    "Bytes per second that all ranks together were measured to copy at the start, read and written: MBU is the "
    "rate of model_read_bytes_total over it.",
)
CONFIG = _gauge(
    "engine_config_info",
    "1; its labels say what runs. 0 for what ran before another size or other weights.",
    "version",
    "tensor_parallel_size",
    "dtype",
    "max_model_len",
    "page_size",
    "num_pages",
    "weights_version",
)

METRICS: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
"""All of them, in the order above."""
