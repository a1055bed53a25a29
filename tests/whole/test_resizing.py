"""Another number of ranks while requests run: streams go on as if nothing had been; one that fails costs no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ray import serve
from ray.serve._private.api import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from cluster.engine import resizing
from cluster.messages.engine import SamplingParams
from cluster.observability.timeline import Timeline, timeline
from cluster.ranks.group_memory import GroupMemory, pool_within
from cluster.ranks.rank import Rank, RankStarter
from cluster.ranks.rank_actor import Location, PoolShape, RankActor, RankLoad
from cluster.ranks.rank_group import RankGroup
from cluster.serve.app import live_size
from cluster.serve.running_engine import RunningEngine
from configs.cards import CARDS
from configs.errors import ConfigError, EngineError
from configs.kv_pages import PageBytes
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig
from tests.conftest import Endpoint
from tests.helpers.odd_ranks import use_ranks
from tests.helpers.served_group import ServedGroup, served_group
from tests.helpers.streams import next_chunk
from tests.whole.test_failure import processes, running
from tests.whole.test_recovery import BODIES, answer, expected, status, streams
from worker.device.memory import DeviceMemory

__all__ = ["expected"]  # a fixture

LOG = logging.getLogger(__name__)


async def num_cached(engine: RunningEngine) -> int:
    """Tokens of a prompt of 200, always the same, that are found in the prefix cache."""
    prompt = np.arange(5, 205, dtype=np.int32).tobytes()
    [stream] = engine.client.submit([prompt], [[SamplingParams(max_tokens=1)]])
    await next_chunk(stream)
    assert stream.prefilled is not None
    return stream.prefilled.num_cached_tokens


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_answer_goes_on_with_more_and_with_fewer_ranks(
    ray_cluster: None, tiny_path: Path, expected: list[int]
) -> None:
    async def main() -> None:
        async with running(tiny_path, tensor_parallel_size=1, recovery={"max_rebuilds": 2}) as engine:
            answering = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.1)
            assert await num_cached(engine) == 0
            old = set((await status(engine))["pids"].values())
            for size in (2, 1):
                resized = await engine.resize(size)
                assert resized.size == size
                assert 0 < resized.pause_s < 20
                pids = (await status(engine))["pids"]
                assert sorted(pids) == list(range(size))
                assert not old & set(pids.values())
                old = set(pids.values())
                assert (await answer(engine))[0] == expected
                assert await num_cached(engine) == 192, "the new ranks have not what the old ones had"
            assert (await answering)[0] == expected
            with pytest.raises(ConfigError, match="tensor_parallel_size=1000"):
                await engine.resize(1000)
            assert (await engine.resize(1)).pause_s == 0

    asyncio.run(main())


class FragileRank(RankActor):
    """A rank whose process is killed when it is to have a KV pool, as rank 1 of three."""

    def allocate(self, pool: PoolShape, at_once: bool, keeps_kv: bool) -> None:
        if self._spec.rank == 1 and self._spec.config.tensor_parallel_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().allocate(pool, at_once, keeps_kv)


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ranks_there_were_go_on_when_a_new_one_dies(
    ray_cluster: None, tiny_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranks(monkeypatch, FragileRank)

    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 1}) as engine:
            before = (await status(engine))["pids"]
            answers = [asyncio.create_task(answer(engine)) for _ in range(3)]
            await asyncio.sleep(0.1)
            with pytest.raises(EngineError, match=r"tensor_parallel_size stays 2, requests waited .* rank 1 died"):
                await engine.resize(3)
            assert [tokens for tokens, _ in await asyncio.gather(*answers)] == 3 * [expected]
            after = await status(engine)
            assert (after["pids"], after["state"], after["num_rebuilds"]) == (before, "running", 0)
            # Whoever went back may still be rebuilt, and resized.
            os.kill(before[1], signal.SIGKILL)
            assert (await answer(engine))[0] == expected
            assert (await engine.resize(1)).size == 1
            assert (await answer(engine))[0] == expected

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_wait_while_an_engine_sleeps_and_a_rank_that_dies_meanwhile_is_replaced(
    ray_cluster: None, tiny_path: Path, expected: list[int]
) -> None:
    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 1}) as engine:
            for dies in (False, True):
                begun = asyncio.create_task(answer(engine))
                await asyncio.sleep(0.1)
                assert await engine.sleep() > 0
                before = await status(engine)
                assert before["state"] == "sleeping"
                with pytest.raises(ConfigError, match="the engine sleeps; wake it up first"):
                    await engine.resize(1)
                late = asyncio.create_task(answer(engine))
                if dies:
                    os.kill(before["pids"][1], signal.SIGKILL)
                await asyncio.sleep(0.3)
                assert not late.done()
                assert await engine.sleep(wakes=True) > 0
                assert [tokens for tokens, _ in await asyncio.gather(begun, late)] == 2 * [expected]
                after = await status(engine)
                assert (after["state"], after["num_rebuilds"]) == ("running", 0)
                assert (after["pids"][1] == before["pids"][1]) != dies
                assert after["pids"][0] == before["pids"][0]
            with pytest.raises(ConfigError, match="the engine is awake"):
                await engine.sleep(wakes=True)
            # The next process of a rank finds the weights again.
            os.kill(after["pids"][0], signal.SIGKILL)
            assert (await answer(engine))[0] == expected
            await engine.sleep()

    asyncio.run(main())


class LateRank(RankActor):
    """A rank that gets its weights when the ones before it have left, as on GPUs. A lone one has room for 1,024
    tokens, and the process of rank 1 of three is killed."""

    def _loaded(self, memory: DeviceMemory, seconds: float) -> RankLoad:
        size = self._spec.config.tensor_parallel_size
        if (self._spec.rank, size) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        load = super()._loaded(memory, seconds)
        page_size = self._spec.config.kv_cache.page_size
        return replace(load, free_bytes=(1 + 1024 // page_size) * load.kv_page_bytes.full) if size == 1 else load


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_load_where_the_others_pools_were_may_have_fewer_pages(
    ray_cluster: None, tiny_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(new: RankGroup, _: RankGroup) -> None:
        """Two ranks read their weights as late as that."""
        new.start()
        if new.size != 2:
            new.prepare()

    use_ranks(monkeypatch, LateRank, _load=load)

    async def main() -> None:
        changes = {"recovery": {"max_rebuilds": 1}, "kv_cache": {"num_tokens": 4096}}
        async with running(tiny_path, max_model_len=1000, **changes) as engine:
            for size, num_tokens in ((1, 1024), (2, 1024)):
                answers = [asyncio.create_task(answer(engine)) for _ in range(3)]
                await asyncio.sleep(0.1)
                assert (await engine.resize(size)).size == size
                assert [tokens for tokens, _ in await asyncio.gather(*answers)] == 3 * [expected]
                now = await status(engine)
                num_pages = now["num_free_pages"] + now["num_cached_pages"] + now["num_owned_pages"]
                assert num_pages * engine.spec.config.kv_cache.page_size == num_tokens
            before = now["pids"]
            answering = asyncio.create_task(answer(engine))
            with pytest.raises(EngineError, match=r"tensor_parallel_size stays 2, requests waited .* rank 1 died"):
                await engine.resize(3)
            assert (await answering)[0] == expected
            assert (await status(engine))["pids"] == before

    asyncio.run(main())


def group_on_gpus(path: Path, size: int, **settings: Any) -> RankGroup:
    """Ranks on GPUs; none is started."""
    model = read_model_config(path)
    given = EngineConfig(model=str(path), device="cuda", tensor_parallel_size=size, **settings)
    config = resolve(given, model, HostFacts(8, 1, CARDS["h200"])).config
    nowhere: Any = None
    starter = RankStarter(config=config, model=model, model_path=path, placement_group=nowhere, name="app")
    group = RankGroup(starter)
    places = [Location("node", 1, f"cuda:{rank}") for rank in range(size)]
    group._ranks = [Rank(rank, None, place) for rank, place in enumerate(places)]
    return group


@pytest.mark.parametrize(("room_mib", "fits"), [(64, True), (0.2, False)])
def test_a_gpu_that_cannot_hold_the_weights_of_both_ranks_is_named_before_anything_happens(
    tiny_path: Path, room_mib: float, fits: bool
) -> None:
    old, new = group_on_gpus(tiny_path, 2), group_on_gpus(tiny_path, 1)
    old._pool = PoolShape(1000, 1000, None, None, 1 << 16)
    for rank in old._ranks:
        rank.room_bytes = int(room_mib * (1 << 20))
    words = "cuda:0 has 0.00 GiB, and holds the weights of rank 0 of 2 and of 1 until .* max_model_len=1000"
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=words):
        resizing.check_devices(new, old)


@pytest.mark.parametrize(
    ("kv_cache", "free_pages", "expected"),
    [
        ({"memory_fraction": 0.5}, 4100, 2000),
        ({"memory_fraction": 0.5}, 500, 249),
        ({"num_tokens": 32000}, 500, 499),
        ({"memory_bytes": 300}, 500, 299),
        ({"memory_fraction": 0.5}, 124, "the KV pool of 1 ranks has room for 976 tokens .* max_model_len=1000"),
    ],
)
def test_a_pool_that_takes_over_has_as_many_pages_as_before_where_they_fit(
    tiny_path: Path, kv_cache: dict[str, Any], free_pages: int, expected: int | str
) -> None:
    group = group_on_gpus(tiny_path, 1, kv_cache=kv_cache)
    memory = GroupMemory((RankLoad(PageBytes(1), free_pages, 0, True, 0.0, ""),), on_cpu=False)
    pool = PoolShape(2000, 1000, None, None, 1 << 16)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            pool_within(memory, pool, group.config, group.model)
    else:
        assert pool_within(memory, pool, group.config, group.model) == replace(pool, num_pages=expected)


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_eight_streams_go_through_one_two_three_and_two_ranks(ray_cluster: None, smollm2_path: Path) -> None:
    async def main() -> None:
        async with served_group(smollm2_path, "resizing:1", tensor_parallel_size=1) as group:
            expected = [it.answer for it in await streams(group, BODIES)]
            assert all(len(reasons) == len(texts) > 0 for texts, reasons, *_ in expected)
            for size in (2, 3, 2):
                resizing = asyncio.create_task(group.engine.resize_app(size))
                rounds = []
                while not resizing.done():
                    rounds.append(await streams(group, BODIES))
                LOG.info("%d rounds, requests waited %.2f s", len(rounds), await resizing)
                for got in rounds:
                    for body, one, other in zip(BODIES, expected, got, strict=True):
                        assert other.answer == one, body
                info = (await group.http.get("/server_info")).json()["engine"]
                assert info["tensor_parallel_size"] == size
                gauges = (await group.http.get("/metrics")).text
                assert re.search(rf'engine_config_info{{.*tensor_parallel_size="{size}".*}} 1', gauges)
            # Each exchange met a round, and is in the timelines of its requests.
            assert len(group.engine.client.telemetry.pauses) == 3
            assert (await group.status())["total_preemptions"] == 0
            met = [it for it in timelines(group) if "pause" in {event.name for event in it.trace_events}]
            assert len(met) >= 3
            status = await group.status()
            assert (status["num_rebuilds"], status["state"]) == (0, "running")
            assert status["num_running"] == status["num_waiting"] == status["num_owned_pages"] == 0

    asyncio.run(main())


def timelines(group: ServedGroup) -> list[Timeline]:
    """Those of all requests that it has answered."""
    telemetry = group.engine.client.telemetry
    return [
        timeline(it, telemetry.board.steps(), telemetry.pauses_between(it.context.arrived_s, it.ended_s))
        for it in telemetry.recent._records.values()
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_user_config_resizes_a_replica_that_serve_keeps(endpoint: Endpoint, smollm2_path: Path) -> None:
    app: dict[str, Any] = {
        "name": "resized",
        "route_prefix": "/resized",
        "import_path": "cluster.app:build_app",
        "args": {
            "model": str(smollm2_path),
            "device": "cpu",
            "tensor_parallel_size": 1,
            "kv_cache": {"num_tokens": 8192},
        },
    }
    url = f"{endpoint.url}/resized"

    def deploy(**engine: Any) -> None:
        deployments = [{"name": "Engine", **engine}]
        schema = ServeDeploySchema.model_validate({"applications": [{**app, "deployments": deployments}]})
        _get_global_client().deploy_apps(schema)

    async def ended(http: httpx.AsyncClient, size: int) -> None:
        """Serve has ended its update, and `size` ranks serve."""
        deadline = time.monotonic() + 200
        while True:
            assert time.monotonic() < deadline, serve.status()
            await asyncio.sleep(0.5)
            state = (await asyncio.to_thread(serve.status)).applications["resized"]
            if state.status == ApplicationStatus.RUNNING:
                reply = await http.get(f"{url}/server_info")
                if reply.status_code == 200 and reply.json()["engine"]["tensor_parallel_size"] == size:
                    return
            assert state.status in (ApplicationStatus.DEPLOYING, ApplicationStatus.RUNNING), state

    async def main() -> None:
        body = {"model": smollm2_path.name.lower(), "prompt": "Rivers are", "max_tokens": 64, "temperature": 0}
        async with httpx.AsyncClient(timeout=300) as http:
            await ended(http, 1)
            replicas = set(processes("ServeReplica:resized"))
            body["model"] = (await http.get(f"{url}/v1/models")).json()["data"][0]["id"]

            async def text() -> str:
                reply = await http.post(f"{url}/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                return str(reply.json()["choices"][0]["text"])

            expected = await text()
            deploy(user_config={"tensor_parallel_size": 2})
            resized = asyncio.create_task(ended(http, 2))
            while not resized.done():
                assert await text() == expected
            await resized
            # What cannot be is logged, and the replica stays.
            deploy(user_config={"tensor_parallel_size": 1000})
            await asyncio.sleep(5)
            await ended(http, 2)
            assert await text() == expected
            assert set(processes("ServeReplica:resized")) == replicas

    try:
        deploy()
        asyncio.run(main())
    finally:
        serve.delete("resized")


def test_a_user_config_has_one_key() -> None:
    assert live_size({}, 3) == 3
    assert live_size({"tensor_parallel_size": 2}, 3) == 2
    for wrong in ({"tensor_parallel_size": "2"}, {"tensor_parallel_size": 0}, {"max_num_seqs": 4}):
        with pytest.raises(ConfigError, match="no other key"):
            live_size(wrong, 3)
