"""Time to the first token of one client while another client asks for all that it can.

    python -m benchmarks.neighbours CONFIG [--set KEY=VALUE ...] [--samples N] [--json OUT]

The two clients have addresses of their own, 127.0.0.1 and 127.0.0.2, by which a server without keys tells them apart.
The neighbour sends requests for all rows of the batch (`rows`), prompts of --input-len tokens in a row (`prompts`), or
both at once. Each time is that of one request of 16 tokens in and one out, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import Report, circumstances, describe_circumstances, table
from benchmarks.serving import endpoint

_NEIGHBOUR, _CLIENT = "127.0.0.1", "127.0.0.2"
_FLOOD = 64  # prompts of a flood that are under way at once


def client_at(address: str) -> httpx.AsyncClient:
    """A client whose connections come from this address."""
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address=address), timeout=300)


def prompt(num_tokens: int) -> list[int]:
    """Random ids, which no cache has."""
    return [random.randrange(100, 20_000) for _ in range(num_tokens)]


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> float | None:
    """Seconds until the first event of a streamed completion, which is read to its end."""
    began, first = time.perf_counter(), None
    async with client.stream("POST", f"{url}/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            first = first or time.perf_counter() - began
    return first


@contextlib.asynccontextmanager
async def load(url: str, model: str, kind: str, rows: int, input_len: int) -> AsyncIterator[None]:
    """Keeps the neighbour's requests of a kind under way while the block runs."""
    long = {"model": model, "max_tokens": 2000, "ignore_eos": True}
    bodies: list[dict[str, Any]] = []
    if kind in ("rows", "both"):
        bodies += [{**long, "prompt": [prompt(16) for _ in range(rows // 16)], "n": 16}]
    if kind in ("prompts", "both"):
        bodies += [{**long, "max_tokens": 1, "input_len": input_len} for _ in range(_FLOOD)]

    async with client_at(_NEIGHBOUR) as neighbour:

        async def repeat(body: dict[str, Any]) -> None:
            length = body.pop("input_len", None)
            while True:
                with contextlib.suppress(httpx.HTTPStatusError):  # the queue is full
                    await stream(neighbour, url, body if length is None else {**body, "prompt": prompt(length)})

        tasks = [asyncio.create_task(repeat(body)) for body in bodies]
        await asyncio.sleep(3.0 if tasks else 0.0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """First-token times of the client by the neighbour's load, ascending."""
    times: dict[str, list[float]] = {}
    async with client_at(_CLIENT) as client:
        model = (await client.get(f"{url}/models")).json()["data"][0]["id"]
        for kind in ("idle", "rows", "prompts", "both"):
            found = []
            async with load(url, model, kind, args.rows, args.input_len):
                for _ in range(args.samples):
                    first = await stream(client, url, {"model": model, "prompt": prompt(16), "max_tokens": 1})
                    found.append(1e3 * (first or 0.0))
                    await asyncio.sleep(random.uniform(0.0, 0.2))
            times[kind] = sorted(found)
            print(kind, " ".join(f"{ms:.0f}" for ms in times[kind]), flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, default=256, help="rows that the neighbour asks for at once")
    parser.add_argument("--input-len", type=int, default=2048, help="tokens of the neighbour's prompts")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--commit", help="of the code measured, where the checkout has no git directory")
    args = parser.parse_args()
    about = {"served": args.config, "overrides": args.overrides, "rows": args.rows, "input_len": args.input_len}
    report = Report(args.json, benchmark="neighbours", **about, **circumstances(args.commit))
    with endpoint(args.config, args.overrides) as url:
        times = asyncio.run(measure(url, args))
    report.add(first_token_ms=times)
    rows = [[kind, f"{statistics.median(found):.0f}", f"{found[-1]:.0f}"] for kind, found in times.items()]
    print(describe_circumstances(report.figures))
    print(table(["neighbour", "median ms", "longest ms"], rows))


if __name__ == "__main__":
    main()
