"""The Ray Serve application: `import_path: cluster.app:build_app`.

One replica serves one tensor-parallel group. The replica itself is the HTTP ingress (one hop). Its coordinator and
ranks are actors in the same placement group.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.engine.preflight import check_checkpoint, read_tokenizer
from cluster.http.active import ActiveRequests
from cluster.http.keys import open_keys
from cluster.logs import log_to_stderr
from cluster.messages.state import EngineLife
from cluster.observability.replica import replica_telemetry
from cluster.ranks.host import environment_options
from cluster.serve.app_replicas import ReplicaCalls
from cluster.serve.autoscaling import KV_USAGE, QUEUED_TOKENS, RUNNING_SHARE
from cluster.serve.draining import StopWatch, replicas_are_stopping
from cluster.serve.exposure import check_serve_host, keep_grpc_local
from cluster.serve.haproxy import REPLICA_SETTINGS, reinstall
from cluster.serve.placement import NodeResources, check_fits, group_bundles, uses_gpus
from cluster.serve.replicas import replica_options
from cluster.serve.running_engine import RunningEngine, describe
from configs.errors import ConfigError, LockstepError
from configs.load import parse_engine_config
from configs.resolve import default_max_num_seqs
from configs.schema import EngineConfig, resolved

if TYPE_CHECKING:
    from cluster.http.guard import Guard
    from cluster.requests.served_model import ServedModel

logger = logging.getLogger(__name__)

DEPLOYMENT = "Engine"
"""Name of the application's only deployment, as the config file's `deployments:` must name it."""

# Serve's own limit must exceed what the engine runs and queues, because only the engine's refusals name the full limit.
_ONGOING_PER_SEQ = 4
_HEALTH_CHECK_PERIOD_S = 2.0
_HEALTH_CHECK_TIMEOUT_S = 10.0
_WATCH_S = 0.05
# Seconds that Serve gives a stopping replica beyond its timeout, to detect the stop and notify clients.
_LAST_WORDS_S = 10.0


class Engine:
    """The Engine replica: one group and its HTTP API."""

    async def __init__(self, config: EngineConfig, gpus: bool) -> None:  # type: ignore[misc]  # Serve awaits it
        keep_grpc_local()
        reinstall()
        await asyncio.to_thread(check_serve_host, config)
        self._keys = open_keys(config.server)
        life = EngineLife()
        self._requests = ActiveRequests(life=life)
        context = serve.get_replica_context()
        self._stop_watch = StopWatch(
            self._requests,
            functools.partial(replicas_are_stopping, context.app_name),
            period_s=_HEALTH_CHECK_PERIOD_S,
            shutdown_timeout_s=config.server.shutdown_timeout_s,
        )
        placement_group = ray.util.get_current_placement_group()
        assert placement_group is not None, "the deployment asks for a placement group"
        name = f"{context.app_name}:{context.replica_id.unique_id}"
        log_to_stderr(config.observability.log_format, replica=name)
        spec = await asyncio.to_thread(describe, config, gpus=gpus)  # it may ask another node
        self._max_num_seqs = resolved(spec.config.scheduler.max_num_seqs)
        self._telemetry = replica_telemetry(spec.config, context, life)
        starting = asyncio.create_task(RunningEngine.start(spec, placement_group, name, self._telemetry))
        try:
            # The tokenizer is read long before the weights are loaded, so that its errors are reported at once.
            tokenizer = await asyncio.to_thread(read_tokenizer, spec.config, spec.model, spec.tokenizer_path)
        except BaseException:
            starting.cancel()
            await asyncio.wait([starting])
            raise
        self._engine = await starting
        self._model: ServedModel = await self._engine.open_model(tokenizer)
        calls = await asyncio.to_thread(ReplicaCalls, context.app_name, context.deployment)
        self._model.others.ask = functools.partial(calls.ask, name)
        await self._engine.become_like_others()
        await self._model.grammars.start()
        self._watching = asyncio.gather(self._stop_watch.run(), self._end_with_engine())
        # The start's objects stay, so collections may skip them. Scanning them would delay every stream.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Guard:
        # The app is built here and not at import, because an app object that refers to the engine cannot be pickled.
        from cluster.serve.ingress import create_app

        # Serve adds a request id to every response, and to every request without an id.
        return create_app(self._model, self._requests, self._keys, names_responses=False)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Resizes the group to the size in `user_config`. Ray Serve calls this at the start and after each change."""
        try:
            await self._engine.resize(live_size(user_config, self._engine.spec.config.tensor_parallel_size))
        except LockstepError as error:
            # If this raised, Serve would end this replica and try the same with another.
            logger.error("user_config was not applied, and the replica is unchanged; correct it: %s", error)

    async def answer(self, asker: str, question: str, arguments: tuple[Any, ...]) -> Any:
        """Answers a replica of this app (`OtherReplicas.answer`). None if it is this one."""
        return None if asker == self._engine.name else await self._model.others.answer(question, arguments)

    async def check_health(self) -> None:
        """Records that Serve checks the health, which shows that it is not stopping this replica."""
        self._stop_watch.asked()

    async def _end_with_engine(self) -> None:
        """Ends this process once the engine has failed and every request has got its error. Serve then replaces the
        replica and its group. HAProxy uses another replica, because no process answers here any more."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if (failure := self._engine.failure) is not None:
                logger.critical("the engine failed, and this replica ends; Ray Serve starts another: %s", failure)
                await self._requests.drain(0.0)
                logging.shutdown()
                os._exit(1)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for `autoscaling_config.policy`. Ray Serve calls this if the setting exists."""
        board, stats = self._telemetry.board, self._telemetry.board.latest
        if stats is None:
            return {}
        return {
            QUEUED_TOKENS: float(stats.scheduler.num_waiting_tokens),
            KV_USAGE: board.kv_usage,
            RUNNING_SHARE: stats.scheduler.num_running / self._max_num_seqs,
        }

    async def __del__(self) -> None:
        if hasattr(self, "_watching"):  # absent if the constructor failed, as below
            self._watching.cancel()
        if hasattr(self, "_model"):
            await self._model.close()
        if hasattr(self, "_engine"):
            await self._engine.close()
            self._telemetry.close()


def live_size(user_config: Mapping[str, Any], started: int) -> int:
    """The `tensor_parallel_size` in a `user_config`, or `started`, the size in `args`, if it has none.

    Raises:
        ConfigError: `user_config` has another key or an invalid value.
    """
    size = user_config.get("tensor_parallel_size", started)
    if set(user_config) - {"tensor_parallel_size"} or type(size) is not int or size < 1:
        raise ConfigError(
            f"user_config={dict(user_config)}: it may have tensor_parallel_size, at least 1, and no other key"
        )
    return size


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application for one `EngineConfig`. Finds all errors that can be known before placement.

    Args:
        args: `applications[].args` of the config file.

    Raises:
        ConfigError: a setting is wrong, the checkpoint does not fit, or no node is large enough for a group.
    """
    return engine_app(parse_engine_config(args), {})


def engine_app(
    config: EngineConfig, options: Mapping[str, Any], environment: Mapping[str, str] = MappingProxyType({})
) -> serve.Application:
    """The application. `options` replace our own options of its deployment.

    Args:
        options: an entry of the file's `deployments:`, without its name. Ray Serve applies the entry itself if it gets
            the file, but not if it gets an application.
        environment: variables that every process of the cluster starts with, as far as known.

    Raises:
        ConfigError: the error is one of `build_app`, or Ray Serve does not accept the options.
    """
    if config.server.api_keys and Path(config.server.api_keys).expanduser().exists():
        open_keys(config.server)  # if the file is missing, this may be a node that does not serve
    check_serve_host(config)
    nodes = NodeResources.from_ray(ray.nodes())
    gpus = uses_gpus(config, nodes)
    if config.is_local_model:
        describe(config, gpus=gpus)
        check_checkpoint(config)
    bundles = group_bundles(config, gpus=gpus)
    check_fits(config, bundles, nodes)
    max_num_seqs = config.scheduler.max_num_seqs or default_max_num_seqs(on_gpu=gpus)
    ongoing = max_num_seqs * _ONGOING_PER_SEQ + config.scheduler.max_num_queued_requests
    deploy = serve.deployment(
        name=DEPLOYMENT,
        **replica_options(config),
        placement_group_bundles=bundles,
        placement_group_strategy=config.placement.strategy,
        ray_actor_options={"num_cpus": bundles[0]["CPU"], **environment_options(REPLICA_SETTINGS, environment)},
        max_ongoing_requests=ongoing,
        # While no replica takes requests, as during a replacement, Ray Serve holds them. Their number needs a limit.
        max_queued_requests=ongoing,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=_HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout_s + _LAST_WORDS_S,
    )
    if options.get("user_config"):
        live_size(options["user_config"], config.tensor_parallel_size)
    deployment = deploy(serve.ingress()(Engine))
    if options:
        try:
            deployment = deployment.options(**options)
        except (TypeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"applications[0].deployments: Ray Serve does not accept it; correct it: {error}"
            ) from None
    return deployment.bind(config, gpus)
