"""Latency of the CPU all-reduces: gloo against shared memory, by number of ranks and floats.

    python -m benchmarks.all_reduce [--ranks 2 3 5 9] [--floats 576 9216 294912] [--spin-us N] [--rounds N]

Every rank is a forked process with one torch thread. A barrier starts the rounds; then each rank times its own calls,
back to back, and rank 0's times are printed. spin 0 means that a waiting rank sleeps at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch

from parallel.group import Strategy, TensorParallelGroup


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 5, 9])
    parser.add_argument("--floats", type=int, nargs="+", default=[576, 9216, 294912])
    parser.add_argument("--spin-us", type=int, default=50, help="used where every rank has a core of its own")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--strategies", nargs="+", default=["gloo", "shared_memory"])
    args = parser.parse_args()

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {platform.machine()}, torch {torch.__version__}, float32, p50/p99 us on rank 0")
    print(f"{'ranks':>5} {'strategy':>14} {'spin':>5} " + " ".join(f"{count:>17}" for count in args.floats))
    for size in args.ranks:
        for strategy in args.strategies:
            spin_us = args.spin_us if strategy == "shared_memory" and size <= cores else 0
            rounds = args.rounds if strategy == "shared_memory" else args.rounds // 5
            cells = measure(size, strategy, spin_us, args.floats, rounds)
            text = " ".join(f"{p50:>8.0f}/{p99:>8.0f}" for p50, p99 in cells)
            print(f"{size:>5} {strategy:>14} {spin_us:>5} {text}", flush=True)


if __name__ == "__main__":
    main()
