"""An OpenAI endpoint for the commands: its URL, the caller's key, and errors that a person can act on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from configs.errors import ConfigError, EngineError

API_KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable with the key to send. Every user of the machine could read a key on the command line."""

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 600.0


class EndpointClient:
    """A client of one endpoint. Every method raises EngineError if the endpoint fails or does not answer."""

    def __init__(self, url: str) -> None:
        """`url` may omit the scheme, and `/v1` if it has no path. Raises ConfigError if `url` is not a URL."""
        self.url = _base_url(url)
        """Base URL of the endpoint, including `/v1`."""
        key = os.environ.get(API_KEY_VARIABLE)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self._client = httpx.Client(base_url=self.url, timeout=timeout, headers=self.headers, trust_env=False)

    def __enter__(self) -> EndpointClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The name of the first model that the endpoint lists."""
        with self._answering():
            response = self._client.get("models")
        if response.status_code == 401:
            _check(response)
        try:
            name: str = response.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
            raise EngineError(
                f"{self.url} is no OpenAI endpoint: GET {response.url.path} answered {response.status_code}; give its "
                "base URL, which ends in /v1"
            ) from None
        return name

    def json(self, path: str) -> Any:
        """The JSON that a GET returns. `path` is relative to `/v1`, or to the host's root if it begins with a slash."""
        with self._answering():
            response = self._client.get(self._place(path))
            _check(response)
            return response.json()

    def post(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON answer to a POST to a route for operators. `path` as in `json`."""
        with self._answering():
            response = self._client.post(self._place(path), json=body)
            if response.status_code == 404:
                raise EngineError(f"{self.url} has no routes for operators; set server.api_keys with an admin key")
            _check(response)
            return response.json()

    def accepts(self, path: str, body: dict[str, Any]) -> bool:
        """Whether a POST succeeds. False if the server refuses it. Raises EngineError for every other error."""
        with self._answering():
            response = self._client.post(path, json=body)
            if response.status_code in (400, 422):
                return False
            _check(response)
            return True

    def events(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """Yields the JSON of each server-sent event as it arrives. `path` is the same as for `json`."""
        with self._answering(), self._client.stream(method, self._place(path), json=body) as response:
            if not response.is_success:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise EngineError(event["error"]["message"])
                    yield event

    def _place(self, path: str) -> str:
        return self.url.removesuffix("/v1") + path if path.startswith("/") else path

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise EngineError(
                f"nothing answers at {self.url} ({error}); check the address, and that `cluster serve` runs there"
            ) from None


def _base_url(url: str) -> str:
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no URL; give one like http://127.0.0.1:8000/v1: {error}") from None
    return str(parsed.copy_with(path=parsed.path.rstrip("/") or "/v1"))


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = response.text[:500]
    hint = f"; set {API_KEY_VARIABLE} to an API key" if response.status_code == 401 else ""
    raise EngineError(f"the endpoint answered {response.status_code}: {said}{hint}")
