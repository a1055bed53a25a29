"""What speculation gains and costs: tokens a second with it over those without, and whether an answer differs.

    python -m benchmarks.speculation [--config FILE] [--set KEY=VALUE ...] [--batches 1,4] [--tokens 96] --json OUT

Two kinds of prompts: chats that ask for a given text, as it is or with one word changed, and random token ids. Each
group of so many requests at once is answered without, with, with and without speculation by the same ranks, for whom
this process schedules as a coordinator does: no Ray, no HTTP. What counts are the tokens after the step in which the
last request of a group got its first one. Greedy answers to random ids soon go round in circles, which drafts follow;
those drawn at temperature 1 repeat nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from benchmarks.ranks import start_worker
from benchmarks.report import ROOT, circumstances, table
from cluster.engine.messages import GenerateRequest, SamplingParams
from cluster.scheduling.scheduler import Scheduler, SchedulerLimits
from cluster.text.tokenizer import Tokenizer
from configs.checkpoint import resolve_model_path
from configs.load import load_app_config
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import NO_SPECULATION, EngineConfig
from parallel.environment import RANK_ENVIRONMENT
from worker.protocol import FrameKind, StepFrame, StepResult

_TEXTS = (
    ("The old lighthouse stood on the northern cliff, where the wind never rested. Every evening the keeper climbed "
     "the narrow stairs, filled the lamp with oil and lit the wick. Ships that passed in the night saw the light and "
     "knew that the harbour was near. In winter the waves reached the door, and the keeper slept in his boots.",
     "lighthouse", "tower"),
    ("def total(items):\n    result = 0\n    for item in items:\n        if item.price > 0:\n            result += "
     "item.price * item.count\n    return result\n\n\ndef mean(items):\n    if not items:\n        return 0\n    "
     "return total(items) / len(items)\n", "total", "amount"),
    ("Dear Ms. Porter, thank you for your order of the third of May. The three lamps were sent this morning and should "
     "reach you by Friday. If one of the lamps is broken, please send us a picture of it, and we will send you a new "
     "one at once. The bill is in the box. With kind regards, the team of the lamp shop.", "lamps", "chairs"),
    ("Water boils at one hundred degrees at the level of the sea. On a high mountain the air is thin, and water boils "
     "at less. That is why rice takes longer to cook there. A pot with a tight lid holds the steam in, the pressure "
     "rises, and water boils at more than one hundred degrees, so that rice takes less time.", "rice", "barley"),
)  # fmt: skip
_NUM_RANDOM = 128
_MAX_MODEL_LEN = 1024
_TIMEOUT_S = 600.0


class _Frames:
    """A FrameSource over a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def recv(self, timeout_s: float) -> bytes:
        return self._connection.recv_bytes()

    def poll(self) -> bytes | None:
        return self._connection.recv_bytes() if self._connection.poll() else None


def _rank_main(rank: int, config: EngineConfig, path: Path, port: int, num_pages: int, pipe: Connection) -> None:
    worker, group = start_worker(rank, config, path, port)
    worker.allocate(num_pages, _MAX_MODEL_LEN)
    pipe.send_bytes(b"ready")
    worker.run(_Frames(pipe), pipe.send_bytes if rank == 0 else None)
    group.barrier()


class _Ranks:
    """The processes of the ranks, and a scheduler for each measurement."""

    def __init__(self, config: EngineConfig, path: Path, most: int) -> None:
        model = read_model_config(path)
        self.vocab_size = model.vocab_size
        self._limits = SchedulerLimits(
            num_pages=most * -(-_MAX_MODEL_LEN // config.kv_cache.page_size),
            page_size=config.kv_cache.page_size,
            max_num_seqs=most,
            max_num_batched_tokens=512,
            prefill_chunk_size=512,
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=model.vocab_size,
            max_num_queued_requests=10_000,
            max_num_queued_tokens=1 << 24,
            steps_in_flight=2,
            enable_prefix_caching=False,
            eos_token_ids=(),
        )
        self._speculation = config.speculation
        self._last_step = 0
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(config.tensor_parallel_size):
            ours, theirs = context.Pipe()
            args = (rank, config, path, store.port, self._limits.num_pages, theirs)
            self._processes.append(context.Process(target=_rank_main, args=args, daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)
        self._store = store
        for pipe in self._pipes:
            assert pipe.poll(_TIMEOUT_S), "a rank did not start"
            pipe.recv_bytes()

    def answer(self, requests: list[GenerateRequest], *, speculates: bool) -> _Run:
        """Has `requests` answered at once."""
        speculation = self._speculation if speculates else NO_SPECULATION
        limits = replace(self._limits, speculation=speculation, max_row_tokens=1 + speculation.num_drafts)
        scheduler = Scheduler(limits)
        scheduler.last_step = self._last_step
        assert not scheduler.add(requests)
        run = _Run({request.id: [] for request in requests})
        began = 0.0
        while scheduler.has_work:
            while (frame := scheduler.next_step()) is not None:
                self._send(frame)
            output = scheduler.retire(StepResult.decode(self._pipes[0].recv_bytes()))
            ids, tokens = np.frombuffer(output.ids, np.int64), np.frombuffer(output.tokens, np.int32)
            for request_id, token in zip(ids.tolist(), tokens.tolist(), strict=True):
                run.tokens[request_id].append(token)
            if began:
                run.num_timed += len(tokens)
            elif all(run.tokens.values()):
                began = time.perf_counter()
        run.seconds = time.perf_counter() - began
        run.drafted, run.accepted = scheduler.stats().total_drafted, scheduler.stats().total_accepted
        self._last_step = scheduler.last_step
        return run

    def close(self) -> None:
        self._send(StepFrame(1, self._last_step + 1, kind=FrameKind.CLOSE))
        for process in self._processes:
            process.join(30)

    def _send(self, frame: StepFrame) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(frame.encode())


@dataclass
class _Run:
    """Answers to some requests at once."""

    tokens: dict[int, list[int]]
    seconds: float = 0.0
    num_timed: int = 0
    drafted: int = 0
    accepted: int = 0


def _groups(prompts: list[list[int]], batch: int, tokens: int, temperature: float) -> list[list[GenerateRequest]]:
    """Groups of `batch` requests, in which every prompt is at least once."""
    requests = [
        GenerateRequest(
            id=index + 1,
            prompt=np.array(prompts[index % len(prompts)], np.int32).tobytes(),
            sampling=SamplingParams(max_tokens=tokens, temperature=temperature, seed=index, ignore_eos=True),
        )
        for index in range(max(len(prompts), batch))
    ]
    return [requests[first : first + batch] for first in range(0, len(requests), batch)]


def _measure(ranks: _Ranks, groups: list[list[GenerateRequest]]) -> dict[str, Any]:
    """The figures of some groups, each answered four times."""
    ratios, seconds = [], {False: 0.0, True: 0.0}
    num_timed = drafted = accepted = compared = differing = 0
    for group in groups:
        runs = [(speculates, ranks.answer(group, speculates=speculates)) for speculates in (False, True, True, False)]
        own = {kind: sum(run.seconds for speculates, run in runs if speculates is kind) for kind in seconds}
        ratios.append(own[False] / own[True])
        seconds = {kind: seconds[kind] + own[kind] for kind in seconds}
        num_timed += 2 * runs[0][1].num_timed
        drafted += sum(run.drafted for _, run in runs)
        accepted += sum(run.accepted for _, run in runs)
        for key, tokens in runs[0][1].tokens.items():
            for _, other in runs[1:]:
                compared += len(tokens)
                differing += sum(one != two for one, two in zip(tokens, other.tokens[key], strict=True))
    return {
        "tok_s_without": round(num_timed / seconds[False], 1),
        "tok_s_with": round(num_timed / seconds[True], 1),
        "ratio": round(seconds[False] / seconds[True], 3),
        "ratios_of_groups": [round(ratio, 3) for ratio in ratios],
        "drafted": drafted,
        "accepted": accepted,
        "tokens_compared": compared,
        "tokens_differing": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    os.environ.update(RANK_ENVIRONMENT)  # the ranks' processes inherit it
    overrides = ["speculation.method=ngram", f"scheduler.max_num_seqs={max(batches)}", *args.overrides]
    given = load_app_config(ROOT / args.config, overrides).engine
    path = resolve_model_path(given.model, given.revision, weights=given.load_format != "dummy")
    host = HostFacts(num_cores=len(os.sched_getaffinity(0)), num_gpus=torch.cuda.device_count())
    config = resolve(given, read_model_config(path), host).config
    ranks = _Ranks(config, path, max(batches))
    edits: list[list[int]] = []
    tokenizer = None if given.load_format == "dummy" else Tokenizer.load(path)
    for text, old, new in _TEXTS:
        for asked in ("Repeat the following text:", f"Repeat the following text, and change '{old}' to '{new}':"):
            if tokenizer is None:
                continue
            assert tokenizer.template is not None, "the model has no chat template"
            rendered = tokenizer.template.render([{"role": "user", "content": f"{asked}\n\n{text}"}])
            edits.append(tokenizer.encode(rendered, add_special_tokens=False))
    generator = np.random.default_rng(1)
    random = [generator.integers(0, ranks.vocab_size, _NUM_RANDOM).tolist() for _ in range(len(_TEXTS))]
    ranks.answer(_groups(random, max(batches), 8, 0.0)[0], speculates=False)  # warms up
    rows = []
    for kind, prompts, temperatures in (("edit", edits, (0.0, 0.7)), ("random", random, (0.0, 1.0))):
        if not prompts:
            continue  # random weights edit nothing
        for temperature, batch in itertools.product(temperatures, batches):
            figures = _measure(ranks, _groups(prompts, batch, args.tokens, temperature))
            rows.append({"prompts": kind, "temperature": temperature, "requests": batch, **figures})
            print(rows[-1], flush=True)
    ranks.close()
    header = [name for name in rows[0] if name != "ratios_of_groups"]
    print(table(header, [[str(row[name]) for name in header] for row in rows]))
    report: dict[str, Any] = {"config": args.config, "overrides": args.overrides, "tokens": args.tokens}
    report |= {"tensor_parallel_size": config.tensor_parallel_size, "measured": rows}
    report |= {"speculation": config.speculation.model_dump(), "numerics": config.numerics, **circumstances()}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
