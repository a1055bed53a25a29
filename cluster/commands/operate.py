"""`python -m cluster resize`, `weights`, `sleep` and `wake`: change a running app through its admin routes."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from cluster.commands.endpoint_client import EndpointClient


def operate(url: str, path: str, body: dict[str, Any] | None = None) -> None:
    """Sends a POST to an admin route and prints the fields of the answer.

    Raises:
        ConfigError: `url` is not a URL.
        EngineError: nothing answers there, or the app refused the change.
    """
    console = Console(highlight=False, soft_wrap=True)
    with EndpointClient(url) as endpoint:
        for name, value in endpoint.post(path, body).items():
            console.print(f"{name}: {value}", markup=False)
