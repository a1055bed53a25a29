"""The metrics' names and values, and what Prometheus and Ray get of them; the log's lines."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import msgspec
import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.logs import formatter
from cluster.messages.engine import EngineStats, FinishReason, Miss, SchedulerStats, Weights
from cluster.messages.state import EngineState
from cluster.messages.steps import STEP_DTYPE
from cluster.observability.metrics import CONFIG, Distribution
from cluster.observability.record import Identity
from cluster.observability.telemetry import Telemetry
from configs.errors import OverloadedError
from tests.helpers.records import record
from tests.helpers.scripted_engine import MODEL, Run, Stack

IDENTITY = Identity(model_name="m", application="a", deployment="Engine", replica="r1")


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels other than the replica's own."""
    common = set(asdict(IDENTITY).items())
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert common <= set(sample.labels.items()), sample
            found[sample.name, frozenset(set(sample.labels.items()) - common)] = sample.value
    return found


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def stats(steps: list[tuple[float, ...]] | None = None, **figures: Any) -> EngineStats:
    names = SchedulerStats.__dataclass_fields__
    return EngineStats(
        time_s=0.0,
        scheduler=SchedulerStats(
            **{name: figures.get(name, 0) for name in names if name != "total_missed" or name in figures}
        ),
        num_steps=0,
        step_age_s=0.5,
        heartbeat_age_s=[0.1, 0.2],
        steps=np.array(steps or [], STEP_DTYPE).tobytes(),
    )


def test_names_and_buckets_follow_the_rules() -> None:
    metrics = Telemetry(IDENTITY).metrics
    for family in metrics.collect():
        assert re.fullmatch(r"lockstep_[a-z][a-z0-9_]*", family.name)
        assert not family.name.endswith("_total")
    for metric in metrics.declared:
        if isinstance(metric, Distribution):
            bounds = metric.bounds.tolist()
            assert bounds == sorted(set(bounds))
            assert all(bound > 0 for bound in bounds)
        # Of few values each, and never anything of a request.
        names = metric._labelnames
        assert (
            set(names) <= {"finished_reason", "reason", "code", "status", "state", "rank", "phase"}
            or list(names) == CONFIG
        )
    # A latency's bucket is at most five thirds of the one before it: its quantiles are that exact.
    latencies = [
        metric for metric in metrics.declared if isinstance(metric, Distribution) and "_seconds" in str(metric)
    ]
    assert {metrics.ttft, metrics.itl} < set(latencies)
    for latency in latencies:
        assert (latency.bounds[1:] / latency.bounds[:-1]).max() < 1.7


def test_a_histogram_counts_as_prometheus_own_client_does() -> None:
    rng = np.random.default_rng(0)
    telemetry = Telemetry(IDENTITY)
    ttft = telemetry.metrics.ttft
    values = [*rng.lognormal(-3, 2, 500).tolist(), *ttft.bounds.tolist(), 0.0, 1e9]
    reference = prometheus_client.Histogram("x", "x", buckets=ttft.bounds.tolist(), registry=None)
    for value in values:
        reference.observe(value)
    ttft.add([])
    ttft.add(values[0])
    ttft.add(values[1:100])
    ttft.add(np.array(values[100:]))
    ours = samples(telemetry.prometheus())
    for family in reference.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                name = sample.name.replace("x_", "lockstep_time_to_first_token_seconds_", 1)
                assert ours[name, frozenset(sample.labels.items())] == pytest.approx(sample.value)


def test_every_metric_has_samples_under_its_name_and_nothing_else_has() -> None:
    telemetry = Telemetry(IDENTITY)
    telemetry.report(stats([(1.0, 0.01, 0.001, 3, 2, 5, 3, 6e9, 7e9)]))
    telemetry.started({"warming up": 1.5}, peak_flops=8e12, peak_bandwidth=9e11, **dict.fromkeys(CONFIG, 1))
    telemetry.first_token(0.1)
    telemetry.intervals([0.01])
    telemetry.finished(record())
    telemetry.refused(OverloadedError("full"))
    suffixes = {"histogram": {"_bucket", "_sum", "_count"}, "counter": {"_total"}, "gauge": {""}}
    expected = {family.name + suffix for family in telemetry.metrics.collect() for suffix in suffixes[family.type]}
    assert {name for name, _ in samples(telemetry.prometheus())} == expected


def test_a_counter_never_goes_back() -> None:
    telemetry = Telemetry(IDENTITY)
    for held in (50, 40, 45, 60):  # an admission that is taken back takes its hits back
        telemetry.report(stats(total_prefix_hit_tokens=held))
    assert samples(telemetry.prometheus())["lockstep_prefix_cache_hits_total", labels()] == 60


def test_figures_of_the_engine_are_those_of_its_last_report_and_of_all_its_steps() -> None:
    telemetry = Telemetry(IDENTITY)
    # launched, duration, gap, rows, decodes, prefill tokens, sampled, FLOPs, bytes read
    telemetry.report(stats([(1.0, 0.01, 0.0, 3, 2, 100, 3, 6e9, 7e9), (2.0, 0.02, 0.004, 3, 3, 0, 3, 1e9, 2e9)]))
    figures = {
        "num_running": 3,
        "num_waiting": 2,
        "num_waiting_tokens": 70,
        "num_free_pages": 60,
        "num_cached_pages": 30,
        "num_evictable_pages": 20,
        "num_owned_pages": 10,
        "total_prompt_tokens": 200,
        "total_prefix_hit_tokens": 50,
        "total_preemptions": 4,
        "total_drafted": 9,
        "total_accepted": 7,
    }
    missed = {Miss.NO_STATE: 30, Miss.EVICTED: 7}
    telemetry.report(stats([(3.0, 0.01, 0.0, 3, 3, 0, 2, 1e9, 2e9)], **figures, total_missed=missed))
    found = samples(telemetry.prometheus())
    none = labels()
    assert found["lockstep_steps_total", none] == 3
    for reason in Miss:
        assert found["lockstep_prefix_cache_misses_total", labels(reason=reason)] == missed.get(reason, 0)
    assert found["lockstep_generation_tokens_total", none] == 8
    assert found["lockstep_prefill_tokens_total", none] == 100
    assert found["lockstep_model_flops_total", none] == 8e9
    assert found["lockstep_model_read_bytes_total", none] == 11e9
    assert found["lockstep_step_tokens_sum", none] == 108
    assert found["lockstep_step_time_seconds_sum", none] == pytest.approx(0.04)
    assert found["lockstep_step_gap_seconds_sum", none] == pytest.approx(0.004)
    assert found["lockstep_num_requests_running", none] == 3
    assert found["lockstep_num_tokens_waiting", none] == 70
    assert found["lockstep_kv_cache_usage_ratio", none] == 0.2
    assert found["lockstep_kv_cache_pages", labels(state="cached")] == 30
    assert found["lockstep_prefix_cache_hits_total", none] == 50
    assert found["lockstep_prefix_cache_hit_ratio", none] == 0.25
    assert found["lockstep_preemptions_total", none] == 4
    assert found["lockstep_spec_decode_num_draft_tokens_total", none] == 9
    assert found["lockstep_spec_decode_num_accepted_tokens_total", none] == 7
    assert found["lockstep_rank_heartbeat_age_seconds", labels(rank="1")] == pytest.approx(0.2)
    assert found["lockstep_coordinator_report_age_seconds", none] < 5


def test_a_request_is_counted_once_and_one_without_a_token_in_no_latency() -> None:
    telemetry = Telemetry(IDENTITY)
    telemetry.first_token(0.25)
    telemetry.finished(record())
    telemetry.finished(record(num_generated=[1], finish_reasons=[FinishReason.LENGTH], ended_s=100.3))
    telemetry.finished(record(first_token_s=None, num_generated=[0], finish_reasons=[FinishReason.ABORT]))
    telemetry.finished(record(num_generated=[5, 21], finish_reasons=[FinishReason.STOP, FinishReason.ABORT]))
    telemetry.refused(OverloadedError("full"))
    found = samples(telemetry.prometheus())
    finished = {
        reason: found["lockstep_requests_finished_total", labels(finished_reason=reason)]
        for reason in ("stop", "length", "abort")
    }
    assert finished == {"stop": 2, "length": 1, "abort": 2}
    assert found["lockstep_requests_aborted_total", labels()] == 2
    assert found["lockstep_e2e_request_latency_seconds_count", labels()] == 3
    assert found["lockstep_request_queue_time_seconds_sum", labels()] == pytest.approx(0.15)
    assert found["lockstep_request_prefill_time_seconds_sum", labels()] == pytest.approx(0.6)
    # 1 s for the ten tokens after the first, and 1 s for the twenty of the longest sequence; one token has no rate.
    assert found["lockstep_request_time_per_output_token_seconds_count", labels()] == 2
    assert found["lockstep_request_time_per_output_token_seconds_sum", labels()] == pytest.approx(0.15)
    assert found["lockstep_prompt_tokens_total", labels()] == 120
    assert found["lockstep_requests_refused_total", labels(code="engine_overloaded", status="503")] == 1


def log_record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("cluster.serve.running_engine", logging.INFO, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_line_of_the_log_names_its_process_and_its_fields_in_either_form() -> None:
    line = log_record("request %s", "done", fields={"request_id": "r-1", "out": 12, "finish": FinishReason.STOP})
    process = {"replica": "app:x1", "rank": "tp1"}
    console = formatter("console", **process).format(line)
    assert console == "INFO [app:x1 tp1] cluster.serve.running_engine: request done request_id=r-1 out=12 finish=stop"
    decoded = json.loads(formatter("json", **process).format(line))
    assert decoded.pop("time").startswith("20")
    assert decoded == {
        "level": "INFO",
        "logger": "cluster.serve.running_engine",
        "message": "request done",
        "replica": "app:x1",
        "rank": "tp1",
        "request_id": "r-1",
        "out": 12,
        "finish": "stop",
    }


def test_an_error_in_the_log_is_one_line_of_json() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        line = log_record("it failed", fields={"path": Path("/x")})
        line.exc_info = (ValueError, error, error.__traceback__)
    text = formatter("json").format(line)
    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["error"]


def test_a_busy_engine_logs_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "cluster")
    now = [50.0]
    monkeypatch.setattr("cluster.observability.telemetry.time.monotonic", lambda: now[0])
    telemetry = Telemetry(IDENTITY)
    telemetry.started({}, peak_flops=2e11, peak_bandwidth=8e10, **dict.fromkeys(CONFIG, 1))
    for _ in range(120):
        now[0] += 0.1
        telemetry.report(stats([(1.0, 0.05, 0.0, 2, 2, 0, 2, 1e9, 2e9)], num_running=2))
    for _ in range(30):  # idle: nothing to say
        now[0] += 1.0
        telemetry.report(stats())
    [first, second] = [entry.__dict__["fields"] for entry in caplog.records if entry.message == "engine"]
    assert first["running"] == 2
    assert first["generated_tok_s"] == pytest.approx(20, rel=0.02)
    assert first["step_ms"] == 50
    assert (first["mfu"], first["mbu"]) == (0.1, 0.5)
    assert second["generated_tok_s"] < 5


def test_a_request_logs_one_line_without_a_word_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    Telemetry(IDENTITY).finished(record())
    [line] = caplog.records
    assert line.__dict__["fields"] == {
        "request_id": "req-1",
        "id": "chatcmpl-1",
        "client": "key-1",
        "in": 40,
        "cached": 16,
        "out": 11,
        "finish": "stop",
        "seed": 7,
        "queue_ms": 50.0,
        "ttft_ms": 250.0,
        "itl_ms": 100.0,
        "e2e_ms": 1250.0,
    }


def test_a_pause_is_in_the_line_of_each_request_that_it_met(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.observability.telemetry")
    telemetry, it = Telemetry(IDENTITY), record()
    begin, end = it.context.arrived_s, it.ended_s
    for time_s, state in (
        (begin - 2, EngineState.REBUILDING),
        (begin - 1, EngineState.RUNNING),
        (begin + 0.25, EngineState.REBUILDING),
        (begin + 0.5, EngineState.REBUILDING),
        (begin + 0.75, EngineState.RUNNING),
        (end - 0.125, EngineState.REBUILDING),
        (end + 1, EngineState.RUNNING),
    ):
        telemetry.report(msgspec.structs.replace(stats(), time_s=time_s, state=state))
    telemetry.finished(it)
    assert caplog.records[-1].__dict__["fields"]["pause_ms"] == 625
    assert telemetry.pauses_between(begin, end) == [(begin + 0.25, begin + 0.75), (end - 0.125, end)]


def test_another_size_and_other_weights_are_in_the_metric_that_says_what_runs() -> None:
    telemetry = Telemetry(IDENTITY)
    config = dict.fromkeys(CONFIG, "x") | {"tensor_parallel_size": 2, "weights_version": ""}
    telemetry.started({}, peak_flops=1, peak_bandwidth=1, **config)
    for size, weights in ((2, None), (3, None), (3, Weights("step-5", "a"))):
        telemetry.report(msgspec.structs.replace(stats(), devices=["cpu"] * size, weights=weights))
    found = samples(telemetry.prometheus())
    values = [
        found[
            "lockstep_engine_config_info", labels(**config | {"tensor_parallel_size": size, "weights_version": version})
        ]
        for size, version in (("2", ""), ("3", ""), ("3", "step-5"))
    ]
    assert values == [0, 0, 1]


# --- Over HTTP --------------------------------------------------------------------------------------------------------


def scraped(response: httpx.Response) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in asdict(IDENTITY)}
            found[sample.name, labels(**own)] = sample.value
    return found


def test_requests_and_errors_show_in_the_metrics_route(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        num_tokens = len(stack.coordinator.reply)
        assert (await stack.chat()).status_code == 200
        assert (await stack.complete(n=2, stream=True)).status_code == 200
        assert (await stack.chat(max_tokens=-2)).status_code == 400
        assert (await stack.http.get("/nowhere")).status_code == 404
        found = scraped(await stack.http.get("/metrics"))
        assert found["lockstep_requests_finished_total", labels(finished_reason="stop")] == 3
        assert found["lockstep_time_to_first_token_seconds_count", labels()] == 2
        assert found["lockstep_inter_token_latency_seconds_count", labels()] == 3 * (num_tokens - 1)
        assert found["lockstep_request_generation_tokens_sum", labels()] == 3 * num_tokens
        assert found["lockstep_requests_refused_total", labels(code="not_found", status="404")] == 1
        assert sum(value for (name, _), value in found.items() if name == "lockstep_requests_refused_total") == 2

    run(scenario)


def test_a_stream_that_fails_is_counted_and_logged_as_an_error(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")

    async def scenario(stack: Stack) -> None:
        headers = {"x-request-id": "mine-1"}
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        assert (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        found = scraped(await stack.http.get("/metrics"))
        assert found["lockstep_requests_finished_total", labels(finished_reason="error")] == 1
        assert found["lockstep_requests_refused_total", labels(code="engine_error", status="500")] == 1
        assert found["lockstep_time_to_first_token_seconds_count", labels()] == 1

    run(scenario, fail_after=3)
    [fields] = [entry.__dict__["fields"] for entry in caplog.records if entry.message == "request"]
    assert (fields["request_id"], fields["finish"]) == ("mine-1", "error")
    assert fields["ttft_ms"] <= fields["e2e_ms"]


def test_a_refused_request_counts_in_no_latency(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        assert (await stack.chat()).status_code == 503
        found = scraped(await stack.http.get("/metrics"))
        assert found["lockstep_requests_refused_total", labels(code="engine_overloaded", status="503")] == 1
        assert found["lockstep_e2e_request_latency_seconds_count", labels()] == 0

    run(scenario, overloaded=True)


def test_a_warm_up_is_no_request(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        await stack.model.warm_up()
        found = scraped(await stack.http.get("/metrics"))
        assert not [name for name, _ in found if name == "lockstep_requests_finished_total"]

    run(scenario)


# --- Ray's metrics ----------------------------------------------------------------------------------------------------


class RayMetric:
    """Any of Ray's three kinds: keeps what it was told."""

    made: ClassVar[dict[str, RayMetric]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: Any = None) -> None:
        self.tag_keys = tag_keys
        self.told: list[tuple[float, dict[str, str]]] = []
        RayMetric.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.default_tags = tags

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "a counter of Ray takes no other"
        self.told.append((value, tags))

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.told.append((value, tags))

    def observe(self, value: float) -> None:
        self.told.append((value, {}))


@pytest.fixture
def ray_metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, RayMetric]:
    from cluster.observability import ray_export

    RayMetric.made.clear()
    fake = SimpleNamespace(Counter=RayMetric, Gauge=RayMetric, Histogram=RayMetric)
    monkeypatch.setattr(ray_export, "ray_metrics", fake)
    monkeypatch.setattr(ray_export, "_VALUES_INTERVAL_S", 0.0)
    return RayMetric.made


def test_ray_gets_what_is_new(ray_metrics: dict[str, RayMetric]) -> None:
    from cluster.observability.ray_export import RayExport

    telemetry = Telemetry(IDENTITY)
    telemetry.export = RayExport(telemetry.metrics, "m").flush
    telemetry.finished(record())
    telemetry.report(stats([(1.0, 0.01, 0.0, 3, 2, 100, 3, 6e9, 7e9)], num_running=3))
    telemetry.finished(record())
    telemetry.report(stats(num_running=1))
    assert not [name for name in ray_metrics if ":" in name]
    assert ray_metrics["lockstep_requests_finished_total"].told == [(1, {"finished_reason": "stop"})] * 2
    assert ray_metrics["lockstep_generation_tokens_total"].told == [(3, {})]
    assert ray_metrics["lockstep_num_requests_running"].told == [(3, {}), (1, {})]
    assert ray_metrics["lockstep_num_requests_running"].default_tags == {"model_name": "m"}
    assert ray_metrics["lockstep_rank_heartbeat_age_seconds"].told[:2] == [(0.1, {"rank": "0"}), (0.2, {"rank": "1"})]
    assert [value for value, _ in ray_metrics["lockstep_e2e_request_latency_seconds"].told] == [1.25, 1.25]


def test_of_very_frequent_values_ray_gets_a_part_and_prometheus_all(ray_metrics: dict[str, RayMetric]) -> None:
    from cluster.observability.ray_export import RayExport

    telemetry = Telemetry(IDENTITY)
    telemetry.export = RayExport(telemetry.metrics, "m").flush
    values = [0.01 * i for i in range(1, 10_001)]
    telemetry.intervals(values)
    telemetry.report(stats())
    told = [value for value, _ in ray_metrics["lockstep_inter_token_latency_seconds"].told]
    assert len(told) == 20
    assert set(told) <= set(values)
    assert samples(telemetry.prometheus())["lockstep_inter_token_latency_seconds_count", labels()] == 10_000
    telemetry.report(stats())
    assert len(ray_metrics["lockstep_inter_token_latency_seconds"].told) == 20
