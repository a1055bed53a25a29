"""Facts about a request besides its body: its id, its client, and what the client may do."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum

from starlette.types import Scope

_SCOPE_KEY = "lockstep.request"


class Role(StrEnum):
    """Which routes an API key may call."""

    USER = "user"
    """All routes except routes for operators."""
    ADMIN = "admin"
    """All routes."""
    METRICS = "metrics"
    """Only routes that show the server's state."""


class Meter:
    """Counts what one request uses of its client's quota. This base class is for clients without limits, and counts
    nothing."""

    def begin(self, num_sequences: int, num_tokens: int) -> None:
        """Counts the tokens of the request's prompts and, until it ends, its sequences (prompts times choices). Raises
        RequestError (429) if they exceed what the client has left."""

    def count_tokens(self, num_tokens: int) -> None:
        """Counts generated tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Facts about one request. The guard collects them before any route runs. Every log line and span has its id."""

    request_id: str
    """The client's `x-request-id` if it is a valid name, else a new id."""
    client: str = ""
    """The client's name: the id of its API key, never the key itself. Empty if requests need no key."""
    network: str = ""
    """The client's network address if requests need no key. Empty for connections without addresses."""
    role: Role = Role.USER
    priorities: tuple[int, int] | None = None
    """Lowest and highest `priority` that counts against requests of other clients, as the operator granted the API key.
    If None, a priority only orders the client's own requests."""
    salt: bytes = field(default=b"", repr=False)
    """A secret that stands for the client in this process. Empty if requests need no key."""
    path_params: Mapping[str, str] = field(default_factory=dict)
    """Values of the path's parameters, for the handler."""
    arrived_s: float = field(default_factory=time.monotonic, compare=False)
    """Time when the request's headers had arrived."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context: the headers `traceparent` and `tracestate`, if the request has them."""
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    """Counts what the request uses of its client's quota."""

    @property
    def share_owner(self) -> str:
        """The name under which the client gets its share of the engine: the id of its API key, or else its network."""
        return self.client or self.network

    def cache_salt(self, asked: str | None = None) -> bytes:
        """The salt that separates cached prompts: two clients never share one, and a client shares pages between its
        requests with the same `asked`.

        Args:
            asked: the request's own `cache_salt`.
        """
        if asked is None:
            return self.salt
        # The digest is keyed with the client's secret, so that no client can choose another client's salt.
        return hmac.digest(self.salt, asked.encode(), "sha256")


_current: ContextVar[RequestContext | None] = ContextVar("lockstep_request", default=None)


def current_request() -> RequestContext | None:
    """The request that the running task serves. None outside of requests."""
    return _current.get()


@contextlib.contextmanager
def serving(scope: Scope, context: RequestContext) -> Iterator[None]:
    """Makes `context` the scope's request. During the block, it is also the current request of this task and of tasks
    that it starts."""
    scope[_SCOPE_KEY] = context
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def routed_context(scope: Scope) -> RequestContext:
    """The request of an ASGI scope after the guard and the router, with the values of its path."""
    context: RequestContext = scope[_SCOPE_KEY]
    return replace(context, path_params=scope.get("path_params", {}))
