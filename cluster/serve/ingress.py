"""The endpoint's app: all routes of the table, and what is the same for all of them (`cluster.http`).

`create_app(model)` builds the whole app from a `ServedModel`. The module has no state, so the function can be called in
the serving process (Ray Serve's `__serve_build_asgi_app__`, or uvicorn).
"""

from __future__ import annotations

import functools
import hmac

import msgspec
from starlette import routing
from starlette.types import Scope

from cluster.anthropic.message_objects import AnthropicError
from cluster.http.access import Access, own_host_names, peer_address
from cluster.http.active import ActiveRequests
from cluster.http.endpoint import Endpoint, Handler
from cluster.http.guard import Guard
from cluster.http.keys import KeyRing
from cluster.http.response import LoopTurns
from cluster.openapi import build_document
from cluster.requests.served_model import ServedModel
from cluster.routes import ROUTES, Handlers, Route
from cluster.serve.run_haproxy import CLIENT_HEADER, proof

_UNKNOWN_ADDRESS = "unknown"


def create_app(
    model: ServedModel,
    active: ActiveRequests | None = None,
    keys: KeyRing | None = None,
    *,
    names_responses: bool = True,
) -> Guard:
    """The HTTP server of one replica.

    Args:
        active: lists the running requests. The code that drains them needs the same object. If None, a new one.
        keys: keys of `server.api_keys`. If None, no key is required.
        names_responses: False if a server in front adds `x-request-id` itself.
    """
    requests = ActiveRequests(life=model.engine.telemetry.life) if active is None else active
    turns = LoopTurns()
    servings = Handlers(model, requests, _document(model.version))
    telemetry = model.engine.telemetry

    def engine_is_there() -> bool:
        return model.engine.connected

    def served(route: Route) -> routing.Route:
        if route.plain is not None:
            return routing.Route(route.path, route.plain(servings), methods=[route.method])
        if route.handler is not None:
            handle: Handler = functools.partial(route.handler, model)
        else:
            assert route.serving is not None, "a route has a handler of one of three kinds"
            handle = route.serving(servings)
        endpoint = Endpoint(handle, model.server, requests, turns, engine_is_there, telemetry.refused)
        return routing.Route(route.path, endpoint, methods=[route.method])

    roles = {route.path: route.roles for route in ROUTES}
    return Guard(
        [served(route) for route in ROUTES],
        Access(
            keys,
            roles,
            anyone=model.server.api_keys is False,
            host_names=own_host_names(model.server),
            client_address=functools.partial(client_address, proof()),
        ),
        engine_is_there=engine_is_there,
        on_error=telemetry.refused,
        names_responses=names_responses,
        counted=frozenset(route.path for route in ROUTES if route.costs),
        error_shapes={route.path: AnthropicError.of for route in ROUTES if route.error is AnthropicError},
    )


def client_address(proof: str | None, scope: Scope) -> str | None:
    """The address of the client that sent a request: the address in HAProxy's header, else the connection's peer. None
    if the connection has no addresses.

    Args:
        proof: result of `run_haproxy.proof`. A header with another word is not trusted, and its client counts as
            unknown. If None, the header is ignored.
    """
    for name, value in scope["headers"]:
        if proof is not None and name == CLIENT_HEADER.encode():
            word, _, address = value.decode("latin-1").partition(" ")
            return address if hmac.compare_digest(word.encode(), proof.encode()) else _UNKNOWN_ADDRESS
    return peer_address(scope)


@functools.cache
def _document(version: str) -> bytes:
    """The OpenAPI document. It is cached, because building it takes 150 ms, which would delay a request."""
    return msgspec.json.encode(build_document(version))
