"""The state of an engine: one word, the same in health, metrics, `status` and on the page.

The coordinator keeps one of its own and reports it; the Engine replica's is what users see: it follows the reports
while the replica serves, and knows besides when it began to and when it is being stopped.
"""

from __future__ import annotations

import logging
from enum import StrEnum

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    """States in the order in which an engine may have them; from each but the last it may die."""

    STARTING = "starting"
    """No token has been generated yet."""
    RUNNING = "running"
    REBUILDING = "rebuilding"
    """Ranks are being replaced: no step runs, requests wait and are taken."""
    SLEEPING = "sleeping"
    """The devices are free for others: no step runs, requests wait and are taken."""
    DRAINING = "draining"
    """It is being stopped: what runs is finished, nothing is taken."""
    DEAD = "dead"
    """The engine has ended for good: only another one can serve."""


_AFTER = {
    EngineState.STARTING: {EngineState.RUNNING, EngineState.DRAINING, EngineState.DEAD},
    EngineState.RUNNING: {EngineState.REBUILDING, EngineState.SLEEPING, EngineState.DRAINING, EngineState.DEAD},
    EngineState.REBUILDING: {EngineState.RUNNING, EngineState.SLEEPING, EngineState.DRAINING, EngineState.DEAD},
    EngineState.SLEEPING: {EngineState.REBUILDING, EngineState.RUNNING, EngineState.DRAINING, EngineState.DEAD},
    # Ray Serve may go on with a replica that it seemed to stop.
    EngineState.DRAINING: {EngineState.RUNNING, EngineState.DEAD},
    EngineState.DEAD: set[EngineState](),
}


class EngineLife:
    """The state of one engine. One thread enters; others may read."""

    def __init__(self) -> None:
        self._state = EngineState.STARTING

    @property
    def state(self) -> EngineState:
        """The present state."""
        return self._state

    def enter(self, state: EngineState) -> None:
        """Goes on to `state`, or stays where it is already. From where there is no way there it stays, too: what is
        dead is not revived by a late report."""
        if state is self._state:
            return
        if state not in _AFTER[self._state]:
            logger.debug("an engine that is %s does not become %s", self._state, state)
            return
        logger.info("the engine is %s (it was %s)", state, self._state)
        self._state = state

    def follow(self, reported: EngineState) -> None:
        """Takes over what the coordinator reports, while it is this engine's ranks alone that decide."""
        serving = (EngineState.RUNNING, EngineState.REBUILDING, EngineState.SLEEPING)
        if self._state in serving and reported in serving:
            self.enter(reported)
