"""Quotas of clients: requests per minute, sequences at once, tokens per minute. Each replica counts by itself."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster.http.context import Meter
from cluster.http.keys import ApiKey
from configs.errors import RequestError

_MINUTE_S = 60.0
_TRY_AGAIN_S = 1.0


@dataclass(slots=True)
class _Used:
    running: int = 0
    """Number of sequences that run. A request counts as one until its sequences are known."""
    began: deque[float] = field(default_factory=deque)
    """Start times of the requests in the last minute."""
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    """Time and number of the tokens counted in the last minute."""


@dataclass(eq=False)
class _KeyMeter(Meter):
    """The meter of one request, if its key has limits."""

    key: ApiKey
    used: _Used
    clock: Callable[[], float]
    held: int = 1
    """Number of sequences that this request has added to `used.running`."""

    def begin(self, num_sequences: int, num_tokens: int) -> None:
        more, most = num_sequences - self.held, self.key.concurrency
        if most is not None and num_sequences > most:
            raise RequestError(f"This key may have {most} sequences at once; send fewer than {num_sequences}.")
        if most is not None and self.used.running + more > most:
            raise _exceeded(f"{most} requests at once, each prompt and choice counted", _TRY_AGAIN_S)
        limit, tokens, now = self.key.tokens, self.used.tokens, self.clock()
        while tokens and tokens[0][0] <= now - _MINUTE_S:
            tokens.popleft()
        if limit is not None and tokens and sum(count for _, count in tokens) + num_tokens > limit:
            raise _exceeded(f"{limit} tokens a minute", tokens[0][0] + _MINUTE_S - now)
        self.used.running += more
        self.held += more
        self.count_tokens(num_tokens)

    def count_tokens(self, num_tokens: int) -> None:
        if self.key.tokens is not None:
            self.used.tokens.append((self.clock(), num_tokens))


class Quotas:
    """What each client has used. All keys of one client share one quota."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    @contextlib.contextmanager
    def take(self, key: ApiKey | None) -> Iterator[Meter]:
        """Counts one request during the block, and yields its meter. Raises RequestError (429) with the seconds after
        which another request is allowed."""
        if key is None or (key.rpm is None and key.concurrency is None and key.tokens is None):
            yield Meter()
            return
        used = self._used.setdefault(key.id, _Used())
        now = self._clock()
        while used.began and used.began[0] <= now - _MINUTE_S:
            used.began.popleft()
        if key.rpm is not None and len(used.began) >= key.rpm:
            oldest = used.began[len(used.began) - key.rpm]
            raise _exceeded(f"{key.rpm} requests a minute", oldest + _MINUTE_S - now)
        if key.concurrency is not None and used.running >= key.concurrency:
            raise _exceeded(f"{key.concurrency} requests at once, each prompt and choice counted", _TRY_AGAIN_S)
        if key.rpm is not None:
            used.began.append(now)
        used.running += 1
        meter = _KeyMeter(key, used, self._clock)
        try:
            yield meter
        finally:
            used.running -= meter.held


def _exceeded(limit: str, retry_after_s: float) -> RequestError:
    return RequestError(
        f"This key is limited to {limit}; try again in {retry_after_s:.0f} s.",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=retry_after_s,
    )
