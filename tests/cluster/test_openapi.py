"""The OpenAPI document: it is the committed one, has every route, and every route keeps to it, whatever it is sent."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
import queue
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from typer.testing import CliRunner

from cluster.commands.cli import app as cli
from cluster.http.keys import KeyRing
from cluster.messages.engine import WeightsChanged
from cluster.openapi import build_document
from cluster.routes import ROUTES
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from cluster.version import VERSION
from tests.helpers.json_bodies import Bodies
from tests.helpers.scripted_engine import MODEL, Run, Stack, runner, served

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT = build_document(VERSION)
BODIES = Bodies(DOCUMENT)
ENDLESS = {"/live"}
"""A stream without an end: what is sent there is never answered in full."""
WITH_BODY = {route.path: route for route in ROUTES if route.request is not None}
KEY = "the-key-of-the-fuzz"
BEARER = {"authorization": f"Bearer {KEY}"}
WRONG_TYPE = {"invalid_type", "missing_required_parameter", "invalid_json"}


# --- The document -----------------------------------------------------------------------------------------------------


def test_the_committed_document_is_the_one_that_the_command_prints() -> None:
    printed = CliRunner().invoke(cli, ["openapi"]).output
    hint = "run `make generate`"
    assert COMMITTED.read_text("utf-8") == printed, hint
    assert json.loads(printed) == DOCUMENT


def test_the_document_has_every_route_and_no_other(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model)
        routes = {
            (method, route.path.replace(":path}", "}"))  # type: ignore[attr-defined]  # all are starlette's Route
            for route in app.routes
            for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        }
        described = DOCUMENT["paths"].items()
        assert routes == {(method.upper(), path) for path, methods in described for method in methods}
        served_document = (await stack.http.get("/openapi.json")).json()
        assert served_document == build_document(stack.model.version)

    run(scenario)


def test_every_reference_in_the_document_leads_somewhere() -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in set(references(DOCUMENT)):
        target: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            assert part in target, reference
            target = target[part]


def test_every_schema_is_a_schema_and_every_open_route_says_so() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    without_key = {path for path, methods in DOCUMENT["paths"].items() for op in methods.values() if "security" in op}
    assert without_key == {"/", "/health", "/ready"}


def test_the_document_lets_no_user_read_metrics() -> None:
    assert DOCUMENT["paths"]["/metrics"]["get"]["x-roles"] == ["admin", "metrics"]


# --- The routes, from the document ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with an admin's key, on an event loop of its own."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "keys").write_text(f"fuzz:{hashlib.sha256(KEY.encode()).hexdigest()}:admin\n")
    started: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
    ended: Future[None] = Future()

    async def update_weights(**fields: Any) -> WeightsChanged:
        return WeightsChanged(fields["version"] or "", 0.1, 1.0, "device")

    async def slept(*, wakes: bool) -> float:
        return 0.1 + wakes

    async def flushed() -> None:
        pass

    async def resized(size: int) -> float:
        return 0.1

    async def scenario(stack: Stack) -> None:
        await stack.model.warm_up()
        operations: Any = SimpleNamespace(
            update_weights=update_weights, sleep=slept, flush_cache=flushed, resize_app=resized
        )
        stack.model.operations = operations
        stop = asyncio.Event()
        async with served(create_app(stack.model, keys=KeyRing(folder / "keys"))) as url:
            started.put((url, asyncio.get_running_loop(), stop))
            await stop.wait()
        assert stack.engine.num_open == 0, "requests were left behind"

    def serve() -> None:
        try:
            runner(smollm2, folder)(scenario, timeout_s=3600)
        except BaseException as error:  # noqa: BLE001 -- told to the test's own thread
            ended.set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=serve)
    thread.start()
    url, loop, stop = started.get(timeout=30)
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    ended.result(30)


def check_answer(reply: httpx.Response, path: str, method: str = "post") -> None:
    """`reply` is one of those that the document has for the route, in status, type and body."""
    described = DOCUMENT["paths"][path][method]["responses"]
    assert reply.status_code != 500, reply.text
    assert str(reply.status_code) in described, f"{reply.status_code} {reply.text}"
    answer = described[str(reply.status_code)]
    if "$ref" in answer:
        answer = DOCUMENT["components"]["responses"][answer["$ref"].split("/")[-1]]
    kind = reply.headers["content-type"].split(";")[0]
    content = answer["content"][kind]
    if kind == "application/json":
        BODIES.validator(content["schema"]).validate(reply.json())
    elif kind == "text/event-stream":
        validator = BODIES.validator(content["x-event-schema"])
        for line in reply.text.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                validator.validate(json.loads(line.removeprefix("data: ")))
    assert {"x-request-id"} <= reply.headers.keys()


def fuzz(url: str, path: str, *, valid: bool, num_examples: int) -> collections.Counter[int]:
    """Sends bodies to a route, and counts the answers by status. Each must be one that the document has, in time."""
    schema = {"$ref": f"#/components/schemas/{WITH_BODY[path].request.__name__}"}
    seen: collections.Counter[int] = collections.Counter()

    with httpx.Client(base_url=url, headers=BEARER, timeout=20) as http:

        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            derandomize=num_examples < 100,
            suppress_health_check=list(HealthCheck),
        )
        @given(body=BODIES.valid(schema) if valid else BODIES.invalid(schema))
        def one(body: dict[str, Any]) -> None:
            if isinstance(body.get("model"), str):
                body["model"] = MODEL  # any other is 404, which shows nothing of the rest
            reply = http.post(path, json=body)
            seen[reply.status_code] += 1
            check_answer(reply, path)
            if valid and reply.status_code == 400:
                assert reply.json()["error"].get("code") not in WRONG_TYPE, f"{reply.text}\n{body}"
            if not valid:
                assert reply.status_code in (400, 404), f"{reply.status_code} {reply.text[:500]}\n{body}"

        one()
    return seen


@pytest.mark.parametrize("path", WITH_BODY)
def test_what_the_document_allows_is_understood(url: str, path: str) -> None:
    assert fuzz(url, path, valid=True, num_examples=20)[200] > 0


@pytest.mark.parametrize("path", WITH_BODY)
def test_what_the_document_does_not_allow_is_refused(url: str, path: str) -> None:
    fuzz(url, path, valid=False, num_examples=20)


@pytest.mark.exhaustive
@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("path", WITH_BODY)
def test_every_body_is_answered_as_the_document_says(url: str, path: str, valid: bool) -> None:
    fuzz(url, path, valid=valid, num_examples=200)


def test_what_needs_no_body_is_answered_as_the_document_says(url: str) -> None:
    with httpx.Client(base_url=url, headers=BEARER, timeout=20) as http:
        for path, method, described in ((path, *it) for path, its in DOCUMENT["paths"].items() for it in its.items()):
            if "requestBody" not in described and path not in ENDLESS:
                for value in ("resp_none", "a%2Fb", "é" * 300):
                    url_path = re.sub(r"{\w+}", value, path)
                    for query in ("", "?" + "a=b&" * 100):
                        check_answer(http.request(method, url_path + query), path, method)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", pytest.param("negative", marks=pytest.mark.exhaustive)])
def test_schemathesis_finds_nothing_that_contradicts_the_document(url: str, mode: str) -> None:
    import schemathesis
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks

    for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations():
        operation = found.ok()
        if operation.path in ENDLESS or (mode == "negative" and not operation.body):
            continue

        @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(GenerationMode(mode)))
        def one(case: schemathesis.Case) -> None:
            case.headers.update(BEARER)
            response = case.call(base_url=url, timeout=20)
            assert response.status_code != 500, response.text
            chosen = [
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
                checks.response_headers_conformance,
            ]
            if mode == "negative":
                chosen.append(checks.negative_data_rejection)
            case.validate_response(response, checks=chosen)

        one()


def test_every_other_method_of_every_path_is_refused(url: str) -> None:
    with httpx.Client(base_url=url, headers=BEARER) as http:
        for path, methods in DOCUMENT["paths"].items():
            for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {method.upper() for method in methods}:
                if path == "/v1/responses/input_tokens" and method in ("GET", "DELETE"):
                    continue  # there it is the id of a response
                reply = http.request(method, path.replace("{", "").replace("}", ""))
                assert reply.status_code == 405, f"{method} {path}: {reply.text}"
                assert "allow" in reply.headers
                assert reply.json()["error"]["message"]
