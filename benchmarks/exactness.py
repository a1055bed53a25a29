"""Whether logits are the same bits however they are computed: hashes every row of them, in many ways of serving.

    python -m benchmarks.exactness [--config FILE] [--set KEY=VALUE ...] [--sizes 1,2,3] [--tokens 24] --json OUT
    python -m benchmarks.exactness --compare ONE OTHER

The requests are a fixed set: prompts of 1 to 600 tokens (`--long N`: and N longer ones), greedy and with seeds, as many
as a batch has rows. All of them decode at once, and then one after the other ends, until one is left; a few want the
log probabilities of their prompts, whose steps run eagerly. Each number of ranks answers them together, in chunks,
after a prefix hit, with too few pages, so that some are computed again, and at other page sizes, and the first of them
one by one; on a GPU with graphs and without. A row is of a request and a position; the table has the hash of each that
the first way gave, and how many rows of each other way differ. `--compare` holds the tables of two runs against each
other: other machines, other versions.

The hash of a row is the sum over the vocabulary of the logit's 32 bits times an odd number of the token's, modulo
2**64: one changed bit always changes it, and ranks hash their columns alone. `--plant` lets several ranks add the
leaves of every sum by another tree than one does, which has to be found. Every rank is a process that schedules for
itself.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from benchmarks.frames import ScheduledFrames
from benchmarks.ranks import TIMEOUT_S, start_worker
from benchmarks.report import ROOT, circumstances
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from configs.checkpoint import resolve_model_path
from configs.load import load_app_config
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig, resolved
from parallel import tree
from parallel.environment import RANK_ENVIRONMENT
from parallel.plan import Span
from parallel.tree import SumTree
from worker import tp_worker
from worker.device.card import node_card
from worker.protocol import RowFlag, StepFrame, StepResult
from worker.step.model_runner import ModelRunner
from worker.step.pending_step import PendingStep
from worker.step.step_layout import StepShape
from worker.tp_worker import TPWorker

_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 40, 63, 64, 65, 100, 128, 150, 255, 256, 257, 300, 400, 513, 600)
_NUM_SHORT = 8
"""Prompts after the first of each length have one of so many of _LENGTHS: all decode before the first one ends."""
_SCORED = (2, 8, 14)
"""Requests that want the log probabilities of their prompts."""
_MAX_LONG = 4000
_NUM_ALONE = 32
"""Requests that are answered one by one."""
_Rows = dict[tuple[int, int], int]
"""The hash of a row of logits, by request and number of tokens before it."""


@dataclass(frozen=True)
class Way:
    """A way of serving the requests."""

    name: str
    chunk: int = 512
    """Most prompt tokens of a step."""
    rows: int = 64
    at_once: bool = True
    caches: bool = False
    """Answer the requests twice with a prefix cache; the second time counts."""
    num_tokens: int = 32768
    """Tokens of the KV pool."""
    preempts: bool = False
    """The pool holds the prompts and too little of the answers, so that requests are computed again."""
    fills: bool = False
    """All rows decode at once."""
    page_size: int = 16
    graphs: bool = True
    """Replay CUDA graphs where they fit, on a GPU."""

    def num_pages(self, asked: Sequence[GenerateRequest], max_model_len: int) -> int:
        """Pages of the KV pool, which holds the longest request."""
        num_pages, longest = -(-self.num_tokens // self.page_size), -(-max_model_len // self.page_size)
        if self.preempts:
            of_prompts = (-(-len(request.prompt) // 4 // self.page_size) for request in asked)
            num_pages = sum(of_prompts) + len(asked)  # enough to admit all
        return max(num_pages, longest)


WAYS = (
    Way("together", fills=True),
    Way("one by one", at_once=False),
    Way("in chunks of 16", chunk=16),
    Way("in chunks of 100, 8 at once", chunk=100, rows=8),
    Way("after a prefix hit", caches=True),
    Way("with too few pages", preempts=True),
    Way("in pages of 64", page_size=64),
    Way("in pages of 1", page_size=1),
)
_ON_GPU = {"rows": 256, "num_tokens": 1 << 17}
GPU_WAYS = (
    Way("together, chunks of 2048", chunk=2048, fills=True, **_ON_GPU),
    Way("in chunks of 256, no graphs", chunk=256, rows=64, num_tokens=1 << 17, graphs=False),
    Way("after a prefix hit, chunks of 8192, no graphs", chunk=8192, caches=True, graphs=False, fills=True, **_ON_GPU),
    Way("with too few pages", chunk=2048, rows=256, preempts=True),
    Way("one by one in pages of 64", chunk=8192, at_once=False, page_size=64, **_ON_GPU),
)


def hash_rows(logits: torch.Tensor, span: Span) -> torch.Tensor:
    """[num_rows] int64 of logits [num_rows, span.size] fp32, of tokens `span`; ranks' sums wrap to that of all."""
    factors = torch.arange(span.start, span.stop, dtype=torch.int64, device=logits.device) * -7046029254386353131
    factors = (factors ^ (factors >> 29)) * -4658895280553007687 | 1
    return torch.stack([(row.view(torch.int32) * factors).sum() for row in logits])


def rows_of_logits(frame: StepFrame, scheduler: Scheduler) -> list[tuple[int, int]]:
    """The rows of logits that a step makes, in its order: request, and tokens before the one they are of."""
    ids, rows = scheduler._rows.ids, list[tuple[int, int]]()
    for run in frame.prompt_runs:
        rows += [(int(ids[run["row"]]), int(run["start"]) + 1 + i) for i in range(run["num"])]
    for row, start, count, flags in zip(frame.rows, frame.starts, frame.lens, frame.flags, strict=True):
        if flags & RowFlag.SAMPLE:
            rows.append((int(ids[row]), int(start + count)))
    return rows


def requests(vocab_size: int, count: int, num_tokens: int, num_long: int) -> list[GenerateRequest]:
    """The fixed set, every second one greedy and the others at temperature 1.

    Each answer has at least `num_tokens` tokens and up to twice as many, the first the most: for so long all decode at
    once, and each step after it has a share less of them, so that small batches have as many steps as large ones.

    Args:
        num_long: requests with prompts of up to _MAX_LONG tokens, after `count` with those of _LENGTHS.
    """
    generator = np.random.default_rng(7)
    lengths = [*_LENGTHS, *(_LENGTHS[number % _NUM_SHORT] for number in range(count - len(_LENGTHS)))]
    lengths += np.random.default_rng(8).integers(600, _MAX_LONG, num_long).tolist()
    decay = np.log(np.arange(1, len(lengths) + 1)) / np.log(max(len(lengths), 2))
    found = []
    for number, length in enumerate(lengths):
        sampling = SamplingParams(
            max_tokens=num_tokens + round(num_tokens * (1 - decay[number])),
            temperature=float(number % 2),
            seed=number,
            ignore_eos=True,
            prompt_logprobs=0 if number in _SCORED else -1,
        )
        prompt = generator.integers(100, vocab_size, length).astype(np.int32).tobytes()
        found.append(GenerateRequest(id=number + 1, prompt=prompt, sampling=sampling))
    return found


class Frames(ScheduledFrames):
    """The frames of one way, and whose logits each step's are.

    They are the same on every rank, whenever its results come: the scheduler hears of a result when it has no step to
    launch without, and of one at a time. Where it heard at once, ranks that were not equally fast launched other steps,
    and waited for each other for ever.
    """

    def __init__(
        self,
        way: Way,
        vocab_size: int,
        max_model_len: int,
        num_pages: int,
        asked: list[GenerateRequest],
        num_states: int | None,
    ) -> None:
        super().__init__(
            SchedulerLimits(
                num_pages=num_pages,
                page_size=way.page_size,
                max_num_seqs=way.rows,
                max_num_batched_tokens=max(way.chunk, way.rows),
                prefill_chunk_size=way.chunk,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                max_num_queued_requests=1000,
                max_num_queued_tokens=1 << 20,
                steps_in_flight=2,
                enable_prefix_caching=way.caches,
                eos_token_ids=(),
                num_states=num_states,
            )
        )
        self.rows: list[tuple[int, int]] = []
        """Request and tokens before it, of each row of logits, in order."""
        self.first_counted = 0
        """Rows before this one were only to fill the cache."""
        self.most_rows = 0
        """Most rows of logits of one step; those of prompts do not count."""
        self._results: deque[bytes] = deque()
        """Results that the scheduler has not heard of."""
        self._way = way
        self._waves = [asked] if way.at_once else [[request] for request in asked[:_NUM_ALONE]]
        if way.caches:
            self._waves.insert(0, list(asked))
        self._num_warm = 1 if way.caches else 0

    def poll(self) -> bytes | None:
        while (frame := self._next_step()) is None and self._results:
            self._scheduler.retire(StepResult.decode(self._results.popleft()))
        if frame is None:
            return None
        self.rows += rows_of_logits(frame, self._scheduler)
        self.most_rows = max(self.most_rows, int(np.count_nonzero(frame.samples_per_row)))
        return frame.encode()

    def retire(self, result: bytes) -> None:
        self._results.append(result)

    def _next_step(self) -> StepFrame | None:
        if not self._scheduler.has_work and not self._scheduler.num_in_flight and self._waves:
            if self._num_warm == 0:
                self.first_counted = self.first_counted or len(self.rows)
            self._num_warm -= 1
            assert not self._scheduler.add(self._waves.pop(0))
        return self._scheduler.next_step()

    def check(self) -> None:
        """Raises AssertionError unless the requests were served in the way that its name says."""
        way, stats = self._way, self._scheduler.stats()
        assert bool(stats.total_preemptions) == way.preempts, f"{way.name}: {stats.total_preemptions} preemptions"
        assert bool(stats.total_prefix_hit_tokens) == way.caches, f"{way.name}: {stats.total_prefix_hit_tokens} hits"
        assert not way.fills or self.most_rows == way.rows, f"{way.name}: {self.most_rows} rows at once"


def ways_on(device: str) -> tuple[Way, ...]:
    return WAYS if device == "cpu" else GPU_WAYS


def _most_rows(device: str) -> int:
    """Most rows of a batch, and so requests."""
    return max(way.rows for way in ways_on(device))


class _Watch:
    """Hashes a rank's logits, which nothing returns: where they are computed, and after replays of graphs."""

    def __init__(self, worker: TPWorker, span: Span) -> None:
        self._worker, self._span = worker, span
        self.hashes: list[torch.Tensor] = []
        """The hash of every row since `begin`, in order."""
        self._local_logits = worker.shard.decoder.local_logits
        worker.shard.decoder.local_logits = self._watched  # type: ignore[method-assign]

    def begin(self) -> None:
        """After each `allocate`."""
        self.hashes.clear()
        runner = self._worker._runner
        assert runner is not None
        launch, replay, num_sampled = runner.launch, runner._graphs.replay, 0

        def launched(frame: StepFrame) -> PendingStep:
            nonlocal num_sampled
            num_sampled = np.count_nonzero(frame.flags & RowFlag.SAMPLE)
            return launch(frame)

        def replayed(shape: StepShape) -> Any:
            output = replay(shape)
            if num_sampled:
                self.hashes.append(hash_rows(output.logits[:num_sampled], self._span))
            return output

        runner.launch, runner._graphs.replay = launched, replayed  # type: ignore[method-assign]

    def _watched(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._local_logits(hidden, out)
        if len(logits) and not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.hashes.append(hash_rows(logits, self._span))
        return logits


def plant() -> None:
    """Lets this process split each tree of at least three leaves at its root one leaf earlier than it should.

    What is below the root is added as it should be, so kernels that sum subtrees find them whole.
    """
    # Beneath their caches, which would keep the right trees.
    right, of = tree.halves, SumTree.of.__wrapped__  # type: ignore[attr-defined]
    additions_of = tree.additions_of

    def planted(cls: type[SumTree], spans: tuple[Span, ...]) -> SumTree:
        def halves(leaves: Span) -> tuple[Span, Span]:
            left, _ = right(leaves)
            is_root = leaves == (0, spans[-1].stop) and leaves.size > 2
            middle = left.stop - 1 if is_root else left.stop
            return Span(leaves.start, middle), Span(middle, leaves.stop)

        tree.halves, tree.additions_of = halves, additions_of.__wrapped__
        try:
            return of(cls, spans)  # type: ignore[no-any-return]
        finally:
            tree.halves, tree.additions_of = right, additions_of

    SumTree.of = classmethod(functools.cache(planted))  # type: ignore[method-assign, assignment]


def _rank_main(rank: int, config: EngineConfig, path: Path, port: int, args: argparse.Namespace, out: Any) -> None:
    if args.plant and config.tensor_parallel_size > 1:
        tp_worker.check_exactness = lambda *_: None  # it would refuse to start
        plant()
    worker, group = start_worker(rank, config, path, port)
    if args.graph_tokens is not None:
        tp_worker.launch_bound_tokens = lambda _: args.graph_tokens
    watch = _Watch(worker, worker._plan.vocab[rank])
    max_model_len, capture = resolved(config.max_model_len), ModelRunner.capture
    for way in ways_on(config.device):
        if way.page_size != config.kv_cache.page_size:
            continue
        asked = requests(worker.vocab_size, _most_rows(config.device), args.tokens, args.long)
        num_pages = way.num_pages(asked, max_model_len)
        num_states = 2 * resolved(config.scheduler.max_num_seqs) if worker.shard.decoder.state_layers else None
        frames = Frames(way, worker.vocab_size, max_model_len, num_pages, asked, num_states)
        ModelRunner.capture = capture if way.graphs else lambda *_, **__: None  # type: ignore[method-assign]
        worker.allocate(num_pages, max_model_len, None, num_states)
        watch.begin()
        began = time.perf_counter()
        worker.run(frames, frames.retire)
        found = torch.cat(watch.hashes).cpu().numpy()
        assert len(found) == len(frames.rows), f"{len(found)} rows of logits, {len(frames.rows)} in the frames"
        frames.check()
        first = frames.first_counted
        out.put((way.name, frames.rows[first:], found[first:], time.perf_counter() - began))
    group.barrier()


def rows_of(config: EngineConfig, path: Path, args: argparse.Namespace) -> dict[str, tuple[_Rows, int, float]]:
    """Each way's results: the hash of every row, how many of them came twice with different bits, and seconds."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    out, size = context.Queue(), config.tensor_parallel_size
    ranks = [
        context.Process(target=_rank_main, args=(rank, config, path, store.port, args, out), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    parts: dict[str, list[Any]] = {}
    for _ in range(size * sum(way.page_size == config.kv_cache.page_size for way in ways_on(config.device))):
        name, *part = _next_of(out, ranks, args.timeout)
        parts.setdefault(name, []).append(part)
    for process in ranks:
        process.join(TIMEOUT_S)
    found = {}
    for name, of_ranks in parts.items():
        keys, rows, num_unsteady = of_ranks[0][0], _Rows(), 0
        assert all(part[0] == keys for part in of_ranks), "the ranks' schedulers made other frames"
        for key, row_hash in zip(keys, np.sum([part[1] for part in of_ranks], axis=0).tolist(), strict=True):
            num_unsteady += rows.setdefault(key, row_hash) != row_hash
        found[name] = rows, num_unsteady, max(part[2] for part in of_ranks)
    return found


def _next_of(out: Any, ranks: list[Any], timeout_s: float) -> Any:
    """The findings of the next rank; ends the run where one has died."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return out.get(timeout=1.0)
        except queue.Empty:
            failed = any(process.exitcode for process in ranks)
            if failed or time.monotonic() > deadline:
                raise SystemExit("a rank failed" if failed else f"nothing came within {timeout_s:g} s") from None


def first_differing(one: _Rows, other: _Rows) -> dict[int, int]:
    """The tokens before the first row that differs, by request."""
    first: dict[int, int] = {}
    for request, position in sorted(key for key, found in other.items() if one[key] != found):
        first.setdefault(request, position)
    return first


def digests(rows: _Rows) -> dict[str, str]:
    """The hash of all rows of a request, by request."""
    by_request: dict[int, list[tuple[int, int]]] = {}
    for (request, position), row_hash in rows.items():
        by_request.setdefault(request, []).append((position, row_hash))
    return {
        str(request): hashlib.sha256(str(sorted(own)).encode()).hexdigest()[:16] for request, own in by_request.items()
    }


def compare(one: Path, other: Path) -> int:
    """Prints which requests' logits differ between two runs; their number."""
    first, second = (json.loads(path.read_text()) for path in (one, other))
    assert first["tokens"] == second["tokens"], "runs of other numbers of tokens"
    differing = [key for key, digest in first["digests"].items() if second["digests"].get(key) != digest]
    print(f"{len(differing)} of {len(first['digests'])} requests differ" + "".join(f" {key}" for key in differing))
    return len(differing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sizes", default="1,2,3", help="numbers of ranks")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each request, at least; from 24 on")
    parser.add_argument("--long", type=int, default=0, help="more prompts, of up to 4000 tokens")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that one way may take")
    parser.add_argument("--graph-tokens", type=int, help="most tokens of a captured prompt step")
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("ONE", "OTHER"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.compare:
        raise SystemExit(bool(compare(*args.compare)))

    os.environ.update(RANK_ENVIRONMENT)  # the ranks' processes inherit it
    reference, before = _Rows(), _Rows()
    table, num_rows, num_differing = [], 0, 0
    for size in map(int, args.sizes.split(",")):
        ways = ways_on(_resolved(args, size, WAYS[0].page_size)[0].device)
        for page_size in sorted({way.page_size for way in ways}, key=lambda it: it != ways[0].page_size):
            config, path = _resolved(args, size, page_size)
            for name, (rows, num_unsteady, seconds) in rows_of(config, path, args).items():
                reference = reference or rows
                assert rows.keys() <= reference.keys(), "rows that the first way does not have"
                differing = num_unsteady + sum(reference[key] != found for key, found in rows.items())
                table.append({"ranks": size, "way": name, "rows": len(rows), "differing": differing})
                num_rows, num_differing = num_rows + len(rows), num_differing + differing
                print(f"{size} ranks, {name}: {differing} of {len(rows)} rows differ ({seconds:.0f} s)", flush=True)
                if differing:
                    print("  the first of each request:", first_differing(reference, rows))
                    print("  from the way before:", sum(before.get(key, found) != found for key, found in rows.items()))
                before = rows
    report: dict[str, Any] = {"config": args.config, "overrides": args.overrides, "tokens": args.tokens}
    report |= {"rows": num_rows, "differing": num_differing, "ways": table, "digests": digests(reference)}
    report |= circumstances()
    print(f"{num_differing} of {num_rows} rows of logits differ from those of {table[0]['ranks']} ranks")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(bool(num_differing))


def _resolved(args: argparse.Namespace, size: int, page_size: int) -> tuple[EngineConfig, Path]:
    overrides = [*args.overrides, f"tensor_parallel_size={size}", f"kv_cache.page_size={page_size}"]
    num_gpus = torch.cuda.device_count()
    ways = ways_on("cuda" if num_gpus else "cpu")
    overrides += [f"max_model_len={(_MAX_LONG if args.long else max(_LENGTHS)) + 2 * args.tokens}"]
    overrides += [f"scheduler.max_num_seqs={_most_rows('cuda' if num_gpus else 'cpu')}"]
    overrides += [f"scheduler.max_num_batched_tokens={max(way.chunk for way in ways)}"]
    if size > num_gpus > 0:
        overrides += ["parallel.all_reduce=nccl"]
    given = load_app_config(ROOT / args.config, overrides).engine
    path = resolve_model_path(given.model, given.revision, weights=given.load_format != "dummy")
    card = node_card() if torch.cuda.is_available() else None
    host = HostFacts(torch.get_num_threads(), max(num_gpus, size) if num_gpus else 0, card)
    return resolve(given, read_model_config(path), host).config, path


if __name__ == "__main__":
    main()
