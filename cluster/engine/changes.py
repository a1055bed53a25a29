"""Changes of an engine that serves, each made between two steps: other ranks, other weights, sleep.

A change is loaded beside the steps, by the thread that asks for it. The coordinator's loop then retires the steps in
flight and calls `take`. Where `take` fails, `after_failure` has what was there before go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cluster.messages.engine import Running, Weights
from cluster.messages.state import EngineState
from cluster.scheduling.scheduler import Scheduler
from configs.errors import EngineError, LockstepError

if TYPE_CHECKING:
    from cluster.engine.coordinator import Coordinator
    from cluster.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)


class Failed(NamedTuple):
    """The end of a change that failed."""

    reported: LockstepError
    """The error that the caller gets who asked for the change."""
    fatal: LockstepError | None = None
    """Why no ranks are left that run. None: the engine goes on as before."""


class Change(Protocol):
    """One change. The coordinator's loop calls the methods in this order; no step is in flight from `take` on."""

    def is_due(self, scheduler: Scheduler) -> bool:
        """Whether the change may be made before the next step. False: the loop asks again after that step."""

    def take(self, engine: Coordinator) -> None:
        """Makes the change, while requests are taken and wait. Raises LockstepError where that failed."""

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """Goes on with what was there before the change, or says why that cannot be.

        Args:
            failure: what `take` raised.
            pause_s: seconds that requests have waited so far.
        """

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Returns when steps may run again. The loop calls it after the change was made and its caller was told; only
        `Sleep` blocks here."""


class OtherRanks:
    """Other ranks, which are loaded, take the place of those there are, with the KV that they can take over."""

    def __init__(self, others: RankGroup) -> None:
        self._others = others
        self._keeps_kv = False

    def is_due(self, scheduler: Scheduler) -> bool:
        """Always: running requests wait with all others."""
        return True

    def take(self, engine: Coordinator) -> None:
        """Runs the other ranks in the next generation."""
        self._keeps_kv = self._others.takes_kv(engine.ranks)
        engine.requeue(keeps_kv=self._keeps_kv)
        logger.info("the ranks are exchanged, %d requests wait", len(engine.scheduler.live_ids()))
        engine.replace_ranks(self._others, engine.cached_pages() if self._keeps_kv else None)
        engine.fit_ranks()

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """Runs the old ranks again, in one more generation."""
        logger.error("the new ranks do not run; those of before go on", exc_info=failure)
        if self._keeps_kv:
            engine.requeue()  # the others may have taken some of the KV
        try:
            engine.replace_ranks(failure)
        except LockstepError as error:
            return Failed(error, error)
        stays = f"tensor_parallel_size stays {engine.ranks.size}, requests waited {pause_s:.2f} s"
        return Failed(EngineError(f"{stays}: {failure}"))

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Steps may run at once."""


@dataclass(frozen=True)
class WeightChange:
    """Weights that the ranks have beside those that serve."""

    weights: Weights
    running: Running
    generation: int
    """The generation of ranks that staged the weights."""
    take_staged: Callable[[], None]
    """Has the ranks serve with them; raises LockstepError where one cannot, and then all processes have ended."""

    def is_due(self, scheduler: Scheduler) -> bool:
        """With `running` "finish", once no request runs that has begun; new ones wait meanwhile."""
        if self.running == "finish" and scheduler.has_begun:
            scheduler.hold_new()
            return False
        return True

    def take(self, engine: Coordinator) -> None:
        """Has the ranks serve with the weights."""
        if self.generation != engine.scheduler.generation:
            raise EngineError("ranks were replaced while the weights were read; try again")
        engine.begin_weights(self.weights, recompute=self.running == "recompute")
        self.take_staged()
        engine.send_report()

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """The old weights go on serving if no rank tried to take the new ones. Else all ranks have ended, and the loop
        rebuilds them with the new weights."""
        if self.generation != engine.scheduler.generation:
            engine.scheduler.admit_new()
            return Failed(failure)
        engine.wait_for_watcher()
        return Failed(EngineError(f"the group is rebuilt with the new weights: {failure}"), failure)

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Steps may run at once."""


class Sleep:
    """A time in which the ranks' devices are free for others."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.woken: Future[float] = Future()
        """Seconds that the ranks took to come back."""

    def is_due(self, scheduler: Scheduler) -> bool:
        """Always: running requests wait with all others."""
        return True

    def take(self, engine: Coordinator) -> None:
        """Has the ranks put their weights away."""
        engine.requeue()
        error = engine.run_apart(EngineError("closed while it fell asleep"), engine.ranks.sleep).exception()
        if isinstance(error, LockstepError):
            raise error
        engine.life.enter(EngineState.SLEEPING)

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """The loop will replace the ranks that could not put their weights away."""
        engine.mark_ranks_failed()
        return Failed(failure, failure)

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Sleeps until `is_over`, and has the ranks come back; raises LockstepError where they do not."""
        try:
            seconds = engine.sleep_until(self.is_over)
        except LockstepError as error:
            self.woken.set_exception(error)
            raise
        if seconds is None:
            self.woken.set_exception(EngineError("the engine ended"))
        else:
            self.woken.set_result(seconds)
