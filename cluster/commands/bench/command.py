"""`python -m cluster bench`: runs a load test of an endpoint, and writes the results as a table and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.commands.bench.load_test import Traffic, level_line, run_levels, table_of, takes_ids
from cluster.commands.endpoint_client import EndpointClient
from configs.errors import ConfigError

_TABLE_WIDTH = 120


def run_bench(
    url: str,
    *,
    model: str | None,
    clients: Sequence[int],
    requests: int | None,
    input_tokens: int,
    output_tokens: int,
    json_path: Path | None,
) -> bool:
    """Measures and prints each level of `clients`, then a table of all levels. Returns whether every request succeeded.
    `requests` is the number of requests in each level. If None, two for each client, at least 8. Writes `json_path`
    after every level, so that an interrupted run keeps its results. Raises ConfigError if `url` is not a URL or
    `json_path` cannot be written, EngineError if the endpoint does not answer."""
    if json_path is not None:
        try:
            json_path.touch()
        except OSError as error:
            raise ConfigError(f"--json={json_path} cannot be written ({error.strerror}); give another path") from None
    console = Console(highlight=False, soft_wrap=True)
    with EndpointClient(url) as endpoint:
        model = model or endpoint.first_model()
        as_ids = takes_ids(endpoint, model)
        traffic = Traffic(
            url=endpoint.url,
            model=model,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            as_ids=as_ids,
            seed=str(time.time_ns()),
            headers=endpoint.headers,
        )
        kind = "token ids" if as_ids else "words"
        console.print(f"{model} at {endpoint.url}: {input_tokens} {kind} in, {output_tokens} tokens out", markup=False)
        levels: list[dict[str, Any]] = []
        for level in run_levels(traffic, clients, requests):
            levels.append(level)
            console.print(level_line(level), markup=False)
            if json_path is not None:
                figures = {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "url": endpoint.url,
                    "model": model,
                    "input_tokens": input_tokens,
                    "output_tokens": output_tokens,
                    "prompts": kind,
                    "levels": levels,
                }
                json_path.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table(box=None, pad_edge=False, header_style="")
    titles, rows = table_of(levels)
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print("\ntimes are median/p99", markup=False)
    # A row that is cut off is useless, so the table has a minimum width, and a narrow terminal wraps it.
    Console(highlight=False, width=max(console.width, _TABLE_WIDTH)).print(table)
    return not any(level["errors"] for level in levels)
