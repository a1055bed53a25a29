"""A decode step by itself, without Ray and HTTP: how long, and with `--profile` what of.

    python -m benchmarks.step [--config FILE] [--set KEY=VALUE ...] [--rows 1] [--steps 100] [--profile]

Every rank is a process that schedules for itself: the same requests make the same frames. `--profile` adds a table of
rank 0's operations on a CPU (torch's, and not the kernels in C), which take longer while they are watched, and of its
kernels on a GPU, which overlap where they may start early. On CPUs transformers' `generate` runs beside it, and ratios
are what counts; pin the cores with taskset.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from benchmarks.endpoint import transformers_rate
from benchmarks.frames import ScheduledFrames
from benchmarks.ranks import start_worker
from benchmarks.report import ROOT, circumstances
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.scheduling.limits import SchedulerLimits
from configs.checkpoint import resolve_model_path
from configs.load import load_app_config
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig
from worker.device.card import node_card
from worker.protocol import StepResult

_PROMPT_TOKENS = 20
_WARM_UPS = 20
_TIMEOUT_S = 300.0
_PROFILED_STEPS = 32


class _Steps(ScheduledFrames):
    """The source of a rank's frames, and the sink of its results: a scheduler of its own."""

    def __init__(self, config: EngineConfig, vocab_size: int, num_pages: int, rows: int, tokens: int) -> None:
        max_model_len = _PROMPT_TOKENS + tokens
        super().__init__(
            SchedulerLimits(
                num_pages=num_pages,
                page_size=config.kv_cache.page_size,
                max_num_seqs=rows,
                max_num_batched_tokens=_PROMPT_TOKENS * rows,
                prefill_chunk_size=_PROMPT_TOKENS,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                max_num_queued_requests=rows,
                max_num_queued_tokens=rows * max_model_len,
                steps_in_flight=2,
                enable_prefix_caching=False,
                eos_token_ids=(),
            )
        )
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for i in range(rows):
            prompt = np.arange(i + 3, i + 3 + _PROMPT_TOKENS, dtype=np.int32).tobytes()
            assert not self._scheduler.add([GenerateRequest(id=i + 1, prompt=prompt, sampling=sampling)])
        self.ended: list[float] = []
        """When each step's result was there."""
        self.profile: torch.profiler.profile | None = None
        """Watches `_PROFILED_STEPS` steps after the warm-up."""

    def retire(self, result: bytes) -> None:
        """Takes the result of a step."""
        self._scheduler.retire(StepResult.decode(result))
        self.ended.append(time.perf_counter())
        if self.profile is not None and len(self.ended) == _WARM_UPS:
            self.profile.start()
        if self.profile is not None and len(self.ended) == _WARM_UPS + _PROFILED_STEPS:
            self.profile.stop()


def _rank_main(rank: int, config: EngineConfig, path: Path, port: int, args: argparse.Namespace, out: Any) -> None:
    worker, group = start_worker(rank, config, path, port)
    device = group.device
    tokens = args.steps + _WARM_UPS
    num_pages = args.rows * (-(-(_PROMPT_TOKENS + tokens) // config.kv_cache.page_size) + 1)
    worker.allocate(num_pages, _PROMPT_TOKENS + tokens)
    steps = _Steps(config, worker.vocab_size, num_pages, args.rows, tokens)
    if args.profile and rank == 0:
        kinds = torch.profiler.ProfilerActivity
        steps.profile = torch.profiler.profile(activities=[kinds.CPU if device.type == "cpu" else kinds.CUDA])
    worker.run(steps, steps.retire)
    table = ""
    if steps.profile is not None:
        table = _table(steps.profile, device)
        if args.trace is not None:
            steps.profile.export_chrome_trace(str(args.trace))
    out.put((rank, np.diff(steps.ended[_WARM_UPS:]).tolist(), table))
    group.barrier()


def _table(profile: torch.profiler.profile, device: torch.device) -> str:
    averages = profile.key_averages()
    if device.type == "cpu":
        return str(averages.table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40))
    kernels = sorted((it for it in averages if it.device_time_total > 0), key=lambda it: -it.device_time_total)
    lines = [f"{'us a step':>10} {'calls':>6} {'us each':>8}  kernel"]
    for it in kernels[:24]:
        calls, us = it.count / _PROFILED_STEPS, it.device_time_total / _PROFILED_STEPS
        lines.append(f"{us:10.1f} {calls:6.1f} {us / calls:8.2f}  {it.key[:100]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--trace", type=Path, help="with --profile: writes what was watched for a trace viewer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    given = load_app_config(ROOT / args.config, [*args.overrides, f"scheduler.max_num_seqs={args.rows}"]).engine
    path = resolve_model_path(given.model, given.revision, weights=given.load_format != "dummy")
    threads = torch.get_num_threads()
    card = node_card() if torch.cuda.is_available() else None
    host = HostFacts(threads, torch.cuda.device_count(), card)
    config = resolve(given, read_model_config(path), host).config
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ranks = [
        context.Process(target=_rank_main, args=(rank, config, path, store.port, args, out), daemon=True)
        for rank in range(config.tensor_parallel_size)
    ]
    for process in ranks:
        process.start()
    _, seconds, table = min(out.get(timeout=_TIMEOUT_S) for _ in ranks)
    for process in ranks:
        process.join()
    if table:
        print(table)
    step_ms = 1e3 * statistics.median(seconds)
    report = {
        "config": args.config,
        "overrides": args.overrides,
        "tensor_parallel_size": config.tensor_parallel_size,
        "rows": args.rows,
        "step_ms": round(step_ms, 3),
    }
    if config.device == "cpu" and config.load_format != "dummy":
        rate = statistics.median(transformers_rate(path, config.dtype, threads, args.steps, 3))
        report["transformers_ms"] = round(1e3 / rate, 2)
        report["one_row_over_transformers"] = round(1e3 * args.rows / step_ms / rate, 2)
    report |= circumstances()
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
