"""`python -m cluster resize`: changes the number of ranks of a serving app's replicas."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from rich.console import Console

from cluster.ranks.rank import NAMESPACE
from cluster.serve.session import cluster_address, ray_session
from configs.errors import ConfigError, EngineError, LockstepError


def coordinators(app: str) -> dict[str, Any]:
    """Handles of the coordinators of an app's replicas, by name, without those that have just ended."""
    found: dict[str, Any] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(f"{app}:") and ":tp" not in name:
            with contextlib.suppress(ValueError):
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def resize_app(size: int, app: str, address: str | None) -> None:
    """Resizes every replica of `app`, one after the other, and prints how long requests waited. Raises ConfigError if
    there is no such cluster or app, or if it cannot have that size. Raises EngineError if a resize failed: then the
    replicas after it are not changed."""
    joined = cluster_address(address)
    if joined is None:
        raise ConfigError("no Ray cluster runs on this machine; give its address with --address host:port")
    with ray_session(joined, min_cpus=0):
        resize_all(size, app, Console(highlight=False, soft_wrap=True))


def resize_all(size: int, app: str, console: Console) -> None:
    """Like `resize_app`, in the cluster that this process has joined."""
    found = coordinators(app)
    if not found:
        raise ConfigError(f"no replica of an app {app!r} runs in this cluster; `serve status` lists the apps")
    for name, coordinator in found.items():
        try:
            resized = ray.get(coordinator.resize.remote(size))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, LockstepError) else EngineError(f"{name}: {cause!r}") from None
        except ray.exceptions.RayError:
            raise EngineError(f"{name} ended during the resize; see its log, then try again") from None
        ranks = f"{resized.size} rank{'' if resized.size == 1 else 's'}"
        console.print(f"{name}: {ranks}, requests waited {resized.pause_s:.2f} s", markup=False)
