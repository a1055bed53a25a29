"""One running tensor-parallel group, seen from the process that uses it: coordinator actor plus client socket."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import actor_class
from cluster.coordinator_actor import CoordinatorActor, EngineFacts, EngineSpec
from cluster.engine_client import EngineClient
from cluster.openai.serving import OpenAIServing
from cluster.openai.tokenizer import Tokenizer
from cluster.rank_group import NAMESPACE, node_cores
from configs.checkpoint import resolve_model_path
from configs.model_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig

logger = logging.getLogger(__name__)

VERSION = "0.1.0"
CACHE_DIR = Path.home() / ".cache" / "lockstep"
_CLOSE_TIMEOUT_S = 15.0


def describe(config: EngineConfig, *, gpus: bool) -> EngineSpec:
    """Finds the model's files, reads what it is, and decides every auto value; logs each decision."""
    model_path = resolve_model_path(config.model, config.revision)
    model = read_model_config(model_path)
    resolved = resolve(config, model, HostFacts(num_cores=node_cores(), num_gpus=int(gpus)))
    for decision in resolved.decisions:
        logger.info("%s", decision)
    return EngineSpec(resolved.config, model, model_path)


@dataclass(frozen=True)
class RunningEngine:
    """A started group. `close` ends every process of it."""

    spec: EngineSpec
    facts: EngineFacts
    client: EngineClient
    coordinator: Any
    """Handle of the `CoordinatorActor`."""

    @classmethod
    async def start(cls, spec: EngineSpec, placement_group: PlacementGroup, name: str) -> RunningEngine:
        """Starts coordinator and ranks in `placement_group` and connects to them.

        Args:
            name: of the coordinator's actor in the namespace `lockstep`; ranks are `<name>:tp<rank>`.
        """
        coordinator = (
            actor_class(CoordinatorActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=0),
            )
            .remote(spec, name)
        )
        try:
            facts: EngineFacts = await coordinator.start.remote(placement_group)
        except ray.exceptions.RayTaskError as error:
            ray.kill(coordinator)
            raise error.cause from None
        client = await EngineClient.connect(facts.address)
        return cls(spec, facts, client, coordinator)

    async def open_serving(self) -> OpenAIServing:
        """The OpenAI side of this engine, once it has generated a token."""
        config = self.spec.config
        # Reading a tokenizer takes a third of a second, its first conversion from GGUF five.
        tokenizer = await asyncio.to_thread(
            Tokenizer.load,
            config.tokenizer or self.spec.model_path,
            cache_dir=CACHE_DIR,
            chat_template=config.server.chat_template,
        )
        assert config.served_model_name is not None, "served_model_name is resolved before the engine starts"
        serving = OpenAIServing(
            self.client,
            tokenizer,
            model_name=config.served_model_name,
            max_model_len=self.facts.max_model_len,
            server=config.server,
            vocab_size=self.spec.model.vocab_size,
            version=VERSION,
            system_fingerprint=f"lockstep-{VERSION}-tp{config.tensor_parallel_size}-{config.dtype}",
        )
        await serving.warm_up(config.parallel.step_timeout_s)
        return serving

    async def close(self) -> None:
        """Ends requests, ranks and coordinator, in that order."""
        await self.client.close()
        try:
            await asyncio.wait_for(self.coordinator.close.remote(), _CLOSE_TIMEOUT_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("the coordinator did not close in order: %s", error)
        ray.kill(self.coordinator)
