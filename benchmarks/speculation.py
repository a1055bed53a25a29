"""A measurement of speculation: tokens a second with it over those without, and whether an answer differs.

    python -m benchmarks.speculation [--config FILE] [--set KEY=VALUE ...] [--batches 1,4] [--tokens 64]
                                     [--accept RATE] --json OUT

Two kinds of prompts: chats that ask for a given text, as it is or with one word changed, and random token ids. All are
submitted at once and so many run at a time, the others wait; they are answered without, with, with and without
speculation, as often as --rounds says, by the same ranks, for whom this process schedules as a coordinator does, over
its channel: no Ray, no HTTP. Answers have half to all of --tokens, since prompts of rows that all end at once would
share their steps without speculation alone. Rates have the prompts' time in them. The ratio is that of all time,
`cpu_ratio` that of the processor time of all processes, which other programs change less. `decode_ms` is the median
time between the results of full batches of decodes, and `verify_ms` that of steps with drafts, `verified` of them a
step. Greedy answers to random ids soon go round in circles, which drafts follow; those drawn at temperature 1 repeat
nothing. With --accept the drafts of the latter are the answers without speculation, each token of them with that
probability, as other engines' benchmarks force it; where the ranks draft, they take the place of theirs on the device,
as many as there are. Without speculation no pass of a head runs, but its weights are there, and steps leave the states
that it reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]  # ships no types
import torch
from torch.distributed import TCPStore

from benchmarks.ranks import start_worker
from benchmarks.report import ROOT, circumstances, table
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.ranks.step_channel import StepChannel
from cluster.scheduling.drafter import Drafter
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.ngrams import NgramHistory
from cluster.scheduling.scheduler import Scheduler
from cluster.text.tokenizer import Tokenizer
from configs.checkpoint import resolve_model_path
from configs.load import load_app_config
from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.resolve import HostFacts, resolve
from configs.schema import NO_SPECULATION, EngineConfig, resolved
from parallel.channel.ring import FrameReader, Ring
from parallel.environment import RANK_ENVIRONMENT
from worker.device.card import node_card
from worker.protocol import FrameKind, Int32Array, StepFrame, StepResult
from worker.step.draft_passes import DraftPasses
from worker.upload import upload

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
_MOST_BYTES = 1 << 22  # a frame's size


_HEAD_RUNS, _HEAD_RESTS = b"the head runs", b"the head rests"


class _Frames:
    """A FrameSource over a channel, which also says whether the draft head runs behind the steps, and what it is to
    draft in place of what it does: [requests, positions] int32, by the first token of the prompt."""

    def __init__(self, frames: FrameReader, passes: DraftPasses) -> None:
        self._frames, self._passes, self._run = frames, passes, passes.run
        self._requests = np.zeros(passes._inputs._last_tokens.shape[0], np.int64)  # by row of the page table

    def recv(self, timeout_s: float) -> bytes:
        while (frame := self._frames.recv(timeout_s)).startswith((_HEAD_RUNS, _HEAD_RESTS)):
            self._turn(frame)
        return frame

    def poll(self) -> bytes | None:
        frame = self._frames.poll()
        if frame is not None and frame.startswith((_HEAD_RUNS, _HEAD_RESTS)):
            self._turn(frame)
            return None
        return frame

    def _turn(self, how: bytes) -> None:
        run: Callable[..., torch.Tensor | None] = self._run
        if how == _HEAD_RESTS:
            run = lambda *_, **__: None  # noqa: E731
        elif known := how[len(_HEAD_RUNS) :]:
            table = np.frombuffer(known, np.int32).reshape(-1, _MAX_MODEL_LEN).astype(np.int64)
            run = partial(self._run_forced, torch.from_numpy(table).to(self._passes._tokens.device))
        self._passes.run = run  # type: ignore[method-assign]

    def _run_forced(self, known: torch.Tensor, frame: StepFrame, *args: Any) -> torch.Tensor | None:
        given, lens = frame.has_tokens, frame.lens[frame.has_tokens]
        begins = frame.starts[given] == 0
        self._requests[frame.rows[given][begins]] = frame.token_ids[(np.cumsum(lens) - lens)[begins]]
        drafts, rows = self._run(frame, *args), frame.rows[frame.samples_per_row > 0].astype(np.int64)
        if drafts is None:
            return None
        starts = self._passes._inputs._next_starts
        assert starts is not None, "drafts of ranks that do not know where rows are"
        on_device, requests = upload(np.stack((rows, self._requests[rows])), drafts.device)
        behind = torch.arange(1, 1 + drafts.shape[1], device=starts.device)
        places = starts.index_select(0, on_device).unsqueeze(1) + behind
        return known[requests.unsqueeze(1), places.clamp_(max=_MAX_MODEL_LEN - 1)]


def _rank_main(
    rank: int, config: EngineConfig, path: Path, port: int, num_pages: int, addresses: tuple[str, str], ready: Event
) -> None:
    worker, group = start_worker(rank, config, path, port)
    worker.allocate(num_pages, _MAX_MODEL_LEN)
    frames, results = (Ring.attach(address) for address in addresses)
    ready.set()
    assert worker._runner is not None
    source, sink = _Frames(frames.reader(rank), worker._runner._draft_passes), results.writer()
    worker.run(source, partial(sink.send, timeout_s=_TIMEOUT_S) if rank == 0 else None)
    group.barrier()


def with_errors(tokens: list[int], rate: float, seed: int) -> Int32Array:
    """`tokens`, each of them kept with probability `rate`."""
    is_wrong = np.random.default_rng(seed).random(len(tokens)) >= rate
    return np.where(is_wrong, 0, tokens).astype(np.int32)


class _Foreseen:
    """In place of a request's history, one that knows the answer, and is wrong on purpose."""

    def __init__(self, whole: list[int], rate: float, num_drafts: int, seed: int) -> None:
        self._num_tokens, self._rate, self.num_drafts = 0, rate, num_drafts
        self._drafts = with_errors(whole, rate, seed).tolist()  # now, since steps wait for drafts

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def chances(self) -> tuple[float, float] | None:
        return (self._rate, self._rate) if self.num_drafts else None

    def take(self, tokens: Int32Array, *, is_whole: bool) -> None:
        self._num_tokens += len(tokens)
        self.num_drafts = max(0, self.num_drafts - len(tokens))

    def drafts(self, count: int) -> list[int]:
        known = self._drafts[self._num_tokens : self._num_tokens + count]
        return known + [0] * (count - len(known))


class Foreseeing(Drafter):
    """A drafter of answers that are known; where the ranks draft, of as many tokens as they do, once these are here."""

    def __init__(self, *args: Any, wholes: dict[int, list[int]], rate: float) -> None:
        super().__init__(*args)
        self._wholes, self._rate = wholes, rate

    def take(self, rows: Int32Array) -> None:
        for request in map(self._rows.request, rows.tolist()):
            if request.history is None:
                num_drafts = 0 if self._asks else sys.maxsize
                foreseen = _Foreseen(self._wholes[request.id], self._rate, num_drafts, request.id)
                request.history = cast("NgramHistory", foreseen)
        super().take(rows)

    def has_drafts_on_device(self, rows: Int32Array) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)

    def bring(self, rows: Int32Array, drafts: Int32Array) -> None:
        super().bring(rows, drafts)
        for row, count in zip(rows.tolist(), (drafts >= 0).sum(axis=1).tolist(), strict=True):
            cast("_Foreseen", self._rows.request(row).history).num_drafts = count
            self._rows.predicted[row] = count > 0


class _Ranks:
    """The processes of the ranks, and a scheduler for each measurement."""

    def __init__(self, config: EngineConfig, path: Path, most: int) -> None:
        model = read_model_config(path)
        self.vocab_size = model.vocab_size
        self._limits = SchedulerLimits(
            num_pages=most * -(-_MAX_MODEL_LEN // config.kv_cache.page_size),
            page_size=config.kv_cache.page_size,
            max_num_seqs=most,
            max_num_batched_tokens=resolved(config.scheduler.max_num_batched_tokens),
            prefill_chunk_size=resolved(config.scheduler.max_num_batched_tokens),
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=model.vocab_size,
            max_num_queued_requests=10_000,
            max_num_queued_tokens=1 << 24,
            steps_in_flight=2,
            enable_prefix_caching=False,
            eos_token_ids=(),
        )
        self.speculation = config.speculation
        self._last_step = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context, size = multiprocessing.get_context("spawn"), config.tensor_parallel_size
        self._processes: list[Any] = []
        ready = [context.Event() for _ in range(size)]

        def attach(_: str, *addresses: str) -> None:
            for rank, event in enumerate(ready):
                args = (rank, config, path, self._store.port, self._limits.num_pages, addresses, event)
                self._processes.append(context.Process(target=_rank_main, args=args, daemon=True))
                self._processes[-1].start()

        self._channel = StepChannel.over_shared_memory(size, _MOST_BYTES, config.parallel, attach)
        for event in ready:
            assert event.wait(_TIMEOUT_S), "a rank did not start"

    def answer(
        self,
        requests: list[GenerateRequest],
        batch: int,
        *,
        speculates: bool,
        drafter: Callable[..., Drafter] = Drafter,
        forced: bytes = b"",
    ) -> _Run:
        """Has `requests` answered, `batch` at a time, with drafts as `_Frames` reads them in `forced`, if any."""
        speculation = self.speculation if speculates else NO_SPECULATION
        limits = replace(self._limits, max_num_seqs=batch, speculation=speculation)
        with mock.patch("cluster.scheduling.scheduler.Drafter", drafter):
            scheduler = Scheduler(limits)
        self._channel.frames.send(_HEAD_RUNS + forced if speculates else _HEAD_RESTS, _TIMEOUT_S)
        scheduler.last_step = self._last_step
        assert not scheduler.add(requests)
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        frames: dict[int, StepFrame] = {}
        steps: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        began, cpu_began = time.perf_counter(), self._cpu_s()
        ended = began
        while scheduler.has_work:
            while (frame := scheduler.next_step()) is not None:
                frames[frame.step] = frame
                self._channel.frames.send(frame.encode(), _TIMEOUT_S)
            result = StepResult.decode(self._channel.results.recv(_TIMEOUT_S))
            before, ended = ended, time.perf_counter()
            output, frame = scheduler.retire(result), frames.pop(result.step)
            # Steps of fewer rows, and of prompts, say nothing of a batch.
            if len(frame.rows) == batch and (frame.lens == np.maximum(frame.samples_per_row, 1)).all():
                num_drafts = int((frame.samples_per_row - 1).sum())
                steps[num_drafts > 0].append((ended - before, num_drafts))
            ids, new = np.frombuffer(output.ids, np.int64), np.frombuffer(output.tokens, np.int32)
            for request_id, token in zip(ids.tolist(), new.tolist(), strict=True):
                tokens[request_id].append(token)
        seconds, cpu_s = time.perf_counter() - began, self._cpu_s() - cpu_began
        self._last_step, stats = scheduler.last_step, scheduler.stats()
        return _Run(tokens, seconds, cpu_s, stats.total_drafted, stats.total_accepted, steps)

    def _cpu_s(self) -> float:
        """Processor time of the ranks and of this process."""
        processes = [psutil.Process(), *(psutil.Process(process.pid) for process in self._processes)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def close(self) -> None:
        self._channel.frames.send(StepFrame(1, self._last_step + 1, kind=FrameKind.CLOSE).encode(), _TIMEOUT_S)
        for process in self._processes:
            process.join(30)
        self._channel.close()


@dataclass(frozen=True)
class _Run:
    """Answers to some requests."""

    tokens: dict[int, list[int]]
    seconds: float
    cpu_s: float
    drafted: int
    accepted: int
    steps: dict[bool, list[tuple[float, int]]]
    """Seconds and drafts of full batches' steps, by whether they verified drafts."""


def _measure(
    ranks: _Ranks, prompts: list[list[int]], batch: int, temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of prompts that are answered `batch` at a time."""
    count = max(len(prompts), 2 * batch)
    lengths = np.random.default_rng(2).permutation(np.linspace(args.tokens / 2, args.tokens, count).astype(int))
    requests = [
        GenerateRequest(
            id=index + 1,
            prompt=np.array(prompt if args.accept is None else [index + 1, *prompt[1:]], np.int32).tobytes(),
            sampling=SamplingParams(max_tokens=length, temperature=temperature, seed=index, ignore_eos=True),
        )
        for index, (length, prompt) in enumerate(zip(lengths.tolist(), itertools.cycle(prompts), strict=False))
    ]
    drafter: Callable[..., Drafter] = Drafter
    forced = b""
    if args.accept is not None:
        known = ranks.answer(requests, batch, speculates=False).tokens
        wholes = {it.id: [*np.frombuffer(it.prompt, np.int32).tolist(), *known[it.id]] for it in requests}
        if ranks.speculation.is_by_ranks:
            table = np.zeros((count + 1, _MAX_MODEL_LEN), np.int32)
            for it, whole in wholes.items():
                table[it, : len(whole)] = with_errors(whole, args.accept, it)
            forced = table.tobytes()
        else:
            drafter = partial(Foreseeing, wholes=wholes, rate=args.accept)
    order = (False, True, True, False) * args.rounds
    runs = [(it, ranks.answer(requests, batch, speculates=it, drafter=drafter, forced=forced)) for it in order]
    without, with_ = ([run for speculates, run in runs if speculates is kind] for kind in (False, True))
    first, num_tokens = runs[0][1], int(lengths.sum())
    plain, drafting = (
        [step for run in runs_of for step in run.steps[kind]] for runs_of, kind in ((without, False), (with_, True))
    )
    seconds = [sum(run.seconds for run in of_kind) for of_kind in (without, with_)]
    return {
        "tok_s_without": round(len(without) * num_tokens / seconds[0], 1),
        "tok_s_with": round(len(with_) * num_tokens / seconds[1], 1),
        "ratio": round(seconds[0] / seconds[1], 3),
        "cpu_ratio": round(sum(run.cpu_s for run in without) / sum(run.cpu_s for run in with_), 3),
        "ratios": [round(one.seconds / other.seconds, 3) for one, other in zip(without, with_, strict=True)],
        "decode_ms": round(statistics.median(seconds for seconds, _ in plain) * 1e3, 3) if plain else None,
        "verify_ms": round(statistics.median(seconds for seconds, _ in drafting) * 1e3, 3) if drafting else None,
        "verified": round(statistics.mean(count for _, count in drafting), 1) if drafting else 0.0,
        "drafted": sum(run.drafted for run in with_),
        "accepted": sum(run.accepted for run in with_),
        "tokens_compared": (len(runs) - 1) * num_tokens,
        "tokens_differing": sum(
            one != two
            for _, run in runs[1:]
            for key, tokens in run.tokens.items()
            for one, two in zip(first.tokens[key], tokens, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--accept", type=float, metavar="RATE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    os.environ.update(RANK_ENVIRONMENT)  # the ranks' processes inherit it
    overrides = ["speculation.method=ngram", f"scheduler.max_num_seqs={max(batches)}", *args.overrides]
    given = load_app_config(ROOT / args.config, overrides).engine
    path = resolve_model_path(given.model, given.revision, weights=given.load_format != "dummy")
    card = node_card() if torch.cuda.is_available() else None
    host = HostFacts(len(os.sched_getaffinity(0)), torch.cuda.device_count(), card)
    config = resolve(given, with_draft_head(read_model_config(path), given), host).config
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
    _measure(ranks, random, max(batches), 0.0, argparse.Namespace(tokens=8, rounds=1, accept=None))  # warms up
    rows = []
    kinds = (("edit", edits, (0.0, 0.7)), ("random", random, (0.0, 1.0)))
    for kind, prompts, temperatures in kinds if args.accept is None else (("random", random, (1.0,)),):
        if not prompts:
            continue  # random weights edit nothing
        for temperature, batch in itertools.product(temperatures, batches):
            figures = _measure(ranks, prompts, batch, temperature, args)
            rows.append({"prompts": kind, "temperature": temperature, "at_once": batch, **figures})
            print(rows[-1], flush=True)
    ranks.close()
    header = [name for name in rows[0] if name != "ratios"]
    print(table(header, [[str(row[name]) for name in header] for row in rows]))
    command = " ".join(["python -m benchmarks.speculation", *sys.argv[1:]])
    report: dict[str, Any] = {
        "command": command,
        "config": args.config,
        "overrides": args.overrides,
        "tokens": args.tokens,
    }
    report |= {"tensor_parallel_size": config.tensor_parallel_size, "measured": rows}
    report |= {"speculation": config.speculation.model_dump(), "numerics": config.numerics, **circumstances()}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
