"""OpenTelemetry spans of requests, by the GenAI conventions: one for the request, and its queueing, prefill and decode.

The spans are made when a request has ended, from times that are recorded anyway. A running request costs nothing, and
without a consumer no spans are made. The parent is the caller's span, from its W3C `traceparent`. No span contains text
of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cluster.observability.record import Identity, RequestRecord
from configs.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as ExportingProvider

_NAME = "lockstep"
_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTracer:
    """Makes the spans of one replica's requests."""

    def __init__(self, provider: TracerProvider, model_name: str, close: Callable[[], None] | None = None) -> None:
        """`close` sends spans that were not sent yet, when the tracer is closed."""
        self._tracer = provider.get_tracer(_NAME)
        self._model_name = model_name
        self._close = close

    def close(self) -> None:
        """Closes the tracer. No span may be made afterwards."""
        if self._close is not None:
            self._close()

    def finished(self, record: RequestRecord) -> None:
        """Makes the span of a request that has ended, and one for each of its phases."""
        sampling = record.sampling
        operation = "chat" if record.chat else "text_completion"
        attributes: dict[str, AttributeValue] = {
            "lockstep.request.id": record.context.request_id,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _NAME,
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": len(record.num_generated),
            "gen_ai.response.id": record.id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [str(reason) for reason in record.finish_reasons],
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        }
        if record.ttft_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            _PROPAGATOR.extract(record.context.trace, Context()),
            SpanKind.SERVER,
            attributes,
            start_time=_epoch_ns(record.context.arrived_s),
        )
        if record.error is not None:
            span.set_attribute("error.type", record.error)
            span.set_status(StatusCode.ERROR)
        within = trace.set_span_in_context(span, Context())
        for name, (begin_s, end_s) in record.phases.items() if span.is_recording() else ():
            self._tracer.start_span(name, within, start_time=_epoch_ns(begin_s)).end(_epoch_ns(end_s))
        span.end(_epoch_ns(record.ended_s))


def open_tracer(endpoint: str | None, identity: Identity) -> RequestTracer | None:
    """The tracer of a replica. None if nothing consumes spans. `endpoint` is `observability.otlp_traces_endpoint`. If
    it is None, the process's own provider is used, if it has one. Raises ConfigError if no exporter for the endpoint is
    installed."""
    if endpoint is None:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        return RequestTracer(provider, identity.model_name)
    exporting = _exporting_provider(endpoint, identity)
    return RequestTracer(exporting, identity.model_name, exporting.shutdown)


def _exporting_provider(endpoint: str, identity: Identity) -> ExportingProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"observability.otlp_traces_endpoint needs the package {error.name}, which is not installed; install "
            "opentelemetry-exporter-otlp-proto-http in every replica's environment, or remove the setting"
        ) from None
    resource = Resource.create({"service.name": _NAME, "service.instance.id": identity.replica})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def _epoch_ns(monotonic_s: float) -> int:
    """Converts a `time.monotonic()` of this process to nanoseconds of Unix time."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
