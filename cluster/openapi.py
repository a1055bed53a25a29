"""Builds the OpenAPI 3.1 document from the table of routes and the types of the bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from cluster.http.access import ADMINS, ANYONE
from cluster.http.context import Role
from cluster.routes import PATH_PARAMETERS, ROUTES, Route

_REF = "#/components/schemas/"
_REASONS = {
    400: "A field is wrong, missing or not supported; `param` names it.",
    401: "The API key is missing or not known.",
    403: "The key's role does not allow it.",
    404: "There is no such model, response or route.",
    408: "The body did not arrive in time.",
    409: "A response that the request needs has not ended yet, or an operator ended the request.",
    413: "The body is too large.",
    415: "The body is compressed, or its type is not JSON.",
    429: "The key's quota is used up; see Retry-After.",
    431: "The headers are too many or too large.",
    500: "The server failed.",
    503: "The server is full, starting or stopping; see Retry-After.",
    504: "The request's deadline has passed.",
}
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The id of the request in logs: its X-Request-Id, or a new one.",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"description": "How to send an API key.", "schema": {"type": "string"}},
    "X-Ignored-Fields": {
        "description": "Fields of the request that this server ignored.",
        "schema": {"type": "string"},
    },
}


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out titles, because they would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def build_document(version: str) -> dict[str, Any]:
    """The document as plain data, the same on every run. Raises ValueError if two different models have one name."""
    schemas = _request_schemas()
    for name, schema in _answer_schemas().items():
        if schemas.setdefault(name, schema) != schema:
            raise ValueError(f"two different types of the API are named {name}; rename one of them")
    paths: dict[str, dict[str, Any]] = {}
    failures: dict[str, Any] = {}
    for route in ROUTES:
        for status in route.errors:
            failures[_failure_name(route, status)] = _failure(route, status)
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = _described(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lockstep",
            "version": version,
            "description": "One model, served by tensor-parallel ranks. Any other method of a path is 405.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"x-api-key": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in ROUTES)],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": dict(sorted(failures.items())),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key of `server.api_keys`; without that setting none is asked for.",
                },
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _request_schemas() -> dict[str, Any]:
    models: list[type[BaseModel]] = list(dict.fromkeys(route.request for route in ROUTES if route.request is not None))
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF + "{model}", schema_generator=_WithoutTitles
    )
    schemas: dict[str, Any] = definitions["$defs"]
    return {name: _untitled(schema) for name, schema in schemas.items()}


def _answer_schemas() -> dict[str, Any]:
    types = [kind for route in ROUTES for kind in (route.answer, route.event, route.error) if kind is not None]
    _, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    return {name: _untitled(schema) for name, schema in components.items()}


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def _described(route: Route) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": _summary(route),
        "tags": [route.tag],
        **({"security": []} if route.roles == ANYONE else {"x-roles": [role for role in Role if role in route.roles]}),
    }
    parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)", route.path)]
    if parameters:
        described["parameters"] = parameters
    if route.request is not None:
        schema = {"$ref": _REF + route.request.__name__}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    described["responses"] = {"200": _success(route)}
    for status in sorted(set(route.errors)):
        described["responses"][str(status)] = {"$ref": f"#/components/responses/{_failure_name(route, status)}"}
    return described


def _summary(route: Route) -> str:
    return f"{route.about} Needs an admin key." if route.roles == ADMINS else route.about


def _path_parameter(name: str) -> dict[str, Any]:
    about = PATH_PARAMETERS[name]
    return {"name": name, "in": "path", "required": True, "description": about, "schema": {"type": "string"}}


def _success(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": _schema_of(route.answer)}
    if route.event is not None:
        # This version of OpenAPI cannot describe a stream of events, and some tools would take `schema` for the type of
        # an event. So the events' type is under another key.
        content["text/event-stream"] = {"x-event-schema": _schema_of(route.event)}
    if not content:
        content[route.media_type] = {"schema": {"type": "string"}}
    headers = ["X-Request-Id"] + ["X-Ignored-Fields"] * (route.request is not None)
    return {"description": _summary(route), "headers": _header_refs(headers), "content": content}


def _failure_name(route: Route, status: int) -> str:
    return f"{route.error.__name__}{status}"


def _failure(route: Route, status: int) -> dict[str, Any]:
    headers = ["X-Request-Id"]
    if status == 401:
        headers.append("WWW-Authenticate")
    if status in (429, 503):
        headers.append("Retry-After")
    content = {"application/json": {"schema": _schema_of(route.error)}}
    return {"description": _REASONS[status], "headers": _header_refs(headers), "content": content}


def _header_refs(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _schema_of(kind: Any) -> dict[str, Any]:
    members = get_args(kind)
    if members and all(isinstance(member, type) for member in members) and len(members) > 1 and kind is not dict:
        return {"anyOf": [_schema_of(member) for member in members]}
    [schema], _ = msgspec.json.schema_components([kind], ref_template=_REF + "{name}")
    return schema


def _operation_id(route: Route) -> str:
    words = re.findall(r"[a-z0-9]+", route.path.replace(":path", "").lower()) or ["page"]
    return "_".join([route.method.lower(), *words])
