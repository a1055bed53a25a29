"""Changes to a running engine, each made between two steps: other ranks, other weights, sleep.

The thread that asks for a change loads the new ranks or weights while steps run. Then the coordinator's loop retires
the steps in flight and calls `take`. If `take` fails, `after_failure` restores the old state if possible.
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
    """How a change failed."""

    reported: LockstepError
    """The error for the caller that asked for the change."""
    fatal: LockstepError | None = None
    """The error that leaves no ranks running. None if the engine continues as before the change."""


class Change(Protocol):
    """One change. The coordinator's loop calls the methods in this order. No step is in flight from `take` on."""

    def is_due(self, scheduler: Scheduler) -> bool:
        """Whether the change may be made before the next step. If False, the loop asks again one step later."""

    def take(self, engine: Coordinator) -> None:
        """Makes the change. New requests are accepted meanwhile, and wait. Raises LockstepError if it fails."""

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """Restores the state before the change, or says why that is impossible.

        Args:
            failure: the error that `take` raised.
            pause_s: seconds for which requests have waited so far.
        """

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Returns when steps may run again. The loop calls this after the change was made and reported. Only `Sleep`
        blocks here."""


class OtherRanks:
    """Replaces the ranks by a group that is loaded already, and keeps the KV if the new ranks can take it over."""

    def __init__(self, others: RankGroup) -> None:
        self._others = others
        self._keeps_kv = False

    def is_due(self, scheduler: Scheduler) -> bool:
        """True: running requests wait during the change, like new ones."""
        return True

    def take(self, engine: Coordinator) -> None:
        """Ends the old ranks' generation and starts the new ranks in the next one."""
        self._keeps_kv = self._others.takes_kv(engine.ranks)
        engine.requeue(keeps_kv=self._keeps_kv, keeps_states=self._keeps_kv)
        logger.info("replacing the ranks; %d requests wait", len(engine.scheduler.live_ids()))
        engine.replace_ranks(self._others, engine.kept() if self._keeps_kv else None)
        engine.fit_ranks()

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """Starts the old ranks again, in one more generation."""
        logger.error("the new ranks do not run, and the old ones continue", exc_info=failure)
        if self._keeps_kv:
            engine.requeue()  # the other ranks may have taken some of the KV
        try:
            engine.replace_ranks(failure)
        except LockstepError as error:
            return Failed(error, error)
        stays = f"tensor_parallel_size stays {engine.ranks.size}, requests waited {pause_s:.2f} s"
        return Failed(EngineError(f"{stays}: {failure}"))

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Returns at once, because steps may run."""


@dataclass(frozen=True)
class WeightChange:
    """Switches to weights that the ranks have staged beside their current ones."""

    weights: Weights
    running: Running
    generation: int
    """The generation of the ranks that staged the weights."""
    take_staged: Callable[[], None]
    """Makes the ranks use the staged weights. Raises LockstepError if a rank cannot; then all processes have ended."""

    def is_due(self, scheduler: Scheduler) -> bool:
        """Whether the weights may change now. If `running` is "finish", they may not while a request has begun and not
        ended. New requests wait from the first call on."""
        if self.running == "finish" and scheduler.has_begun:
            scheduler.pause_admission()
            return False
        return True

    def take(self, engine: Coordinator) -> None:
        """Makes the ranks use the staged weights."""
        if self.generation != engine.scheduler.generation:
            raise EngineError("ranks were replaced while the weights were read; try again")
        engine.begin_weights(self.weights, recompute=self.running == "recompute")
        self.take_staged()
        engine.send_report()

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """Keeps the old weights if no rank has tried to use the new ones. Otherwise all ranks have ended, and the loop
        rebuilds them with the new weights."""
        if self.generation != engine.scheduler.generation:
            engine.scheduler.resume_admission()
            return Failed(failure)
        engine.wait_for_watcher()
        return Failed(EngineError(f"the group is rebuilt with the new weights: {failure}"), failure)

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Returns at once, because steps may run."""


class Sleep:
    """Frees the ranks' devices for other programs until `is_over` is set."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.woken: Future[float] = Future()
        """Its result: seconds from the wake-up until the ranks ran."""

    def is_due(self, scheduler: Scheduler) -> bool:
        """True: running requests wait during the sleep, like new ones."""
        return True

    def take(self, engine: Coordinator) -> None:
        """Makes the ranks move their weights to the host."""
        engine.requeue()
        error = engine.run_apart(EngineError("closed while it fell asleep"), engine.ranks.sleep).exception()
        if isinstance(error, LockstepError):
            raise error
        engine.life.enter(EngineState.SLEEPING)

    def after_failure(self, engine: Coordinator, failure: LockstepError, pause_s: float) -> Failed:
        """Makes the loop replace the ranks, because some could not move their weights to the host."""
        engine.mark_ranks_failed()
        return Failed(failure, failure)

    def wait_until_resumed(self, engine: Coordinator) -> None:
        """Sleeps until `is_over`, then restarts the ranks. Raises LockstepError if they do not start."""
        try:
            seconds = engine.sleep_until(self.is_over)
        except LockstepError as error:
            self.woken.set_exception(error)
            raise
        if seconds is None:
            self.woken.set_exception(EngineError("the engine ended"))
        else:
            self.woken.set_result(seconds)
