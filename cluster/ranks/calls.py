"""Calls of ranks' methods. Failures of ranks become errors of the engine."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from cluster.ranks.rank import Rank
from configs.errors import ConfigError, DeadlineError, EngineError, LockstepError, RankDiedError, RankLostError

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_STACKS_TIMEOUT_S = 2.0
# Seconds to wait for further failures: a dying process breaks its peers' connections, and their errors may come first.
_CAUSE_S = 0.5
_NEXT = "The replica is being replaced; send the request again."


def call(
    ranks: Iterable[Rank],
    method: str,
    *args: object,
    size: int,
    timeout_s: float,
    watched: Sequence[Rank] = (),
) -> list[Any]:
    """Calls `method` on `ranks` and returns the results. Raises the first failure at once, because the other ranks may
    wait for the failed one in a collective.

    Args:
        size: number of ranks of the group.
        timeout_s: `parallel.init_timeout_s`. Infinite: no timeout.
        watched: other ranks of the group. If one of them dies meanwhile, that is raised too.
    """
    calls = {rank.index: getattr(rank.actor, method).remote(*args) for rank in ranks}
    deadline = time.monotonic() + timeout_s
    pending = list(calls.values())
    while pending:
        left_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=_WATCH_INTERVAL_S if watched and left_s else left_s)
        if not done and watched and left_s:
            call(watched, "progress", size=size, timeout_s=left_s)
            continue
        if not done:
            raise DeadlineError(
                f"{len(pending)} of {size} ranks did not answer within parallel.init_timeout_s={timeout_s:g}; see "
                "their logs, or raise it"
            )
        if call_failure(0, size, done[0]) is not None:
            raise failure_of(calls, size)
    return ray.get(list(calls.values()))


def watch(
    runs: Mapping[int, Any], size: int, is_over: Callable[[], bool], on_failure: Callable[[LockstepError], None]
) -> None:
    """Starts a thread that calls `on_failure` when one of `runs` (rank -> call) ends, unless `is_over` by then."""

    def look() -> None:
        try:
            done: list[Any] = []
            while not done and not is_over():
                # A pending call fails within 25 ms of its process's death. The timeout only bounds how late this thread
                # ends.
                done, _ = ray.wait(list(runs.values()), num_returns=1, timeout=_WATCH_INTERVAL_S)
            if not is_over():
                on_failure(failure_of(runs, size))
        except Exception as error:  # without this thread, the engine would not notice that a rank dies
            logger.exception("watching the ranks failed; please report this bug")
            if not is_over():
                on_failure(EngineError(f"watching the ranks failed: {error!r}"))

    threading.Thread(target=look, name="rank-watch", daemon=True).start()


def log_stacks(ranks: Iterable[Rank], step_age_s: float) -> None:
    """Starts a thread that logs the stacks of each rank's threads, because a step takes suspiciously long."""
    threading.Thread(target=_log_stacks, args=(list(ranks), step_age_s), name="rank-stacks", daemon=True).start()


def _log_stacks(ranks: list[Rank], step_age_s: float) -> None:
    logger.warning("a step has run for %.1f s; the stacks of the ranks:", step_age_s)
    for rank, stacks in [(rank.index, rank.actor.stacks.remote()) for rank in ranks]:
        try:
            logger.warning("rank %d:\n%s", rank, ray.get(stacks, timeout=_STACKS_TIMEOUT_S))
        except ray.exceptions.RayError as error:  # neither a stopped nor a dead process answers
            logger.warning("rank %d sent no stacks, so it is stopped or dead: %s", rank, type(error).__name__)


def failure_of(calls: Mapping[int, Any], size: int) -> LockstepError:
    """The reason why one of `calls` (rank -> call) failed: preferably the failure of a rank that failed by itself.

    Args:
        size: number of ranks of the group.
    """
    done: list[Any] = []
    failures: list[LockstepError] = []
    for wait_s in (0.0, _CAUSE_S):
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=wait_s)
        found = [call_failure(rank, size, call) for rank, call in calls.items() if call in done]
        failures = [error for error in found if error is not None]
        # Other EngineErrors may only be effects of a lost peer.
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
    """The error with which the `call` of rank `rank` ended. None if the call returned."""
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
            public_message=f"Rank {rank} of {size} failed with an error of its own, which is in the log. {_NEXT}",
            rank=rank,
        )
    except ray.exceptions.RayError as error:
        death = rank_death(str(error))
        return RankLostError(
            f"rank {rank} died: {death}; see its log and the kernel's",
            public_message=f"Rank {rank} of {size} died: {death}. {_NEXT}",
            rank=rank,
        )
    return None


def rank_death(ray_says: str) -> str:
    """The cause of an actor's end in one line, without Ray's addresses. Ray does not report the signal."""
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
