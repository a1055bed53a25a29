"""Every metric: its name, what it means, its buckets, and what other servers call it. Data only.

The replica fills them (`metrics.py`, `telemetry.py`), and Prometheus and Ray get them (`prometheus.py`,
`ray_export.py`); the dashboard and the alerts in `docs/monitoring` ask for them. Names are given without the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

PREFIX = "lockstep_"


class Kind(StrEnum):
    """What a metric's value is."""

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
    """Without the prefix; in base units, which it names."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Its own, of few values each: never an id, a user, or text of a request."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, all above 0; one without a bound follows."""
    aliases: dict[str, str] = field(default_factory=dict)
    """`vllm`, `sglang`: the name the same figure has there, without their prefix."""

    @property
    def full_name(self) -> str:
        """With the prefix."""
        return PREFIX + self.name

    def names(self, aliases: str, *, separator: str) -> list[str]:
        """Names it is exported under: its own, and with `aliases` (`vllm`, `sglang`) the one it has there."""
        alias = self.aliases.get(aliases)
        return [self.full_name] if alias is None else [self.full_name, f"{aliases}{separator}{alias}"]


def _bounds(low: float, high: float) -> tuple[float, ...]:
    """1, 1.5, 2, 3, 5, 7 times the powers of ten from `low` to `high`: no two further apart than a factor of 5/3."""
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    bounds: list[float] = []
    power = low
    while power <= high:
        bounds += [float(f"{power * step:.3g}") for step in steps if power * step <= high * 1.0001]
        power *= 10
    return tuple(bounds)


_SECONDS = _bounds(0.001, 300.0)
_SHORT_SECONDS = _bounds(0.0001, 10.0)
_TOKENS = tuple(float(1 << power) for power in range(18))

TTFT = Metric(
    name="time_to_first_token_seconds",
    kind=Kind.HISTOGRAM,
    help="From a request's arrival to the first token of its answer.",
    buckets=_SECONDS,
    aliases={"vllm": "time_to_first_token_seconds", "sglang": "time_to_first_token_seconds"},
)
ITL = Metric(
    name="inter_token_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="Between two tokens of one sequence, as they reach the replica.",
    buckets=_SHORT_SECONDS,
    aliases={"vllm": "inter_token_latency_seconds", "sglang": "inter_token_latency_seconds"},
)
TPOT = Metric(
    name="request_time_per_output_token_seconds",
    kind=Kind.HISTOGRAM,
    help="Of one request: time after its first token, per token after the first.",
    buckets=_SHORT_SECONDS,
    aliases={"vllm": "request_time_per_output_token_seconds"},
)
E2E = Metric(
    name="e2e_request_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="From a request's arrival to the end of its answer.",
    buckets=_bounds(0.001, 3000.0),
    aliases={"vllm": "e2e_request_latency_seconds", "sglang": "e2e_request_latency_seconds"},
)
QUEUE_TIME = Metric(
    name="request_queue_time_seconds",
    kind=Kind.HISTOGRAM,
    help="From a request's arrival at the scheduler to its admission.",
    buckets=_SECONDS,
    aliases={"vllm": "request_queue_time_seconds", "sglang": "queue_time_seconds"},
)
PREFILL_TIME = Metric(
    name="request_prefill_time_seconds",
    kind=Kind.HISTOGRAM,
    help="From a request's admission to its first token.",
    buckets=_SECONDS,
    aliases={"vllm": "request_prefill_time_seconds"},
)
DECODE_TIME = Metric(
    name="request_decode_time_seconds",
    kind=Kind.HISTOGRAM,
    help="From a request's first token to the end of its answer.",
    buckets=_bounds(0.001, 3000.0),
    aliases={"vllm": "request_decode_time_seconds"},
)
REQUEST_PROMPT_TOKENS = Metric(
    name="request_prompt_tokens",
    kind=Kind.HISTOGRAM,
    help="Prompt tokens of a request.",
    buckets=_TOKENS,
    aliases={"vllm": "request_prompt_tokens", "sglang": "prompt_tokens_histogram"},
)
REQUEST_GENERATION_TOKENS = Metric(
    name="request_generation_tokens",
    kind=Kind.HISTOGRAM,
    help="Tokens of a request's answer.",
    buckets=_TOKENS,
    aliases={"vllm": "request_generation_tokens", "sglang": "generation_tokens_histogram"},
)
STEP_TIME = Metric(
    name="step_time_seconds",
    kind=Kind.HISTOGRAM,
    help="One step of the engine, from the end of the one before it or from its launch.",
    buckets=_SHORT_SECONDS,
)
STEP_GAP = Metric(
    name="step_gap_seconds",
    kind=Kind.HISTOGRAM,
    help="Between two steps, though there was work: time in which the ranks waited for the host.",
    buckets=_bounds(0.00001, 1.0),
)
STEP_TOKENS = Metric(
    name="step_tokens",
    kind=Kind.HISTOGRAM,
    help="Tokens that one step computed, prompt tokens included.",
    buckets=_TOKENS,
    aliases={"vllm": "iteration_tokens_total"},
)

STEPS = Metric(name="steps_total", kind=Kind.COUNTER, help="Steps of the engine.")
PROMPT_TOKENS = Metric(
    name="prompt_tokens_total",
    kind=Kind.COUNTER,
    help="Prompt tokens of answered requests, cached ones included.",
    aliases={"vllm": "prompt_tokens_total", "sglang": "prompt_tokens_total"},
)
PREFILL_TOKENS = Metric(name="prefill_tokens_total", kind=Kind.COUNTER, help="Prompt tokens that were computed.")
GENERATION_TOKENS = Metric(
    name="generation_tokens_total",
    kind=Kind.COUNTER,
    help="Tokens generated.",
    aliases={"vllm": "generation_tokens_total", "sglang": "generation_tokens_total"},
)
PREFIX_QUERIES = Metric(
    name="prefix_cache_queries_total",
    kind=Kind.COUNTER,
    help="Prompt tokens that were looked up in the prefix cache.",
    aliases={"vllm": "prefix_cache_queries_total"},
)
PREFIX_HITS = Metric(
    name="prefix_cache_hits_total",
    kind=Kind.COUNTER,
    help="Prompt tokens that the prefix cache held.",
    aliases={"vllm": "prefix_cache_hits_total"},
)
PREEMPTIONS = Metric(
    name="preemptions_total",
    kind=Kind.COUNTER,
    help="Times that a running request gave up its pages and began again.",
    aliases={"vllm": "num_preemptions_total"},
)
REBUILDS = Metric(
    name="rebuilds_total",
    kind=Kind.COUNTER,
    help="Times that ranks which died or stopped were replaced while their requests waited.",
)
MODEL_FLOPS = Metric(
    name="model_flops_total",
    kind=Kind.COUNTER,
    help="FLOPs that the model needed for what was computed, all ranks together: matrix products and attention.",
)
READ_BYTES = Metric(
    name="model_read_bytes_total",
    kind=Kind.COUNTER,
    help="Bytes of weights, keys and values that the steps had to read, all ranks together.",
)
FINISHED = Metric(
    name="requests_finished_total",
    kind=Kind.COUNTER,
    help="Sequences that ended, by reason: stop, length, abort (the client left), error.",
    labels=("finished_reason",),
    aliases={"vllm": "request_success_total"},
)
ABORTED = Metric(
    name="requests_aborted_total",
    kind=Kind.COUNTER,
    help="Sequences whose client left before the end.",
    aliases={"sglang": "num_aborted_requests_total"},
)
REFUSED = Metric(
    name="requests_refused_total",
    kind=Kind.COUNTER,
    help="Requests that got an error, by its code and HTTP status.",
    labels=("code", "status"),
)

RUNNING = Metric(
    name="num_requests_running",
    kind=Kind.GAUGE,
    help="Sequences that hold a row of the batch.",
    aliases={"vllm": "num_requests_running", "sglang": "num_running_reqs"},
)
WAITING = Metric(
    name="num_requests_waiting",
    kind=Kind.GAUGE,
    help="Sequences that wait for a row or for pages.",
    aliases={"vllm": "num_requests_waiting", "sglang": "num_queue_reqs"},
)
WAITING_TOKENS = Metric(name="num_tokens_waiting", kind=Kind.GAUGE, help="Prompt tokens of waiting sequences.")
KV_USAGE = Metric(
    name="kv_cache_usage_ratio",
    kind=Kind.GAUGE,
    help="Share of the KV pages that running sequences hold, 0 to 1; unused cached pages count as free.",
    aliases={"vllm": "kv_cache_usage_perc", "sglang": "token_usage"},
)
KV_PAGES = Metric(
    name="kv_cache_pages",
    kind=Kind.GAUGE,
    help="KV pages, the same on every rank: free, cached (in the prefix cache), owned (by one sequence).",
    labels=("state",),
)
PREFIX_HIT_RATIO = Metric(
    name="prefix_cache_hit_ratio",
    kind=Kind.GAUGE,
    help="Share of all prompt tokens since the start that the prefix cache held.",
    aliases={"sglang": "cache_hit_rate"},
)
HEARTBEAT_AGE = Metric(
    name="rank_heartbeat_age_seconds",
    kind=Kind.GAUGE,
    help="Since a rank last took or awaited a step. It grows while a step runs.",
    labels=("rank",),
)
STATE = Metric(
    name="engine_state",
    kind=Kind.GAUGE,
    help="1 for what the engine is: starting, running, rebuilding (ranks are replaced: no step runs, requests wait), "
    "draining or dead. 0 for the others.",
    labels=("state",),
)
STEP_AGE = Metric(name="step_age_seconds", kind=Kind.GAUGE, help="Age of the oldest step in flight; 0 if none is.")
REPORT_AGE = Metric(
    name="coordinator_report_age_seconds",
    kind=Kind.GAUGE,
    help="Since the coordinator last reported; above two seconds it is stuck.",
)
STARTUP = Metric(
    name="startup_phase_seconds",
    kind=Kind.GAUGE,
    help="What each phase of the start took.",
    labels=("phase",),
)
PEAK_FLOPS = Metric(
    name="peak_flops_per_second",
    kind=Kind.GAUGE,
    help="FLOP/s of large matrix products that all ranks together were measured to do at the start: MFU is the rate of "
    "model_flops_total over it.",
)
PEAK_BANDWIDTH = Metric(
    name="peak_memory_bytes_per_second",
    kind=Kind.GAUGE,
    help="Bytes per second that all ranks together were measured to copy at the start, read and written: MBU is the "
    "rate of model_read_bytes_total over it.",
)
CONFIG = Metric(
    name="engine_config_info",
    kind=Kind.GAUGE,
    help="1; its labels say what runs. 0 for what ran before another size.",
    labels=("version", "tensor_parallel_size", "dtype", "max_model_len", "page_size", "num_pages"),
)

METRICS: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
"""All of them, in the order above."""
