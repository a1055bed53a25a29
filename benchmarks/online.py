"""The load test of `python -m cluster bench`, with what its figures depend on: hardware, versions, commit.

    python -m benchmarks.online URL [--model NAME] [--clients 1,16,64,256] [--requests N] [--json OUT]
    python -m benchmarks.online --serve CONFIG [--set KEY=VALUE ...] ...

URL ends in /v1 and may be any server's. cluster/commands/bench/load_test.py says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Report, circumstances, describe_circumstances, table
from benchmarks.serving import endpoint
from cluster.commands.bench.load_test import Traffic, level_line, run_levels, table_of, takes_ids
from cluster.commands.endpoint_client import EndpointClient


def render(figures: dict[str, Any]) -> str:
    """The levels of one run as a table."""
    return "\n".join(
        [
            "",
            f"{figures['model']} at {figures['served']} {' '.join(figures['overrides'])}".strip(),
            f"{figures['input_len']} {figures['prompts']} in, {figures['output_len']} tokens out; times are median/p99",
            describe_circumstances(figures),
            "",
            table(*table_of(figures["levels"])),
        ]
    )


def run(server: EndpointClient, args: argparse.Namespace, report: Report) -> None:
    """Measures every level into `report` and prints it."""
    model = args.model or server.first_model()
    traffic = Traffic(
        url=server.url,
        model=model,
        input_tokens=args.input_len,
        output_tokens=args.output_len,
        as_ids=takes_ids(server, model) if args.prompts == "auto" else args.prompts == "ids",
        seed=str(args.seed if args.seed is not None else time.time_ns()),
        headers=server.headers,
    )
    report.add(model=model, input_len=args.input_len, output_len=args.output_len, seed=traffic.seed)
    report.add(prompts="token ids" if traffic.as_ids else "words", levels=[])
    levels: list[dict[str, Any]] = []
    for level in run_levels(traffic, args.clients, args.requests):
        levels.append(level)
        report.add(levels=levels)
        print(level_line(level), flush=True)
    print(render(report.figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="base URL of the server, /v1 included")
    parser.add_argument("--serve", metavar="CONFIG", help="start this config's endpoint and measure it")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--requests", type=int, help="of each level; default: 2 for each client, at least 8")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prompts", choices=("auto", "ids", "text"), default="auto")
    parser.add_argument("--seed", help="default: another at every run")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--commit", help="of the code measured, where the checkout has no git directory")
    args = parser.parse_args()
    if (args.url is None) == (args.serve is None):
        parser.error("give either URL or --serve CONFIG")
    served = args.serve or args.url
    report = Report(
        args.json, benchmark="online", served=served, overrides=args.overrides, **circumstances(args.commit)
    )
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(endpoint(args.serve, args.overrides)) if args.serve else args.url
        run(stack.enter_context(EndpointClient(url)), args, report)


if __name__ == "__main__":
    main()
