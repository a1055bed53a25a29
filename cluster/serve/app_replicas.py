"""All replicas of one app. Changes by operators must reach every replica, and a request must reach the replica that
holds what it names. The engines are found by their coordinators, the replicas themselves by Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.ranks.rank import NAMESPACE
from configs.errors import EngineError, LockstepError, OverloadedError, RequestError

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 0.05


def coordinators(app: str) -> dict[str, Any]:
    """Handles of the coordinators of an app's replicas, by name. Coordinators that have just ended are left out."""
    found: dict[str, Any] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(f"{app}:") and ":tp" not in name:
            with contextlib.suppress(ValueError):
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


async def replicas_beside(name: str, coordinator: Any) -> dict[str, Any]:
    """Coordinators of all replicas in the app of `name`, by name, with `coordinator` first. If the name belongs to no
    app, as for an engine without Ray Serve, only `coordinator`."""
    app, is_of_app, _ = name.rpartition(":")
    others = await asyncio.to_thread(coordinators, app) if is_of_app else {}
    return {name: coordinator, **{other: it for other, it in others.items() if other != name}}


async def call_each(replicas: dict[str, Any], call: Callable[[Any], Any]) -> dict[str, Any]:
    """Calls each coordinator. Returns each result or LockstepError by name, without coordinators that have ended.

    Args:
        call: starts a remote call of a coordinator.
    """

    async def outcome(coordinator: Any) -> Any:
        try:
            return await call(coordinator)
        except ray.exceptions.RayError as error:
            return error

    outcomes = await asyncio.gather(*map(outcome, replicas.values()))
    return {
        name: call_error(it) if isinstance(it, ray.exceptions.RayError) else it
        for name, it in zip(replicas, outcomes, strict=True)
        if len(replicas) == 1 or not isinstance(it, ray.exceptions.RayActorError)
    }


class ReplicaCalls:
    """Calls the method `answer` of an app's replicas."""

    def __init__(self, app: str, deployment: str) -> None:
        """Blocks. `deployment` is the app's only deployment."""
        # Ray makes calls by reference, with its token. Ray Serve's gRPC servers listen on loopback only.
        self._handle = serve.get_deployment_handle(deployment, app).options(_by_reference=True)

    async def ask(self, asker: str, question: str, arguments: tuple[Any, ...]) -> list[Any]:
        """The answers of all replicas except `asker`, and except those that have just ended or are stopping.

        Raises:
            OverloadedError: a replica did not answer.
        """
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answers = await self._answers(asker, question, arguments)
        except TimeoutError as error:
            answers = [error]
        answers = [it for it in answers if it is not None and not isinstance(it, ray.exceptions.RayActorError)]
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, RequestError):
                logger.warning("a replica did not answer %r of another one: %r", question, answer)
                raise OverloadedError("A replica of this app did not answer; try again later.") from answer
        return answers

    async def _answers(self, *arguments: Any) -> list[Any]:
        while True:
            try:
                return await self._handle.broadcast("answer", *arguments).results_async(return_exceptions=True)
            except DeploymentUnavailableError:
                await asyncio.sleep(_RETRY_S)  # the first call comes before Ray Serve's list of the replicas


def call_error(error: BaseException) -> LockstepError:
    """The error that a coordinator's call raised, or an EngineError if the coordinator's process died."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, LockstepError) else EngineError(f"the coordinator failed: {cause!r}")
    return EngineError(f"the coordinator died: {str(error).strip().splitlines()[0]}")
