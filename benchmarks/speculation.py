"""What speculation gains and costs: tokens a second with it over those without, and whether an answer differs.

    python -m benchmarks.speculation [--config FILE] [--set KEY=VALUE ...] [--batches 1,4] [--tokens 96] --json OUT

Two kinds of prompts: chats that ask for a given text with one word changed, which repeat what was said, and random
token ids, which do not. For each number of requests at once, the same ranks answer without, with, with and without
speculation, as a coordinator would have them: no Ray, no HTTP. A rate is that of the tokens after the step in which the
last request got its first one. Requests are greedy, and once more at temperature 0.7.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field, replace
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
_PAGE_SIZE = 16
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
            num_pages=most * -(-_MAX_MODEL_LEN // _PAGE_SIZE),
            page_size=_PAGE_SIZE,
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
        began, num_first = 0.0, 0
        while scheduler.has_work:
            while (frame := scheduler.next_step()) is not None:
                self._send(frame)
            output = scheduler.retire(StepResult.decode(self._pipes[0].recv_bytes()))
            run.num_steps += 1
            ids, tokens = np.frombuffer(output.ids, np.int64), np.frombuffer(output.tokens, np.int32)
            for request_id, token in zip(ids.tolist(), tokens.tolist(), strict=True):
                run.tokens[request_id].append(token)
            if began:
                run.num_timed += len(tokens)
            elif all(run.tokens.values()):
                began = time.perf_counter()
            num_first += 1
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
    num_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.num_timed / self.seconds


@dataclass
class _Pair:
    """The same requests with and without speculation."""

    kind: str
    batch: int
    temperature: float
    ratios: list[float] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    num_tokens: int = 0
    num_differing: int = 0


def _requests(prompts: list[list[int]], batch: int, tokens: int, temperature: float) -> list[list[GenerateRequest]]:
    """Groups of `batch` requests, each prompt at least once."""
    groups = []
    for first in range(0, max(len(prompts), batch), batch):
        groups.append([
            GenerateRequest(
                id=index + 1,
                prompt=np.array(prompts[index % len(prompts)], np.int32).tobytes(),
                sampling=SamplingParams(max_tokens=tokens, temperature=temperature, seed=index, ignore_eos=True),
            )
            for index in range(first, first + batch)
        ])  # fmt: skip
    return groups


def _measure(ranks: _Ranks, pair: _Pair, groups: list[list[GenerateRequest]], rounds: int) -> None:
    """One rate over all groups for each of the runs without, with, with and without."""
    for _ in range(rounds):
        found: dict[bool, list[float]] = {False: [], True: []}
        answers: list[dict[int, list[int]]] = []
        for speculates in (False, True, True, False):
            runs = [ranks.answer(group, speculates=speculates) for group in groups]
            found[speculates].append(sum(run.num_timed for run in runs) / sum(run.seconds for run in runs))
            answers.append({key: tokens for run in runs for key, tokens in run.tokens.items()})
            if speculates:
                pair.drafted += sum(run.drafted for run in runs)
                pair.accepted += sum(run.accepted for run in runs)
        pair.ratios += [with_ / without for with_, without in zip(found[True], found[False], strict=True)]
        pair.rates.append((statistics.mean(found[False]), statistics.mean(found[True])))
        for key, tokens in answers[0].items():
            for other in answers[1:]:
                pair.num_tokens += len(tokens)
                pair.num_differing += sum(one != two for one, two in zip(tokens, other[key], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
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
    tokenizer = Tokenizer.load(path)
    assert tokenizer.template is not None, "the model has no chat template"
    edits = []
    for text, old, new in _TEXTS:
        content = f"Repeat the following text, and change '{old}' to '{new}':\n\n{text}"
        rendered = tokenizer.template.render([{"role": "user", "content": content}])
        edits.append(tokenizer.encode(rendered, add_special_tokens=False))
    generator = np.random.default_rng(1)
    random = [generator.integers(0, ranks.vocab_size, _NUM_RANDOM).tolist() for _ in range(len(_TEXTS))]
    ranks.answer(_requests(random, max(batches), 8, 0.0)[0], speculates=False)  # warms up
    pairs = []
    for kind, prompts in (("edit", edits), ("random", random)):
        for temperature in (0.0, 0.7):
            for batch in batches:
                pair = _Pair(kind, batch, temperature)
                _measure(ranks, pair, _requests(prompts, batch, args.tokens, temperature), args.rounds)
                pairs.append(pair)
                print(vars(pair), flush=True)
    ranks.close()
    rows = [
        [pair.kind, str(pair.batch), str(pair.temperature), *(f"{rate:.1f}" for rate in pair.rates[0])]
        + [f"{statistics.mean(pair.ratios):.3f}", str(pair.drafted), str(pair.accepted), str(pair.num_differing)]
        for pair in pairs
    ]
    header = ["prompts", "requests", "temperature", "tok/s without", "with", "ratio", "drafted", "right", "differing"]
    print(table(header, rows))
    report: dict[str, Any] = {"config": args.config, "overrides": args.overrides, "tokens": args.tokens}
    report |= {"tensor_parallel_size": config.tensor_parallel_size, "pairs": [vars(pair) for pair in pairs]}
    report |= {"speculation": config.speculation.model_dump(), "numerics": config.numerics, **circumstances()}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
