"""Decides whether a request may call a route: API keys, roles, and paths that need no key. It looks at ASGI's path,
never at a URL."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.types import Scope

from cluster.http.context import RequestContext, Role
from cluster.http.keys import ApiKey, KeyRing
from configs.errors import RequestError
from configs.load import is_loopback
from configs.schema import ServerConfig

_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]*)?")

ANYONE: Set[Role] = frozenset()
"""For paths that need no key: probes, and the page, which asks for a key itself. They reveal nothing."""
ADMINS: Set[Role] = frozenset({Role.ADMIN})
"""For paths that need an admin key. On a server without admin keys, these paths do not exist."""
USERS: Set[Role] = frozenset({Role.USER, Role.ADMIN})
"""For all other paths, including paths that do not exist."""


def peer_address(scope: Scope) -> str | None:
    """The address of the other end of a request's connection. None if the connection has no addresses."""
    client = scope.get("client")
    return None if client is None or client[1] is None else str(client[0])


@dataclass(frozen=True, slots=True)
class Access:
    """Accepts or refuses requests."""

    keys: KeyRing | None
    """The valid keys. None if requests need no key."""
    roles: Mapping[str, Set[Role]] = field(default_factory=dict)
    """The roles that may call each path. Other paths are for USERS."""
    anyone: bool = False
    """Whether requests from other machines are answered on a server without keys."""
    client_address: Callable[[Scope], str | None] = peer_address
    """Returns the address of a request's client. None if the connection has no addresses, which means that the client
    is on this machine."""
    host_names: Set[str] = frozenset()
    """Lower-case names that a request's Host may have on a server without keys, besides this machine's."""

    def admit(self, scope: Scope, request_id: str) -> tuple[RequestContext, ApiKey | None]:
        """The context of a request, and the key that the client sent.

        Raises:
            RequestError: 401 without a valid key, 403 if the key's role or the client's address does not allow it, 404
                if the path does not exist.
        """
        roles = self.roles.get(route_path(scope), USERS)
        if roles == ANYONE:
            return RequestContext(request_id=request_id), None
        if self.keys is None:
            address = self.client_address(scope)
            if not self.anyone:
                _check_local(scope, address)
            _check_host(scope, self.host_names, any_address=self.anyone)
            if roles == ADMINS:
                raise _absent()
            return RequestContext(request_id=request_id, network=_network(address or "")), None
        presented = _presented(scope)
        if presented is None:
            raise RequestError(
                "An API key is needed; send it as `Authorization: Bearer KEY`.", code="missing_api_key", status=401
            )
        if (key := self.keys.find(presented)) is None:
            raise RequestError(
                "The API key is not known here; check it, or ask the operator for one.",
                code="invalid_api_key",
                status=401,
            )
        if roles == ADMINS and not self.keys.has_admin:
            raise _absent()
        if key.role not in roles:
            raise RequestError(
                f"Keys of the role {key.role} may not call this; use a key of another role.",
                code="permission_denied",
                status=403,
            )
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
    """The key that a request carries, or None. Raises RequestError (401) for two different keys, because different
    readers of the request must not see different keys."""
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


def _check_local(scope: Scope, address: str | None) -> None:
    """For servers without keys: refuses clients on other machines, and pages of other sites in a local browser."""
    if address is not None and not is_loopback(address):
        raise RequestError(
            "This server has no API keys, so it answers only clients on its own machine: set server.api_keys.",
            code="api_keys_not_configured",
            status=403,
        )
    for name, value in scope["headers"]:
        if name == b"origin" and not is_loopback(urlsplit(value.decode("latin-1")).hostname or ""):
            raise RequestError(
                "Pages of other sites may not call this server; call it from a program.",
                code="origin_refused",
                status=403,
            )


def _network(address: str) -> str:
    """The network that counts as one client: an IPv4 address, or the 64-bit prefix of an IPv6 address. Empty if
    `address` is no IP address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def own_host_names(server: ServerConfig) -> Set[str]:
    """The names under which a server without keys answers: `server.host_names`, and this machine's own name if it
    answers other machines. Asks the machine's resolver, which may take a second."""
    own = {socket.gethostname(), socket.getfqdn()} if server.api_keys is False else set()
    return frozenset(name.lower().rstrip(".") for name in own.union(server.host_names))


def _check_host(scope: Scope, names: Set[str], *, any_address: bool) -> None:
    """Raises RequestError if a request's Host is no name of this server.

    A web page may come from a DNS name that now points to this machine. Its browser would let the page read answers,
    but sends that name as the Host.

    Args:
        names: accepted names, besides loopback addresses and `localhost`.
        any_address: accept every IP address. A browser sends one only for pages that were opened by an address.
    """
    server = scope.get("server")
    if server is None or server[1] is None:
        return  # not a TCP connection, which no browser would use
    given = [value for name, value in scope["headers"] if name == b"host"]
    if not given and scope.get("http_version") == "1.0":
        return  # HTTP/1.0 has no Host, and no browser uses it
    found = _HOST.fullmatch(given[0].strip()) if len(given) == 1 else None
    if found is None:
        raise RequestError("The request must have one Host header with a name or an address.", code="invalid_host")
    host = (found[1] or found[2]).decode().lower().rstrip(".")
    if not (is_loopback(host) or host in names or (any_address and _network(host))):
        raise RequestError(
            "This server has no API keys, so it answers only requests with its own name as Host; list the name in "
            "server.host_names, or set server.api_keys.",
            code="host_refused",
            status=403,
        )


def _absent() -> RequestError:
    return RequestError("There is no such route.", code="not_found", status=404)
