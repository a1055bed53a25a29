"""What is known of a request besides its body: its name, whose it is, and what that client may do."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.types import Scope

_SCOPE_KEY = "lockstep.request"


class Role(StrEnum):
    """What an API key is for."""

    USER = "user"
    """Every route but those of operations."""
    ADMIN = "admin"
    """Every route."""
    METRICS = "metrics"
    """Only what shows how the server does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One request. Set by the guard before any route sees it; every log line and span of the request names its id."""

    request_id: str
    """The client's `x-request-id` where that is a fit name, else one of ours."""
    client: str = ""
    """Whose it is: the id of its API key, never the key. Empty where no keys are asked for."""
    role: Role = Role.USER
    salt: bytes = field(default=b"", repr=False)
    """Secret of the client in this process; empty where no keys are asked for."""

    def cache_salt(self, asked: str | None = None) -> bytes:
        """What keeps cached prompts apart: clients never share one, and one client shares it where it asks alike.

        Args:
            asked: the request's own `cache_salt`.
        """
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


def request_context(scope: Scope) -> RequestContext:
    """The request of an ASGI scope that has passed the guard."""
    context: RequestContext = scope[_SCOPE_KEY]
    return context
