"""Spans of requests: the caller's trace goes on, the phases are its children, and no word of a prompt is in them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cluster.http.context import RequestContext
from cluster.messages.engine import FinishReason, Prefilled, SamplingParams
from cluster.observability.record import Identity, RequestRecord
from cluster.observability.tracing import RequestTracer, open_tracer
from configs.errors import ConfigError
from tests.helpers.scripted_engine import MODEL, Run, Stack

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return RequestTracer(provider, MODEL)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_chat_is_a_span_in_its_callers_trace_with_the_attributes_of_the_conventions(
    run: Run, tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    async def scenario(stack: Stack) -> None:
        stack.engine.telemetry.tracer = tracer
        headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "r-7"}
        fields = {"max_tokens": 64, "temperature": 0.5, "seed": 3, "n": 2}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a secret"}], **fields}
        response = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
        usage = response.json()["usage"]
        found = by_name(spans)
        assert set(found) == {f"chat {MODEL}", "queue", "prefill", "decode"}
        span = found[f"chat {MODEL}"]
        assert span.kind is SpanKind.SERVER
        assert span.context is not None
        assert span.parent is not None
        assert (span.context.trace_id, span.parent.span_id) == (int(TRACE_ID, 16), int("b7ad6b7169203331", 16))
        assert span.parent.is_remote
        assert span.context.trace_state.get("vendor") == "1"
        assert span.status.status_code is StatusCode.UNSET
        given = attributes(span)
        first = given.pop("gen_ai.response.time_to_first_chunk")
        assert isinstance(first, float)
        assert 0 < first < 10
        assert given == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "lockstep",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.max_tokens": 64,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": 0,
            "gen_ai.request.seed": 3,
            "gen_ai.request.choice.count": 2,
            "gen_ai.response.id": response.json()["id"],
            "gen_ai.response.model": MODEL,
            "gen_ai.response.finish_reasons": ("stop", "stop"),
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 16,
            "lockstep.request.id": "r-7",
        }
        for name in ("queue", "prefill", "decode"):
            parent = found[name].parent
            assert parent is not None
            assert parent.span_id == span.context.span_id
        assert "secret" not in "".join(each.to_json() for each in found.values())

    run(scenario)


def test_a_request_without_a_trace_begins_one_and_a_failed_one_says_so(
    run: Run, tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    async def scenario(stack: Stack) -> None:
        stack.engine.telemetry.tracer = tracer
        await stack.complete(stream=True)
        span = by_name(spans)[f"text_completion {MODEL}"]
        assert span.parent is None
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == "EngineError"
        assert attributes(span)["gen_ai.response.finish_reasons"] == ("error",)

    run(scenario, fail_after=2)


def test_a_trace_that_is_not_sampled_costs_no_span(
    run: Run, tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    async def scenario(stack: Stack) -> None:
        stack.engine.telemetry.tracer = tracer
        body = {"model": MODEL, "prompt": "hi"}
        for header in (PARENT[:-2] + "00", "not a trace"):
            assert (await stack.http.post("/v1/completions", json=body, headers={"traceparent": header})).is_success
        # Only the one whose header means nothing.
        [parentless] = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
        assert parentless.parent is None

    run(scenario)


def record() -> RequestRecord:
    return RequestRecord(
        id="cmpl-1",
        context=RequestContext(request_id="r", arrived_s=100.0),
        first_token_s=100.5,
        ended_s=102.0,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_generated=[4],
        finish_reasons=[FinishReason.LENGTH],
        sampling=SamplingParams(max_tokens=4),
        prefilled=Prefilled(1, 0, queue_s=0.125, prefill_s=0.25),
    )


def test_the_phases_follow_each_other_within_the_request(tracer: RequestTracer, spans: InMemorySpanExporter) -> None:
    tracer.finished(record())
    found = by_name(spans)
    request = found[f"text_completion {MODEL}"]

    def seconds(span: ReadableSpan) -> tuple[float, float]:
        assert None not in (span.start_time, span.end_time, request.start_time)
        return tuple(round(1e-9 * (at - request.start_time), 3) for at in (span.start_time, span.end_time))  # type: ignore[operator,return-value]

    assert seconds(request) == (0.0, 2.0)
    assert {name: seconds(found[name]) for name in ("queue", "prefill", "decode")} == {
        "queue": (0.125, 0.25),
        "prefill": (0.25, 0.5),
        "decode": (0.5, 2.0),
    }


def test_nothing_is_traced_where_nobody_takes_spans(run: Run) -> None:
    assert open_tracer(None, Identity()) is None

    async def scenario(stack: Stack) -> None:
        assert stack.engine.telemetry.tracer is None
        assert (await stack.complete()).is_success

    run(scenario)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """URL of something that takes spans over HTTP, and the bodies it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    server.server_close()


def test_spans_go_to_the_endpoint_of_the_setting(collector: tuple[str, list[bytes]]) -> None:
    url, bodies = collector
    tracer = open_tracer(url, Identity(model_name=MODEL, replica="r-1"))
    assert tracer is not None
    tracer.finished(record())
    tracer.close()
    sent = b"".join(bodies)
    for word in (f"text_completion {MODEL}", "decode", "lockstep", "r-1"):
        assert word.encode() in sent


def test_an_endpoint_without_an_exporter_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"observability\.otlp_traces_endpoint needs the package"):
        open_tracer("http://127.0.0.1:1/v1/traces", Identity())
