"""The state of an engine: one word, the same in health checks, metrics, `status` and on the page.

The coordinator has a state and reports it. The Engine replica has another one, which users see. It follows the reports
while the replica serves, and also covers the replica's start and stop.
"""

from __future__ import annotations

import logging
from enum import StrEnum

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    """States in the order in which an engine may have them. An engine in any state may become dead."""

    STARTING = "starting"
    """No token has been generated yet."""
    RUNNING = "running"
    REBUILDING = "rebuilding"
    """Ranks are being replaced: no step runs, and requests are accepted and wait."""
    SLEEPING = "sleeping"
    """The devices are free for other programs: no step runs, and requests are accepted and wait."""
    DRAINING = "draining"
    """The engine is being stopped: running requests are finished, and no new ones are accepted."""
    DEAD = "dead"
    """The engine has ended for good."""


_AFTER = {
    EngineState.STARTING: {EngineState.RUNNING, EngineState.DRAINING, EngineState.DEAD},
    EngineState.RUNNING: {EngineState.REBUILDING, EngineState.SLEEPING, EngineState.DRAINING, EngineState.DEAD},
    EngineState.REBUILDING: {EngineState.RUNNING, EngineState.SLEEPING, EngineState.DRAINING, EngineState.DEAD},
    EngineState.SLEEPING: {EngineState.REBUILDING, EngineState.RUNNING, EngineState.DRAINING, EngineState.DEAD},
    # Ray Serve may continue with a replica that it seemed to stop.
    EngineState.DRAINING: {EngineState.RUNNING, EngineState.DEAD},
    EngineState.DEAD: set[EngineState](),
}


class EngineLife:
    """The state of one engine. One thread writes the state, and other threads may read it."""

    def __init__(self) -> None:
        self._state = EngineState.STARTING

    @property
    def state(self) -> EngineState:
        """The current state."""
        return self._state

    def enter(self, state: EngineState) -> None:
        """Changes to `state`. Does nothing if the engine has this state already, or the change is not allowed: a late
        report does not revive a dead engine."""
        if state is self._state:
            return
        if state not in _AFTER[self._state]:
            logger.debug("an engine that is %s cannot become %s; please report this bug", self._state, state)
            return
        logger.info("the engine is %s (it was %s)", state, self._state)
        self._state = state

    def follow(self, reported: EngineState) -> None:
        """Follows the coordinator's report, but not while the replica starts, stops or is dead."""
        serving = (EngineState.RUNNING, EngineState.REBUILDING, EngineState.SLEEPING)
        if self._state in serving and reported in serving:
            self.enter(reported)
