"""Facts about a request besides its body: its name, whose it is, and what that client may do."""

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
    """The purpose of an API key."""

    USER = "user"
    """Every route but those of operations."""
    ADMIN = "admin"
    """Every route."""
    METRICS = "metrics"
    """Only what shows how the server does."""


class Meter:
    """Counts what one request uses against its client's quota. This class is for clients without limits: it counts
    nothing."""

    def begin(self, num_sequences: int, num_tokens: int) -> None:
        """Counts the sequences that the request runs (prompts times choices) until it ends, and its prompts' tokens.
        Raises RequestError, 429 if they exceed what the client has left."""

    def count_tokens(self, num_tokens: int) -> None:
        """Counts tokens that were generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One request. Set by the guard before any route sees it; every log line and span of the request names its id."""

    request_id: str
    """The client's `x-request-id` where that is a fit name, else one of ours."""
    client: str = ""
    """The client's name: the id of its API key, never the key. Empty where no keys are asked for."""
    network: str = ""
    """The client's network address, where no keys are asked for; empty for connections without addresses."""
    role: Role = Role.USER
    priorities: tuple[int, int] | None = None
    """Lowest and highest `priority` that counts against other clients' requests, as the operator granted the API key.
    None: none was granted, so a priority orders this client's own requests only."""
    salt: bytes = field(default=b"", repr=False)
    """Secret of the client in this process; empty where no keys are asked for."""
    path_params: Mapping[str, str] = field(default_factory=dict)
    """Values of what the route's path leaves open; known to its handler."""
    arrived_s: float = field(default_factory=time.monotonic, compare=False)
    """When its headers were there."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context: its headers `traceparent` and `tracestate`, where it has them."""
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    """Counts what the request uses."""

    @property
    def share_owner(self) -> str:
        """The name under which the client gets its share of the engine: the id of its API key, or else its network."""
        return self.client or self.network

    def cache_salt(self, asked: str | None = None) -> bytes:
        """The salt that keeps cached prompts apart: clients never share one, and one client does where it asks alike.
        `asked`: the request's own `cache_salt`."""
        if asked is None:
            return self.salt
        # Keyed by the client's secret, so that no client can ask for another's salt.
        return hmac.digest(self.salt, asked.encode(), "sha256")


_current: ContextVar[RequestContext | None] = ContextVar("lockstep_request", default=None)


def current_request() -> RequestContext | None:
    """The request that the running task serves; None outside of requests."""
    return _current.get()


@contextlib.contextmanager
def serving(scope: Scope, context: RequestContext) -> Iterator[None]:
    """Makes `context` the scope's request, and the current one of this task and those it starts in the block."""
    scope[_SCOPE_KEY] = context
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def routed_context(scope: Scope) -> RequestContext:
    """The request of an ASGI scope that has passed the guard and the router, with the values of its path."""
    context: RequestContext = scope[_SCOPE_KEY]
    return replace(context, path_params=scope.get("path_params", {}))
