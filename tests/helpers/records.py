"""Requests that have ended, as telemetry is told of them."""

from __future__ import annotations

from typing import Any

from cluster.http.context import RequestContext
from cluster.messages.engine import FinishReason, Prefilled, SamplingParams
from cluster.observability.record import RequestRecord


def record(**changes: Any) -> RequestRecord:
    return RequestRecord(
        **{
            "id": "chatcmpl-1",
            "context": RequestContext(request_id="req-1", client="key-1", arrived_s=100.0),
            "first_token_s": 100.25,
            "ended_s": 101.25,
            "num_prompt_tokens": 40,
            "num_cached_tokens": 16,
            "num_generated": [11],
            "finish_reasons": [FinishReason.STOP],
            "sampling": SamplingParams(max_tokens=16, seed=7),
            "prefilled": Prefilled(1, 16, queue_s=0.05, prefill_s=0.2),
            **changes,
        }
    )
