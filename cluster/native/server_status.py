"""The routes that show a replica's state: /server_info, /v1/loads, /load, /health_generate and timelines."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from cluster.http.context import RequestContext, Role
from cluster.http.response import HttpResponse
from cluster.messages.state import EngineState
from cluster.observability.timeline import NUM_REQUESTS, timeline
from cluster.requests.answer import json_response
from cluster.requests.engine_info import EngineInfo
from cluster.requests.served_model import ServedModel
from configs.errors import DeadlineError, OverloadedError, RequestError

_PROBE_TIMEOUT_S = 20.0
_RATE_OVER_S = 10


class ServerLimits(msgspec.Struct):
    """Limits of one request (`server.*`)."""

    max_body_bytes: int
    max_n: int
    max_logprobs: int
    max_stop: int
    request_timeout_s: float


class ServerInfo(msgspec.Struct):
    """Facts about this replica."""

    version: str
    model: str
    weights_version: str | None
    """Version of the weights in use. Null for the weights of the start."""
    max_model_len: int
    vocab_size: int
    engine: EngineInfo | None
    limits: ServerLimits


class Load(msgspec.Struct):
    """The load of a replica's engine, with SGLang's names. A replica is one data-parallel rank."""

    dp_rank: int
    timestamp: float
    """Unix time in seconds."""
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_tokens: int
    num_used_tokens: int
    """KV tokens of running requests."""
    num_total_tokens: int
    """KV tokens of running requests, plus the tokens of waiting requests."""
    max_total_num_tokens: int
    token_usage: float
    """Share of the KV pool that running requests use, 0 to 1."""
    gen_throughput: float
    """Generated tokens per second over the last ten seconds."""
    cache_hit_rate: float
    """Share of all tokens of admitted requests that came from the prefix cache."""
    max_running_requests: int | None


class Loads(msgspec.Struct):
    """The loads of this endpoint: a list with the load of the replica that answers."""

    timestamp: str
    version: str
    loads: list[Load]


class ServerLoad(msgspec.Struct):
    """Number of running and waiting requests, in vLLM's form."""

    server_load: int


class Probe(msgspec.Struct):
    """The answer to a probe."""

    status: str
    state: EngineState


class Healthy(msgspec.Struct):
    """The answer of /health_generate: a token was generated."""

    latency_s: float
    status: str = "ok"


async def server_info(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """GET /server_info."""
    server, info, stats = model.server, model.info, model.engine.board.latest
    if info is not None and stats is not None and stats.devices:
        info = msgspec.structs.replace(info, tensor_parallel_size=len(stats.devices))
    sizes = server.max_body_bytes, server.max_n, server.max_logprobs, server.max_stop
    facts = model.version, model.model_name, model.weights_version, model.max_model_len, model.vocab_size
    return json_response(ServerInfo(*facts, info, ServerLimits(*sizes, server.request_timeout_s)))


async def loads(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """GET /v1/loads."""
    load = _load(model)
    return json_response(Loads(datetime.now(UTC).isoformat(), model.version, [] if load is None else [load]))


async def server_load(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """GET /load."""
    load = _load(model)
    return json_response(ServerLoad(0 if load is None else load.num_running_reqs + load.num_waiting_reqs))


async def health_generate(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """GET /health_generate: waits for one token, generated before waiting requests. Concurrent calls share it.

    Raises:
        OverloadedError: no token came in time.
        EngineError: the engine failed.
    """
    begin = time.monotonic()
    try:
        await model.probe(_PROBE_TIMEOUT_S)
    except DeadlineError:
        raise OverloadedError(
            f"No token was generated within {_PROBE_TIMEOUT_S:g} seconds; see the replica's log."
        ) from None
    return json_response(Healthy(round(time.monotonic() - begin, 4)))


async def request_timeline(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """GET /v1/timelines/{request_id}: the timeline of an ended request. Only admin keys get those of other clients.

    Raises:
        RequestError: 404 if no request with this id is one of the last that ended.
    """
    client = None if context.role is Role.ADMIN else context.client
    parts = await model.others.find("timeline", context.path_params["request_id"], client)
    # Writing a long timeline takes tens of milliseconds.
    return json_response(await asyncio.to_thread(timeline, *parts))


def timeline_here(model: ServedModel, request_id: str, client: str | None) -> tuple[Any, ...]:
    """The arguments of `timeline` for an ended request of this replica and `client`. If `client` is None, of any
    client. Raises RequestError (404) if there is none."""
    telemetry = model.engine.telemetry
    record = telemetry.recent.find(request_id, client)
    if record is None:
        raise RequestError(
            f"No request {request_id[:200]!r} is among the last {NUM_REQUESTS} that ended.",
            code="request_not_found",
            status=404,
        )
    pauses = telemetry.pauses_between(record.context.arrived_s, record.ended_s)
    return record, telemetry.board.steps(), list(pauses)


def _load(model: ServedModel) -> Load | None:
    """The current load. None before the engine's first report."""
    board, info = model.engine.board, model.info
    if board.latest is None:
        return None
    stats = board.latest.scheduler
    page_size = 1 if info is None else info.page_size
    num_pages = stats.num_free_pages + stats.num_cached_pages + stats.num_owned_pages
    num_used = (num_pages - stats.num_free_pages - stats.num_evictable_pages) * page_size
    recent = [second for second in board.history() if second.time_s >= time.monotonic() - _RATE_OVER_S]
    return Load(
        dp_rank=0,
        timestamp=time.time() - board.age_s,
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting,
        num_waiting_tokens=stats.num_waiting_tokens,
        num_used_tokens=num_used,
        num_total_tokens=num_used + stats.num_waiting_tokens,
        max_total_num_tokens=num_pages * page_size,
        token_usage=round(board.kv_usage, 4),
        gen_throughput=round(sum(second.num_generated_tokens for second in recent) / _RATE_OVER_S, 2),
        cache_hit_rate=round(stats.total_prefix_hit_tokens / max(stats.total_prompt_tokens, 1), 4),
        max_running_requests=None if info is None else info.max_num_seqs,
    )
