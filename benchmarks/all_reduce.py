"""Latency of the all-reduces by number of ranks and size.

    python -m benchmarks.all_reduce [--ranks 2 3 5 9] [--floats 576 9216 294912] [--spin-us N] [--rounds N]
    python -m benchmarks.all_reduce --device cuda [--ranks 2 4] [--bytes 8192 1048576] [--json FILE]

cpu: gloo against shared memory. Every rank is a forked process with one torch thread. A barrier starts the rounds; then
each rank times its own calls, back to back, and rank 0's times are printed. spin 0 means that a waiting rank sleeps at
once.

cuda: the sum of rows of 4096 in bf16, added to a residual and normed. nccl is its all-reduce and a norm; small and
large are the kernels of symmetric memory in which a rank reads all of the others' rows, or sums a share of the rows.
nodes is large of one fp32 node a rank. Every rank is a process with one GPU. A CUDA graph holds 50 sums, one after the
other; printed is the time of one of them on rank 0, the median of 5 measurements. In brackets what a group chooses.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from parallel.collectives import symmetric_memory
from parallel.collectives.group import Strategy, TensorParallelGroup
from parallel.collectives.symmetric_memory import PeerSizes, way_of
from parallel.environment import RANK_ENVIRONMENT
from parallel.plan import Span
from parallel.tree import SumTree

METHODS = ("nccl", "small", "large", "nodes")
ROW = 4096
CALLS_IN_GRAPH = 50


def rank_main(
    rank: int, size: int, strategy: Strategy, spin_us: int, floats: list[int], rounds: int, pipe: Connection
) -> None:
    """Gets the store's port, times `rounds` all-reduces of every size, sends (p50, p99) in microseconds for each."""
    torch.set_num_threads(1)
    port = pipe.recv()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    group = TensorParallelGroup.create(
        rank=rank, size=size, store=store, device="cpu", strategy=strategy, timeout_s=60, spin_us=spin_us
    )
    answers = []
    for count in floats:
        x = torch.randn(count)
        repeats = max(10, rounds if count < 100_000 else rounds // 10)
        times = []
        for i in range(repeats + 5):
            if i == 5:
                group.barrier()
            start = time.perf_counter()
            group.all_reduce(x)
            times.append(time.perf_counter() - start)
            x.fill_(1.0)
        times = sorted(times[5:])
        answers.append((1e6 * times[len(times) // 2], 1e6 * times[int(len(times) * 0.99)]))
    group.barrier()
    group.close()
    pipe.send(answers)


def measure(size: int, strategy: Strategy, spin_us: int, floats: list[int], rounds: int) -> list[tuple[float, float]]:
    """(p50, p99) in microseconds for each of `floats`."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=rank_main, args=(rank, size, strategy, spin_us, floats, rounds, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    # Only now: a process forked beside the store's server threads may inherit a lock that one of them holds.
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for pipe in pipes:
        pipe[0].send(master.port)
    if not pipes[0][0].poll(300):
        raise TimeoutError(f"{strategy} with {size} ranks did not end within 300 s")
    answer: list[tuple[float, float]] = pipes[0][0].recv()
    for process in ranks:
        process.join()
    return answer


def cuda_rank_main(rank: int, size: int, sizes: list[int], port: int, pipe: Connection) -> None:
    """Times every method at each of `sizes` bytes.

    Sends {method: [microseconds, None for what it cannot do, one for each size] or torch's no}.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    answers: dict[str, list[float | None] | str] = {}
    strategies: tuple[Strategy, ...] = ("nccl", "symmetric_memory")
    for generation, strategy in enumerate(strategies):
        group = TensorParallelGroup.create(
            rank=rank,
            size=size,
            store=store,
            device=device,
            strategy=strategy,
            timeout_s=60,
            generation=generation,
            sizes=PeerSizes(max(sizes) // (2 * ROW), 2 * ROW, 2 * max(sizes)),
        )
        for method in METHODS[:1] if strategy == "nccl" else METHODS[1:]:
            answers[method] = [time_in_graph(group, method, nbytes) for nbytes in sizes]
        group.barrier()
        group.close()
    pipe.send(answers)


def prepared(group: TensorParallelGroup, method: str, nbytes: int) -> Callable[[], object] | None:
    """One call of `method` for `nbytes` bytes; None if it cannot do so many."""
    from worker.kernels.norm import add_rms_norm

    shape = (nbytes // 2 // ROW, ROW)
    residual = torch.zeros(shape, dtype=torch.bfloat16, device=group.device)
    weight = torch.ones(ROW, dtype=torch.bfloat16, device=group.device)
    if method == "nccl":
        x = torch.zeros_like(residual)
        return lambda: add_rms_norm(group.all_reduce(x), residual, weight, 1e-6)
    of = torch.bfloat16 if method != "nodes" else SumTree.of(tuple(Span(rank, rank + 1) for rank in range(group.size)))
    most, rows = symmetric_memory._MAX_READ_BYTES, symmetric_memory._MAX_SMALL_ROWS
    if method == "small" and (shape[0] > rows or nbytes > symmetric_memory._SMALL_BYTES):
        return None

    def call() -> None:
        # Whichever way the group would choose, this one.
        symmetric_memory._MAX_READ_BYTES = 1 << 30 if method == "small" else 0
        partial_sum = group.partial_sum(shape, of)
        symmetric_memory._MAX_READ_BYTES = most
        assert partial_sum is not None
        partial_sum.add_norm(residual, weight, 1e-6)

    return call


def time_in_graph(group: TensorParallelGroup, method: str, nbytes: int) -> float | None:
    """Microseconds of one call of `method` for `nbytes` bytes; None if it cannot do so many."""
    call = prepared(group, method, nbytes)
    if call is None:
        return None
    for _ in range(4):
        call()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS_IN_GRAPH):
            call()
    num_replays = max(1, min(20, (1 << 28) // nbytes // CALLS_IN_GRAPH))
    times = []
    for i in range(6):
        group.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(num_replays):
            graph.replay()
        end.record()
        end.synchronize()
        if i:
            times.append(1e3 * start.elapsed_time(end) / num_replays / CALLS_IN_GRAPH)
    graph.reset()  # the end of an NCCL communicator waits for it
    return statistics.median(times)


def measure_cuda(size: int, sizes: list[int]) -> dict[str, list[float | None] | str]:
    """{method: [microseconds or None, one for each of `sizes`], or why there are none} of `size` ranks."""
    context = multiprocessing.get_context("spawn")
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ours, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
    ranks = [
        context.Process(target=cuda_rank_main, args=(rank, size, sizes, master.port, pipe), daemon=True)
        for rank, pipe in enumerate(theirs)
    ]
    for process in ranks:
        process.start()
    for pipe in theirs:
        pipe.close()
    if not ours[0].poll(300):
        raise TimeoutError(f"{size} ranks did not end within 300 s")
    answers: dict[str, list[float | None] | str] = ours[0].recv()
    for process in ranks:
        process.join()
    return answers


def main_cuda(all_ranks: list[int], sizes: list[int], json_path: Path | None) -> None:
    """Prints the table of every number of ranks that the machine has GPUs for."""
    os.environ.update(RANK_ENVIRONMENT)  # the ranks inherit it
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"
    print(f"{machine}, bf16, us for each of {CALLS_IN_GRAPH} all-reduces in a CUDA graph")
    records = []
    for size in [size for size in all_ranks if size <= torch.cuda.device_count()]:
        answers, everything = measure_cuda(size, sizes), PeerSizes(1 << 20, 0, 1 << 40)
        print(f"{size} ranks".rjust(10) + "".join(f"{label(nbytes):>11}" for nbytes in sizes))
        for method in METHODS:
            cells, answer = [], answers[method]
            if isinstance(answer, str):
                print(f"{method:>10} {answer}", flush=True)
                continue
            for nbytes, us in zip(sizes, answer, strict=True):
                if us is None:
                    cells.append("- ")
                    continue
                chosen = way_of(size, (nbytes // 2 // ROW, ROW), torch.bfloat16, everything) == method
                cells.append(f"[{us:.1f}]" if chosen else f"{us:.1f} ")
                records.append({"ranks": size, "bytes": nbytes, "method": method, "us": us, "chosen": chosen})
            print(f"{method:>10}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps({"machine": machine, "measurements": records}, indent=1) + "\n")


def label(nbytes: int) -> str:
    """8 KB, 1 MB."""
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", help="2 3 5 9 on cpu, 2 to 8 on cuda")
    parser.add_argument("--bytes", type=int, nargs="+", default=[8192 << shift for shift in range(14)], help="cuda")
    parser.add_argument("--json", type=Path, help="cuda: where the figures go as well")
    parser.add_argument("--floats", type=int, nargs="+", default=[576, 9216, 294912])
    parser.add_argument("--spin-us", type=int, default=50, help="used where every rank has a core of its own")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--strategies", nargs="+", default=["gloo", "shared_memory"])
    args = parser.parse_args()
    if args.device == "cuda":
        main_cuda(args.ranks or list(range(2, 9)), args.bytes, args.json)
        return

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {platform.machine()}, torch {torch.__version__}, float32, p50/p99 us on rank 0")
    print(f"{'ranks':>5} {'strategy':>14} {'spin':>5} " + " ".join(f"{count:>17}" for count in args.floats))
    for size in args.ranks or [2, 3, 5, 9]:
        for strategy in args.strategies:
            spin_us = args.spin_us if strategy == "shared_memory" and size <= cores else 0
            rounds = args.rounds if strategy == "shared_memory" else args.rounds // 5
            cells = measure(size, strategy, spin_us, args.floats, rounds)
            text = " ".join(f"{p50:>8.0f}/{p99:>8.0f}" for p50, p99 in cells)
            print(f"{size:>5} {strategy:>14} {spin_us:>5} {text}", flush=True)


if __name__ == "__main__":
    main()
