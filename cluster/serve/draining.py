"""Detects that Ray Serve is stopping this replica, in time to notify clients with unfinished answers.

Serve lets the requests of a stopping replica run, and kills the replica after `graceful_shutdown_timeout_s`. It
announces neither, and only stops its health checks. When these stop, the replica reads the app's status from Serve.
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

# Health checks count as stopped after this many periods without one, because a busy controller may check late.
_SILENT_PERIODS = 2.5


class StopWatch:
    """Drains `requests` once Serve stops this replica.

    Args:
        requests: requests of this replica.
        is_stopping: asks Ray Serve whether it is stopping replicas of the app. May block.
        period_s: seconds between Serve's health checks of a replica that it does not stop.
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
        """Records one of Serve's health checks, which show that Serve is not stopping this replica."""
        self._asked = time.monotonic()
        if self._began and self._requests.stopping:
            logger.warning("Ray Serve did not stop this replica; it accepts requests again")
            self._requests.admit_again()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        self._asked = time.monotonic()
        while True:
            await asyncio.sleep(self._period_s / 4)
            silent_s = time.monotonic() - self._asked
            if silent_s < _SILENT_PERIODS * self._period_s or not await asyncio.to_thread(self._is_stopping):
                continue
            self._began = True
            # Serve may have begun to stop the replica right after its last check.
            left_s = self._shutdown_timeout_s - (time.monotonic() - self._asked)
            logger.info("Ray Serve is stopping this replica: %d requests have %.1f s left", len(self._requests), left_s)
            await self._requests.drain(max(left_s, 0.0))


def replicas_are_stopping(app_name: str) -> bool:
    """Whether Ray Serve is ending replicas of the app. False if Serve does not answer."""
    try:
        app = serve.status().applications.get(app_name)
    except Exception as error:  # noqa: BLE001 -- Ray raises many kinds for a controller that restarts
        logger.warning("Ray Serve's controller does not answer, and is asked again: %s", error)
        return False
    if app is None or app.status == ApplicationStatus.DELETING:
        return True
    return any(
        count and state == "STOPPING"
        for deployment in app.deployments.values()
        for state, count in deployment.replica_states.items()
    )
