"""Why a call of a rank failed, in the engine's own words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ray

from configs.errors import ConfigError, DeadlineError, EngineError, LockstepError, RankDiedError, RankLostError

# A process that dies breaks its peers' connections, and their errors may come first.
_CAUSE_S = 0.5
_NEXT = "The replica is being replaced; send the request again."


def failure_of(calls: Mapping[int, Any], size: int) -> LockstepError:
    """Why `calls` by rank, one of which has ended, failed: a rank that died or raised of itself, where one did.

    Args:
        size: ranks of the group.
    """
    done: list[Any] = []
    failures: list[LockstepError] = []
    for wait_s in (0.0, _CAUSE_S):
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=wait_s)
        found = [call_failure(rank, size, call) for rank, call in calls.items() if call in done]
        failures = [error for error in found if error is not None]
        # Other errors of the engine may be what the loss of a peer did to this rank.
        for error in failures:
            if isinstance(error, RankDiedError | ConfigError):
                return error
    if not failures:
        return RankDiedError("a rank left its step loop without an error")
    silent = [str(rank) for rank, call in calls.items() if call not in done]
    if isinstance(failures[0], DeadlineError) and silent:
        return DeadlineError(f"{failures[0]} (no word from rank {', '.join(silent)})")
    return failures[0]


def call_failure(rank: int, size: int, call: Any) -> LockstepError | None:
    """How the ended `call` of rank `rank` failed; None if it returned."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError):
            return cause
        if isinstance(cause, EngineError):
            kind = type(cause)
            return kind(f"rank {rank} failed: {cause}")
        return RankDiedError(
            f"rank {rank} failed: {type(cause).__name__}: {cause}",
            told=f"Rank {rank} of {size} failed with an error of its own, which is in the log. {_NEXT}",
        )
    except ray.exceptions.RayError as error:
        death = rank_death(str(error))
        return RankLostError(
            f"rank {rank} died: {death}; see its log and the kernel's",
            told=f"Rank {rank} of {size} died: {death}. {_NEXT}",
        )
    return None


def rank_death(ray_says: str) -> str:
    """What ended an actor, in one line without Ray's addresses; Ray does not know the signal."""
    if "node has died" in ray_says:
        return "its node was lost"
    exit_type = re.search(r"Worker exit type: (\w+)", ray_says)
    if exit_type is None:
        return "Ray lost its process"
    if exit_type[1] == "NODE_OUT_OF_MEMORY":
        return "Ray ended its process because the node was out of memory"
    return (
        "its process was killed (signal 9, which the kernel sends when the node or the container is out of memory) or "
        f"crashed ({exit_type[1]})"
    )
