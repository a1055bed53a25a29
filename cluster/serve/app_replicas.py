"""All replicas of one app, found by their coordinators. Changes by operators must reach every replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray

from cluster.ranks.rank import NAMESPACE
from configs.errors import EngineError, LockstepError


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


def call_error(error: BaseException) -> LockstepError:
    """The error that a coordinator's call raised, or an EngineError if the coordinator's process died."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, LockstepError) else EngineError(f"the coordinator failed: {cause!r}")
    return EngineError(f"the coordinator died: {str(error).strip().splitlines()[0]}")
