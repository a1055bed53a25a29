"""/v1/loads, /load, /server_info and /health_generate over the scripted engine."""

from __future__ import annotations

import time

from cluster.messages.engine import EngineStats, SchedulerStats
from cluster.requests.engine_info import EngineInfo
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of

INFO = EngineInfo(
    numerics="exact",
    dtype="float32",
    device="cpu",
    prefill_attention_backend="torch_native",
    decode_attention_backend="torch_native",
    tensor_parallel_size=2,
    num_replicas=1,
    page_size=16,
    num_kv_tokens=1600,
    enable_prefix_caching=True,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_num_queued_requests=100,
    max_num_queued_tokens=1000,
)


def report(stack: Stack) -> None:
    """The engine reports 3 running and 2 waiting requests, and half of its 100 pages in use."""
    stats = SchedulerStats(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=70,
        num_free_pages=30,
        num_cached_pages=40,
        num_evictable_pages=20,
        num_owned_pages=30,
        total_prefix_hit_tokens=25,
        total_prompt_tokens=100,
        total_preemptions=0,
    )
    stack.model.info = INFO
    stack.engine.board.update(
        EngineStats(
            time_s=time.monotonic(), scheduler=stats, num_steps=1, step_age_s=0.0, heartbeat_age_s=[], steps=b""
        )
    )


def test_loads_are_the_engines_last_report(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        assert (await stack.http.get("/v1/loads")).json()["loads"] == []
        assert (await stack.http.get("/load")).json() == {"server_load": 0}
        report(stack)
        [load] = (await stack.http.get("/v1/loads")).json()["loads"]
        assert abs(load.pop("timestamp") - time.time()) < 5
        assert load == {
            "dp_rank": 0,
            "num_running_reqs": 3,
            "num_waiting_reqs": 2,
            "num_waiting_tokens": 70,
            "num_used_tokens": 800,
            "num_total_tokens": 870,
            "max_total_num_tokens": 1600,
            "token_usage": 0.5,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.25,
            "max_running_requests": 8,
        }
        assert (await stack.http.get("/load")).json() == {"server_load": 5}

    run(scenario)


def test_server_info_names_sizes_and_limits_and_no_place(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        report(stack)
        reply = await stack.http.get("/server_info")
        info = reply.json()
        assert (info["version"], info["model"], info["max_model_len"]) == ("1.2", MODEL, 128)
        assert info["engine"]["tensor_parallel_size"] == 2
        assert info["limits"]["max_n"] == 128
        assert "/" not in reply.text.replace(MODEL, "")

    run(scenario)


def test_health_generate_generates_one_token_before_all_that_waits(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.get("/health_generate")
        assert reply.json()["status"] == "ok"
        [request] = stack.coordinator.requests
        assert request.sampling.max_tokens == 1
        assert request.terms.level < -(2**61)

    run(scenario)


def test_health_generate_fails_with_the_engine(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error_of(await stack.http.get("/health_generate"), 500, "engine_error")

    run(scenario, fail_after=0)
