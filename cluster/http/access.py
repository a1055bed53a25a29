"""Who may call what: API keys, roles, and what stays open without one. Decided on ASGI's path, never on a URL."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.types import Scope

from cluster.http.context import RequestContext, Role
from cluster.http.keys import ApiKey, KeyRing
from configs.errors import RequestError
from configs.load import is_loopback

ANYONE: Set[Role] = frozenset()
"""Paths that need no key: those of probes, and the page, which asks for one itself. None tells anything."""
ADMINS: Set[Role] = frozenset({Role.ADMIN})
"""For admin keys only, and absent where there is none."""
USERS: Set[Role] = frozenset({Role.USER, Role.ADMIN})
"""Every path of which nothing else is said, also those that do not exist."""


@dataclass(frozen=True, slots=True)
class Access:
    """Lets requests pass, or refuses them."""

    keys: KeyRing | None
    """None: nobody is asked for one."""
    roles: Mapping[str, Set[Role]] = field(default_factory=dict)
    """The roles of the keys that may call it, by path."""
    anyone: bool = False
    """Whether requests from other machines are answered where there are no keys."""

    def admit(self, scope: Scope, request_id: str) -> tuple[RequestContext, ApiKey | None]:
        """The context of a request, and the key it came with. Raises RequestError: 401 without a good key, 403 where
        the key's role or the caller's place does not allow it, 404 for what is absent."""
        roles = self.roles.get(route_path(scope), USERS)
        if roles == ANYONE:
            return RequestContext(request_id=request_id), None
        if self.keys is None:
            if not self.anyone:
                _check_local(scope)
            if roles == ADMINS:
                raise _absent()
            return RequestContext(request_id=request_id), None
        presented = _presented(scope)
        if presented is None:
            raise RequestError(
                "An API key is needed; send it as `Authorization: Bearer KEY`.", code="missing_api_key", status=401
            )
        if (key := self.keys.find(presented)) is None:
            raise RequestError("The API key is not known here.", code="invalid_api_key", status=401)
        if roles == ADMINS and not self.keys.has_admin:
            raise _absent()
        if key.role not in roles:
            raise RequestError(f"Keys of the role {key.role} may not call this.", code="permission_denied", status=403)
        salt = self.keys.salt(key.id)
        context = RequestContext(
            request_id=request_id, client=key.id, role=key.role, priorities=key.priorities, salt=salt
        )
        return context, key


def route_path(scope: Scope) -> str:
    """The path below the app's prefix, exactly as the router matches it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _presented(scope: Scope) -> bytes | None:
    """The key a request carries, if any. Raises RequestError (401) for two different ones: who looks at one and who at
    the other must not differ."""
    found = set()
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization":
            scheme, _, credentials = value.strip().partition(b" ")
            found.add(credentials.strip() if scheme.lower() == b"bearer" else b"")
    found.discard(b"")
    if len(found) > 1:
        raise RequestError("The request has two different API keys; send one.", code="invalid_api_key", status=401)
    return found.pop() if found else None


def _check_local(scope: Scope) -> None:
    """Refuses callers from elsewhere, and pages from elsewhere in a browser that runs here; for servers without
    keys."""
    server = scope.get("server")
    # A server without a port is no TCP connection.
    if server is not None and server[1] is not None and not is_loopback(server[0]):
        raise RequestError(
            "This server has no API keys, so it answers only on the loopback address: set server.api_keys.",
            code="api_keys_not_configured",
            status=403,
        )
    for name, value in scope["headers"]:
        if name == b"origin" and not is_loopback(urlsplit(value.decode("latin-1")).hostname or ""):
            raise RequestError("Pages of other sites may not call this server.", code="origin_refused", status=403)


def _absent() -> RequestError:
    return RequestError("There is no such route.", code="not_found", status=404)
