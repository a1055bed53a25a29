"""One running tensor-parallel group, in the process that uses it: its coordinator actor and the client socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.coordinator_actor import CoordinatorActor, EngineFacts, ReplicaState
from cluster.engine.engine_spec import EngineSpec
from cluster.engine.fingerprint import system_fingerprint
from cluster.engine.preflight import find_tokenizer, read_model
from cluster.engine.resizing import Resized
from cluster.messages.engine import WeightsChanged
from cluster.observability.telemetry import Telemetry
from cluster.ranks.host import host_facts
from cluster.ranks.liveness import StoppedClock
from cluster.ranks.rank import NAMESPACE
from cluster.ranks.rank_actor import actor_class
from cluster.requests.engine_client import EngineClient
from cluster.requests.engine_info import EngineInfo
from cluster.requests.served_model import ServedModel
from cluster.serve.app_replicas import call_each, call_error, replicas_beside
from cluster.text.tokenizer import Tokenizer
from cluster.version import VERSION
from configs.checkpoint import resolve_model_path
from configs.errors import ConfigError, EngineError, LockstepError
from configs.generation_config import read_generation_defaults
from configs.read_draft_head import with_draft_head
from configs.resolve import resolve
from configs.schema import EngineConfig

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 15.0
# Maximum seconds without a report. The coordinator reports once a second, even while a step hangs.
_SILENCE_S = 30.0


def describe(config: EngineConfig, *, gpus: bool, announce: bool = True) -> EngineSpec:
    """Finds the files of the model and of its tokenizer, reads the model's config, and decides every auto value.

    Weights on the Hub are not fetched here but by the ranks, because the ranks' nodes need them.

    Args:
        announce: whether to log each decision. False if `gpus` is a guess.
    """
    model_path = resolve_model_path(config.model, config.revision, weights=config.has_local_weights)
    model = with_draft_head(read_model(config, model_path), config)
    host = host_facts(gpus=gpus)
    resolved = resolve(config, model, host)
    if announce:
        for decision in resolved.decisions:
            logger.info("%s", decision)
    return EngineSpec(resolved.config, model, model_path, find_tokenizer(config, model_path), config, host)


@dataclass(eq=False)
class RunningEngine:
    """A started group. All of its processes end with `close`, or when the process that started it ends."""

    spec: EngineSpec
    facts: EngineFacts
    client: EngineClient
    coordinator: Any
    """Handle of the `CoordinatorActor`."""
    name: str
    """Name of the coordinator's actor: `<app>:<replica>` if Ray Serve runs the engine."""
    _run: asyncio.Future[None]
    _stopped: StoppedClock = field(default_factory=StoppedClock)

    @classmethod
    async def start(
        cls, spec: EngineSpec, placement_group: PlacementGroup, name: str, telemetry: Telemetry | None = None
    ) -> RunningEngine:
        """Starts coordinator and ranks in `placement_group` and connects to them.

        Args:
            name: name of the coordinator's actor in the namespace `lockstep`. Ranks are `<name>:tp<rank>`.
            telemetry: gets the events of this engine. If None, a new one is made.

        Raises:
            LockstepError: the start failed. None of its processes is left.
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
            # This call ends if the engine fails, even if its process dies.
            run = asyncio.wrap_future(coordinator.run.remote().future())
            client = await EngineClient.connect(facts.address, telemetry=telemetry)
        except BaseException as error:
            ray.kill(coordinator)  # the coordinator owns the ranks, so they end with it
            if isinstance(error, ray.exceptions.RayError):
                raise call_error(error) from None
            raise
        return cls(spec, facts, client, coordinator, name, run)

    @property
    def failure(self) -> LockstepError | None:
        """The reason why the engine failed. None while it serves. A failed engine must be replaced."""
        if self._run.done():
            error = self._run.exception()
            return EngineError("the engine was closed") if error is None else call_error(error)
        if self.client.failure is not None:
            return EngineError(self.client.failure)
        timeout_s = self.spec.config.recovery.stall_timeout_s
        if self._stopped.look((self.facts.pid,)).get(self.facts.pid, 0.0) >= timeout_s:
            return EngineError(f"the coordinator is stopped for longer than recovery.stall_timeout_s={timeout_s:g}")
        if (silence_s := self.client.board.age_s) > _SILENCE_S:
            return EngineError(f"the coordinator has not reported for {silence_s:.0f} s, so it is stuck")
        return None

    async def open_model(self, tokenizer: Tokenizer) -> ServedModel:
        """Returns the model that serves requests, once the engine has generated a token. `tokenizer`: that of
        `spec`."""
        config = self.spec.config
        phases = dict(self.facts.phase_s)
        began = time.monotonic()
        first_name, *other_names = config.model_names
        served = ServedModel(
            self.client,
            tokenizer,
            model_name=first_name,
            other_names=other_names,
            max_model_len=self.facts.max_model_len,
            server=config.server,
            vocab_size=self.spec.model.vocab_size,
            eos_token_ids=self.spec.model.eos_token_ids,
            defaults=read_generation_defaults(self.spec.model_path, config.server.generation_config),
            version=VERSION,
            info=EngineInfo.of(config, self.facts.num_pages),
            max_item_tokens=self.facts.max_item_tokens,
            operations=self,
            system_fingerprint=system_fingerprint(self.spec, (load.platform for load in self.facts.loads)),
        )
        await _answer(self.coordinator.set_tokenizer.remote(tokenizer.to_json()))
        await served.warm_up(config.parallel.step_timeout_s)
        phases["warming up"] = time.monotonic() - began
        self.client.telemetry.started(
            phases,
            peak_flops=self.facts.peak_flops,
            peak_bandwidth=self.facts.peak_bandwidth,
            version=VERSION,
            tensor_parallel_size=config.tensor_parallel_size,
            dtype=config.dtype,
            max_model_len=self.facts.max_model_len,
            page_size=config.kv_cache.page_size,
            num_pages=self.facts.num_pages,
            weights_version="",
        )
        return served

    async def resize(self, size: int) -> Resized:
        """Changes the number of ranks to `size` while requests run. Raises the errors of
        `cluster.engine.resizing.resize`."""
        return await _answer(self.coordinator.resize.remote(size))

    async def resize_app(self, size: int) -> float:
        """Changes the number of ranks of every replica of the app, one after the other. Raises the errors of `resize`
        if a replica cannot; the replicas after it are unchanged.

        Returns:
            The longest time in seconds for which the requests of a replica waited.
        """
        pause_s = 0.0
        for name, coordinator in (await replicas_beside(self.name, self.coordinator)).items():
            for outcome in (await call_each({name: coordinator}, lambda it: it.resize.remote(size))).values():
                if isinstance(outcome, LockstepError):
                    raise type(outcome)(f"{name}: {outcome}")
                pause_s = max(pause_s, outcome.pause_s)
        return pause_s

    async def sleep(self, *, wakes: bool = False) -> float:
        """Frees the memory of the devices of every replica of the app. If `wakes`, takes it back instead. Replicas that
        are in the requested state already stay in it.

        Returns:
            Seconds that the slowest replica took.

        Raises:
            ConfigError: no replica changed its state.
            EngineError: a replica failed.
        """
        outcomes = await self._on_every_replica(lambda it: (it.wake_up if wakes else it.sleep).remote())
        seconds = [it for it in outcomes.values() if isinstance(it, float)]
        for outcome in outcomes.values():
            if isinstance(outcome, LockstepError) and not (seconds and isinstance(outcome, ConfigError)):
                raise outcome
        return max(seconds)

    async def update_weights(self, model: str | None = None, **how: Any) -> WeightsChanged | None:
        """Replaces the weights of every replica of the app by those of checkpoint `model`, also for requests in flight.
        `cluster.engine.weight_change` has the other arguments. Tensors of a trainer change only this replica.

        Raises:
            LockstepError: a replica could not change. The other replicas have returned to their earlier weights.
        """
        if model is None:
            of_tensors: WeightsChanged | None = await _answer(self.coordinator.update_weights.remote(**how))
            return of_tensors
        before = await self._on_every_replica(lambda it: it.state_in_app.remote())
        outcomes = await self._on_every_replica(lambda it: it.update_weights.remote(model, **how))
        failed = {name: it for name, it in outcomes.items() if isinstance(it, LockstepError)}
        if not failed:
            changed: WeightsChanged = outcomes[self.name]
            return changed
        replicas = await replicas_beside(self.name, self.coordinator)
        for name in outcomes.keys() - failed.keys():
            logger.warning("%s takes its weights from before, because another replica could not change", name)
            await _answer(replicas[name].update_weights.remote(**before[name].source))
        name, error = next(iter(failed.items()))
        raise type(error)(str(error) if len(outcomes) == 1 else f"{name}: {error}")

    async def become_like_others(self) -> None:
        """Takes the weights and the number of ranks that operators have given to the app's other replicas since their
        start, and sleeps if they sleep, if these started like this one. Warns if this replica cannot have that number
        of ranks."""
        known = await self._on_every_replica(lambda it: it.state_in_app.remote())
        for name, state in known.items():
            if name == self.name or not isinstance(state, ReplicaState) or not state.starts_as(self.spec):
                continue
            if state.has_other_weights:
                await _answer(self.coordinator.update_weights.remote(**state.source))
            if state.size is not None:
                try:
                    await self.resize(state.size)
                except ConfigError as error:
                    logger.warning("this replica has another number of ranks than the app's others: %s", error)
            if state.sleeps:
                await _answer(self.coordinator.sleep.remote())
            return

    async def flush_cache(self) -> None:
        """Drops the cached prefixes of every replica of the app that no running request uses."""
        await self._on_every_replica(lambda it: it.flush_cache.remote())

    async def _on_every_replica(self, call: Callable[[Any], Any]) -> dict[str, Any]:
        return await call_each(await replicas_beside(self.name, self.coordinator), call)

    async def close(self) -> None:
        """Ends requests, ranks and coordinator, in that order. Calling it again does nothing."""
        await self.client.close()
        if not self._run.done():
            self.coordinator.close.remote()
            await asyncio.wait((self._run,), timeout=_CLOSE_TIMEOUT_S)
        if not self._run.done():
            logger.warning("the coordinator did not close within %g s", _CLOSE_TIMEOUT_S)
        elif (error := self._run.exception()) is not None:
            logger.warning("the engine had failed: %s", call_error(error))
        ray.kill(self.coordinator)


async def _answer(call: Any) -> Any:
    """Waits for the result of a coordinator's call. Raises the call's error, or an EngineError if the process died."""
    try:
        return await call
    except ray.exceptions.RayError as error:
        raise call_error(error) from None
