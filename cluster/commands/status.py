"""`python -m cluster status`: shows the current state of one endpoint in about a dozen lines."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from cluster.commands.endpoint_client import EndpointClient
from configs.errors import EngineError

_WINDOW_S = 10


def print_status(url: str, *, as_json: bool) -> None:
    """Prints model, requests, speed, KV pages and ranks. With `as_json`, prints the endpoint's figures as JSON instead.
    Raises ConfigError if `url` is not a URL, EngineError if it does not answer or has no report of its engine yet."""
    console = Console(highlight=False, soft_wrap=True)
    with EndpointClient(url) as endpoint:
        version = endpoint.json("/version")["version"]
        live: dict[str, Any] | None = next(endpoint.events("GET", "/live"), None)
        if live is None:
            raise EngineError(f"{endpoint.url} is stopping; ask again later")
        if as_json:
            console.print_json(json.dumps({"url": endpoint.url, "version": version, **live}))
            return
        for line in status_lines(live, endpoint.url, version):
            console.print(line, markup=False)


def status_lines(live: dict[str, Any], url: str, version: str) -> list[str]:
    """The figures of `/live` as readable lines."""
    seconds = [
        second for second in live["seconds"] if live["time"] - _WINDOW_S - 1 <= second["time"] < live["time"] - 1
    ]
    generated = sum(second["generated"] for second in seconds) / _WINDOW_S
    answers = sum(second["first_tokens"] for second in live["seconds"])
    first = sum(second["ttft"] for second in live["seconds"])
    steps = live["steps"][-50:]
    pages = live["pages"]
    used, num_pages = pages["owned"] + pages["cached"] - pages["evictable"], sum(pages.values()) - pages["evictable"]
    hits = live["prefix_hit_tokens"] / live["prompt_tokens"] if live["prompt_tokens"] else 0.0
    lines = [
        f"{live['model']} at {url}, Lockstep {version}: {live['state']}"
        + (", with CUDA graphs left to capture" if live["is_preparing"] else ""),
        f"requests   {live['running']} running, {live['waiting']} waiting",
        f"speed      {generated:,.0f} tokens/s over {_WINDOW_S} s"
        + (f", first token after {1e3 * first / answers:,.0f} ms" if answers else "")
        + (f", {1e3 * sum(step['duration'] for step in steps) / len(steps):,.1f} ms a step" if steps else ""),
        *_utilisation(steps, live["peak_flops"], live["peak_bandwidth"]),
        f"KV pages   {used:,} in use, {pages['evictable']:,} cached for reuse, {pages['free']:,} free "
        f"of {num_pages:,}; {hits:.0%} of prompt tokens were cached",
    ]
    for rank, state in enumerate(live["ranks"]):
        age = state["heartbeat_age_s"]
        elsewhere = "asleep" if live["state"] == "sleeping" else "on another node"
        heard = elsewhere if age is None else f"heard {age:.1f} s ago"
        lines.append(f"rank {rank:<5} {state['device']}, {heard}")
    return lines


def _utilisation(steps: list[dict[str, Any]], peak_flops: float, peak_bandwidth: float) -> list[str]:
    """A list with a line about MFU and MBU. Empty if no steps ran or the peaks are not known."""
    step_s = sum(step["duration"] for step in steps)
    if not (step_s and peak_flops and peak_bandwidth):
        return []
    mbu = sum(step["read_bytes"] for step in steps) / step_s / peak_bandwidth
    mfu = sum(step["flops"] for step in steps) / step_s / peak_flops
    return [
        f"hardware   steps use {mbu:.0%} of the memory bandwidth ({peak_bandwidth / 1e9:,.0f} GB/s) and {mfu:.1%} of "
        f"the FLOP/s ({peak_flops / 1e12:,.2f} T) measured at the start"
    ]
