"""`python -m cluster resize`: changes the number of ranks of a serving app's replicas."""

from __future__ import annotations

import ray
from rich.console import Console

from cluster.serve.app_replicas import coordinators
from cluster.serve.session import cluster_address, ray_session
from configs.errors import ConfigError, EngineError, LockstepError


def resize_app(size: int, app: str, address: str | None) -> None:
    """Resizes every replica of `app`, one after the other, and prints how long requests waited. Raises ConfigError if
    the cluster or app does not exist, or cannot have that size. Raises EngineError if a resize failed: the replicas
    after it are not changed then."""
    joined = cluster_address(address)
    if joined is None:
        raise ConfigError("no Ray cluster runs on this machine; give its address with --address host:port")
    with ray_session(joined, min_cpus=0):
        resize_all(size, app, Console(highlight=False, soft_wrap=True))


def resize_all(size: int, app: str, console: Console) -> None:
    """Resizes every replica of `app` in the cluster that this process has joined. Has the errors of `resize_app`."""
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
