"""Tokens per second through HTTP against transformers' `generate`, in one run on one machine.

    python -m benchmarks.endpoint [--config FILE] [--set KEY=VALUE ...] [--tokens 96] [--rounds 3] [--json OUT]

Both sides use the same weights, dtype and number of threads; the endpoint is started by this script on a port of its
own and stopped before transformers runs, then started again, so that neither slows the other. Ratios are what counts:
absolute figures of shared CPUs do not repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from benchmarks.report import ROOT, circumstances
from benchmarks.serving import endpoint
from configs.checkpoint import resolve_model_path
from configs.load import load_app_config

PROMPT = "The history of the railway begins in the sixteenth century, when"
STREAMS = (1, 16)


async def measure(url: str, streams: int, tokens: int) -> float:
    """Output tokens per second of `streams` requests at once, from the first token of the first to the last of all."""
    body = {
        "model": "smollm2-135m-instruct",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

        async def one(index: int) -> tuple[float, int]:
            first, count = 0.0, 0
            # A prompt of its own, so that no request gets its prefill from another's pages.
            request = {**body, "prompt": f"{index}. {PROMPT}"}
            async with client.stream("POST", f"{url}/completions", json=request) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first = first or time.perf_counter()
                    usage = json.loads(line[6:]).get("usage")
                    count = usage["completion_tokens"] if usage else count
            return first, count

        results = await asyncio.gather(*(one(index) for index in range(streams)))
    ended = time.perf_counter()
    assert all(count == tokens for _, count in results), results
    # The first token of the first stream marks the start, so it is not counted itself.
    return (streams * tokens - 1) / (ended - min(first for first, _ in results))


def transformers_rate(model_path: Path, dtype: str, threads: int, tokens: int, rounds: int) -> list[float]:
    """Tokens per second of greedy `generate` in a process of its own, decode only, for each round."""
    script = (
        "import json, sys, time, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"torch.set_num_threads({threads})\n"
        f"tok = AutoTokenizer.from_pretrained({str(model_path)!r})\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(model_path)!r}, dtype=torch.{dtype})\n"
        f"ids = tok({PROMPT!r}, return_tensors='pt')\n"
        "def run(n):\n"
        "    began = time.perf_counter()\n"
        "    model.generate(**ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)\n"
        "    return time.perf_counter() - began\n"
        "run(8)\n"
        # The difference of two lengths leaves out prefill and set-up, as the endpoint's figure does.
        f"print(json.dumps([{tokens - 1} / (run({tokens}) - run(1)) for _ in range({rounds})]))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    engine = load_app_config(ROOT / args.config, args.overrides).engine
    dtype = "float32" if engine.dtype == "auto" else engine.dtype
    threads = len(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    reference: list[float] = []
    for _ in range(2):  # twice each, alternating, so that a slow spell of the machine does not hit one side only
        with endpoint(args.config, args.overrides) as url:
            asyncio.run(measure(url, 1, 8))
            for _ in range(args.rounds):
                for streams in STREAMS:
                    rates[streams].append(asyncio.run(measure(url, streams, args.tokens)))
        reference += transformers_rate(
            resolve_model_path(engine.model, engine.revision), dtype, threads, args.tokens, args.rounds
        )
    base = statistics.median(reference)
    one, many = (statistics.median(rates[streams]) for streams in STREAMS)
    report = {
        "config": args.config,
        "overrides": args.overrides,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "dtype": dtype,
        "threads": threads,
        "tokens": args.tokens,
        "transformers_tok_s": [round(rate, 1) for rate in reference],
        "one_stream_tok_s": [round(rate, 1) for rate in rates[STREAMS[0]]],
        "sixteen_streams_tok_s": [round(rate, 1) for rate in rates[STREAMS[1]]],
        "one_stream_over_transformers": round(one / base, 2),
        "sixteen_streams_over_one_stream": round(many / one, 2),
        "sixteen_streams_over_transformers": round(many / base, 2),
        **circumstances(),
    }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
