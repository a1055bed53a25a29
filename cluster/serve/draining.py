"""Finding out that Ray Serve is stopping this replica, in time to tell the clients whose answers will not end.

Serve lets a stopping replica's requests run on, and kills it when `graceful_shutdown_timeout_s` has passed; it tells
the replica of neither. It only stops asking after its health: that is the sign to look at what Serve says of the app.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ray import serve
from ray.serve.schema import ApplicationStatus

from cluster.http.active import ActiveRequests

logger = logging.getLogger(__name__)

# A check that is late by less is no sign: the controller asks every period, when it is not busy.
_SILENT_PERIODS = 2.5


class StopWatch:
    """Drains `requests` once Serve stops this replica.

    Args:
        requests: of this replica.
        is_stopping: asks Ray Serve; may block.
        period_s: how often Serve asks after the health of a replica that it does not stop.
        shutdown_timeout_s: `server.shutdown_timeout_s`.
    """

    def __init__(
        self, requests: ActiveRequests, is_stopping: Callable[[], bool], *, period_s: float, shutdown_timeout_s: float
    ) -> None:
        self._requests = requests
        self._is_stopping = is_stopping
        self._period_s = period_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._asked = time.monotonic()
        self._began = False

    def asked(self) -> None:
        """Must be called when Serve asks after this replica's health: it does not stop it."""
        self._asked = time.monotonic()
        if self._began and self._requests.stopping:
            logger.warning("Ray Serve goes on with this replica; it takes requests again")
            self._requests.admit_again()

    async def run(self) -> None:
        """Never returns; to be cancelled."""
        self._asked = time.monotonic()
        while True:
            await asyncio.sleep(self._period_s / 4)
            silent_s = time.monotonic() - self._asked
            if silent_s < _SILENT_PERIODS * self._period_s or not await asyncio.to_thread(self._is_stopping):
                continue
            self._began = True
            # It may have been told to stop right after it was last asked.
            left_s = self._shutdown_timeout_s - (time.monotonic() - self._asked)
            logger.info("Ray Serve stops this replica: %d requests have %.1f s left", len(self._requests), left_s)
            await self._requests.drain(max(left_s, 0.0))


def replicas_are_stopping(app_name: str) -> bool:
    """Whether Ray Serve is ending replicas of the app; False when it cannot be asked."""
    try:
        app = serve.status().applications.get(app_name)
    except Exception as error:  # noqa: BLE001 -- Ray raises many kinds for a controller that restarts
        logger.warning("Ray Serve's controller cannot be asked: %s", error)
        return False
    if app is None or app.status == ApplicationStatus.DELETING:
        return True
    return any(
        count and state == "STOPPING"
        for deployment in app.deployments.values()
        for state, count in deployment.replica_states.items()
    )
