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
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import Report, circumstances, describe_circumstances, table
from benchmarks.serving import endpoint

_NEIGHBOUR, _CLIENT = "127.0.0.1", "127.0.0.2"
_FLOOD = 64  # prompts of a flood that are under way at once
_AFTER_S = 6.0  # from the start of the neighbour's process to the first request of the client


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


async def harass(url: str, model: str, kind: str, rows: int, input_len: int) -> None:
    """Keeps the neighbour's requests of a kind under way, for ever."""
    long = {"model": model, "max_tokens": 2000, "ignore_eos": True}
    bodies: list[dict[str, Any]] = []
    if kind in ("rows", "both"):
        bodies += [{**long, "prompt": [prompt(16) for _ in range(rows // 16)], "n": 16}]
    if kind in ("prompts", "both"):
        bodies += [{"model": model, "prompt": prompt(input_len), "max_tokens": 1} for _ in range(_FLOOD)]

    async def repeat(neighbour: httpx.AsyncClient, body: dict[str, Any]) -> None:
        while True:
            body["prompt"][0] = random.randrange(100, 20_000) if isinstance(body["prompt"][0], int) else prompt(16)
            with contextlib.suppress(httpx.HTTPStatusError):  # the queue is full
                await stream(neighbour, url, body)

    async with client_at(_NEIGHBOUR) as neighbour:
        await asyncio.gather(*(repeat(neighbour, body) for body in bodies))


def run_harass(*arguments: Any) -> None:
    """`harass` in a process of its own, so that its work is not in the client's times."""
    asyncio.run(harass(*arguments))


@contextlib.contextmanager
def load(*arguments: Any) -> Iterator[None]:
    """Keeps a neighbour at work while the block runs."""
    process = multiprocessing.get_context("spawn").Process(target=run_harass, args=arguments, daemon=True)
    process.start()
    time.sleep(_AFTER_S)
    try:
        yield
    finally:
        process.kill()
        process.join()


async def measure(url: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """First-token times of the client by the neighbour's load, ascending."""
    times: dict[str, list[float]] = {}
    async with client_at(_CLIENT) as client:
        model = (await client.get(f"{url}/models")).json()["data"][0]["id"]
        for kind in ("idle", "rows", "prompts", "both"):
            found = []
            with load(url, model, kind, args.rows, args.input_len):
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
