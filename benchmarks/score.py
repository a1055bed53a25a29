"""Many texts behind one query: as items of one row, and each as a prompt of its own. Without Ray and HTTP.

    python -m benchmarks.score [--config FILE] [--set KEY=VALUE ...] [--query 256 250] [--items 64] [--tokens 8]

One rank in this process, and a scheduler that is new for each run, so that no run finds another's query in the cache.
Of a query that ends within a page, prompts of their own compute what is in that page once each. The two ways take
turns; ratios are what counts on CPUs, whose cores are to be pinned with taskset.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frames import ScheduledFrames
from benchmarks.report import ROOT, circumstances
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.native.score import grouped
from cluster.scheduling.limits import SchedulerLimits, max_item_tokens
from configs.checkpoint import resolve_model_path
from configs.load import load_app_config
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig, resolved
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.device.card import node_card
from worker.protocol import StepResult
from worker.tp_worker import TPWorker

_LABELS = (10, 20, 30)
_MAX_MODEL_LEN = 2048


class _Run(ScheduledFrames):
    """The source of the rank's frames, and the sink of its results."""

    def __init__(self, limits: SchedulerLimits, prompts: list[list[int]]) -> None:
        super().__init__(limits)
        self.logprobs: dict[int, list[float]] = {}
        groups = grouped(prompts, limits.max_item_tokens, limits.max_model_len)
        requests = [
            GenerateRequest(
                id=i,
                prompt=np.array(group.prompt, np.int32).tobytes(),
                sampling=SamplingParams(
                    max_tokens=1,
                    temperature=0.0,
                    ignore_eos=True,
                    num_logprobs=0,
                    logprob_token_ids=_LABELS,
                    item_lens=group.item_lens,
                ),
            )
            for i, group in enumerate(groups, 1)
        ]
        assert not self._scheduler.add(requests)

    @property
    def num_steps(self) -> int:
        return self._scheduler.last_step

    def retire(self, result: bytes) -> None:
        """Takes the result of a step."""
        for logprobs in self._scheduler.retire(StepResult.decode(result)).logprobs:
            self.logprobs[logprobs.id] = [logprob for _, logprob in logprobs.top]

    def scores(self) -> torch.Tensor:
        """Scores of every item, one after the other."""
        return torch.tensor([value for i in sorted(self.logprobs) for value in self.logprobs[i]])


def _limits(config: EngineConfig, vocab_size: int, num_pages: int, item_tokens: int) -> SchedulerLimits:
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=config.kv_cache.page_size,
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=vocab_size,
        enable_prefix_caching=True,
        eos_token_ids=(),
        max_item_tokens=item_tokens,
        **config.scheduler.model_dump(),
    )


def _measured(
    worker: TPWorker, limits: Mapping[str, SchedulerLimits], prompts: list[list[int]], num_runs: int
) -> dict[str, Any]:
    """Medians of either way, after a run of each that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in limits}
    last: dict[str, _Run] = {}
    for _ in range(num_runs + 1):
        for name, of_way in limits.items():
            last[name] = run = _Run(of_way, prompts)
            began = time.perf_counter()
            worker.run(run, run.retire)
            seconds[name].append(time.perf_counter() - began)
    ms = {name: 1e3 * statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        **{f"{name}_ms": round(median, 1) for name, median in ms.items()},
        "alone_over_together": round(ms["alone"] / ms["together"], 2),
        "steps": {name: run.num_steps for name, run in last.items()},
        "largest_logprob_difference": float((last["alone"].scores() - last["together"].scores()).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--query", type=int, nargs="+", default=[256, 250], help="tokens of the query")
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8, help="of an item")
    parser.add_argument("--runs", type=int, default=5, help="of either way, after one that does not count")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    given = load_app_config(
        ROOT / args.config, [*args.overrides, "tensor_parallel_size=1", f"max_model_len={_MAX_MODEL_LEN}"]
    ).engine
    path = resolve_model_path(given.model, given.revision, weights=given.load_format != "dummy")
    model = read_model_config(path)
    card = node_card() if torch.cuda.is_available() else None
    host = HostFacts(torch.get_num_threads(), torch.cuda.device_count(), card)
    config = resolve(given, model, host).config
    device = torch.device("cpu" if config.device == "cpu" else "cuda:0")
    worker = TPWorker(
        config=config,
        model=model,
        model_path=path,
        plan=ShardPlan.create(model, 1),
        group=TensorParallelGroup.single(device),
    )
    worker.shard.load()
    rows = resolved(config.scheduler.max_num_seqs)
    num_pages = (rows + 1) * (-(-(max(args.query) + args.tokens + 1) // config.kv_cache.page_size) + 1)
    worker.allocate(num_pages, _MAX_MODEL_LEN)

    most = {"alone": 0, "together": max_item_tokens(config, model)}
    limits = {name: _limits(config, model.vocab_size, num_pages, tokens) for name, tokens in most.items()}
    rng = np.random.default_rng(0)
    items = rng.integers(0, model.vocab_size, (args.items, args.tokens)).tolist()
    measured = []
    for num_tokens in args.query:
        query = rng.integers(0, model.vocab_size, num_tokens).tolist()
        prompts = [[*query, *item] for item in items]
        measured.append({"query_tokens": num_tokens, **_measured(worker, limits, prompts, args.runs)})
    report = {
        "config": args.config,
        "overrides": args.overrides,
        "items": args.items,
        "item_tokens": args.tokens,
        "queries": measured,
        **circumstances(),
    }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
