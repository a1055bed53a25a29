"""A group of ranks in processes of their own behind the HTTP app in this one: what tests do to its ranks, and what its
streams bring."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.engine.preflight import read_tokenizer
from cluster.serve.placement import group_bundles
from cluster.serve.running_engine import RunningEngine, describe
from configs.load import parse_engine_config
from configs.schema import EngineConfig
from tests.helpers.scripted_engine import served


@dataclass
class Streamed:
    """What one stream brought, whatever its chunks were."""

    texts: dict[int, str] = field(default_factory=dict)
    """By choice."""
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)
    """Where logprobs were asked for: the tokens, and the likeliest ones in their places."""
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """Of the tokens, and of the likeliest in their places."""
    error: Any = None
    times: list[float] = field(default_factory=list)
    """When its chunks came: CLOCK_MONOTONIC."""

    @property
    def answer(self) -> tuple[Any, ...]:
        """All of it that must not depend on what happened meanwhile; numerics are exact."""
        return self.texts, self.reasons, self.tokens, self.logprobs, self.error

    def pause_between(self, start_s: float, stop_s: float) -> float | None:
        """The most seconds between two chunks, of which one came before `stop_s` and one after `start_s`; None where
        the stream began later or ended before."""
        first, last = bisect.bisect(self.times, start_s) - 1, bisect.bisect(self.times, stop_s)
        if first < 0 or last == len(self.times):
            return None
        return max(b - a for a, b in itertools.pairwise(self.times[first : last + 1]))

    def take(self, line: str) -> None:
        """A line of the stream."""
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        self.times.append(time.monotonic())
        chunk = json.loads(line.removeprefix("data: "))
        self.error = self.error or chunk.get("error")
        for choice in chunk.get("choices", []):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                assert index not in self.reasons, "a choice ended twice"
                self.reasons[index] = choice["finish_reason"]
            if logprobs := choice.get("logprobs"):
                top = [sorted(one) for one in logprobs["top_logprobs"]]
                self.tokens.setdefault(index, []).extend(zip(logprobs["tokens"], top, strict=True))
                values = self.logprobs.setdefault(index, [])
                # Token by token: how many of them share a chunk must not matter.
                for logprob, one in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
                    values += [logprob, *(one[token] for token in sorted(one))]


class ServedGroup:
    """A running one."""

    def __init__(self, engine: RunningEngine, http: httpx.AsyncClient, model: str) -> None:
        self.engine = engine
        self.http = http
        self.model = model

    async def stream(self, body: dict[str, Any]) -> Streamed:
        """What a streamed completion brings, to its end."""
        streamed = Streamed()
        request = {"model": self.model, "prompt": "Rivers are", "max_tokens": 64, "stream": True, **body}
        async with self.http.stream("POST", "/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                streamed.take(line)
        return streamed

    async def status(self) -> dict[str, Any]:
        """The coordinator's; raises when its pages do not add up."""
        status: dict[str, Any] = await asyncio.wrap_future(self.engine.coordinator.status.remote().future())
        return status

    async def after_steps(self, count: int) -> None:
        """Returns `count` steps later, or when nothing runs."""
        status = await self.status()
        end = status["num_steps"] + count
        while status["num_steps"] < end and (status["num_running"] or status["num_waiting"]):
            await asyncio.sleep(0.02)
            status = await self.status()

    async def strike(
        self, fault: signal.Signals, random_: random.Random, also_after_s: float | None = None
    ) -> tuple[float, float]:
        """Sends `fault` to a rank drawn at random, some steps from now. Returns the times of the fault and of the end
        of the rebuild.

        Args:
            also_after_s: seconds after which another rank gets the same fault. If None, no other rank does.
        """
        await self.after_steps(random_.randrange(1, 12))
        status = await self.status()
        struck = time.monotonic()
        first, *others = random_.sample([*status["pids"].values()], len(status["pids"]))
        os.kill(first, fault)
        if also_after_s is not None:
            await asyncio.sleep(also_after_s)
            os.kill(others[0], fault)
        while (now := await self.status())["num_rebuilds"] == status["num_rebuilds"] or now["state"] == "rebuilding":
            assert self.engine.failure is None, self.engine.failure
            await asyncio.sleep(0.05)
        return struck, time.monotonic()


def served_group(path: Path, name: str, **changes: Any) -> AbstractAsyncContextManager[ServedGroup]:
    """A group on CPUs of the Ray cluster there is. `changes`: of the configuration."""
    config = parse_engine_config({"model": str(path), "device": "cpu", "kv_cache": {"num_tokens": 16384}, **changes})
    return served_config(config, name)


@asynccontextmanager
async def served_config(config: EngineConfig, name: str) -> AsyncIterator[ServedGroup]:
    """The group of `config`, whose device is not left open, on the Ray cluster there is."""
    from ray.util.placement_group import placement_group, remove_placement_group

    gpus = config.device == "cuda"
    group = placement_group(group_bundles(config, gpus=gpus))
    try:
        spec = describe(config, gpus=gpus, announce=False)
        engine = await RunningEngine.start(spec, group, name)
        try:
            model = await engine.open_model(read_tokenizer(spec.config, spec.model, spec.tokenizer_path))
            await model.grammars.start()
            async with served(model) as url, httpx.AsyncClient(base_url=url, timeout=600) as http:
                yield ServedGroup(engine, http, model.model_name)
            await model.close()
        finally:
            await engine.close()
    finally:
        remove_placement_group(group)
