"""How many requests each client may make: in a minute, and at once. Counted by each replica for itself."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster.http.context import KeepSlot, no_slot
from cluster.http.keys import ApiKey
from configs.errors import RequestError

_MINUTE_S = 60.0
_TRY_AGAIN_S = 1.0


@dataclass(slots=True)
class _Used:
    running: int = 0
    began: deque[float] = field(default_factory=deque)
    """When each request of the last minute began."""


class Quotas:
    """Requests that each client has used. All keys of one id draw on the same."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    @contextlib.contextmanager
    def take(self, key: ApiKey | None) -> Iterator[KeepSlot]:
        """Counts one request for the time of the block; yields how to count on for what outlives it. Raises
        RequestError (429), with the time after which one more is allowed."""
        if key is None or (key.rpm is None and key.concurrency is None):
            yield no_slot
            return
        used = self._used.setdefault(key.id, _Used())
        now = self._clock()
        while used.began and used.began[0] <= now - _MINUTE_S:
            used.began.popleft()
        if key.rpm is not None and len(used.began) >= key.rpm:
            oldest = used.began[len(used.began) - key.rpm]
            raise _exceeded(f"{key.rpm} requests a minute", oldest + _MINUTE_S - now)
        if key.concurrency is not None and used.running >= key.concurrency:
            raise _exceeded(f"{key.concurrency} requests at once", _TRY_AGAIN_S)
        if key.rpm is not None:
            used.began.append(now)
        used.running += 1

        def release() -> None:
            used.running -= 1

        def keep() -> Callable[[], None]:
            used.running += 1
            return release

        try:
            yield keep
        finally:
            release()


def _exceeded(limit: str, retry_after_s: float) -> RequestError:
    return RequestError(
        f"This key is limited to {limit}.", code="rate_limit_exceeded", status=429, retry_after_s=retry_after_s
    )
