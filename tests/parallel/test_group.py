"""TensorParallelGroup: ranks are threads or forked processes of the test.

Of symmetric_memory they have to be processes that were not forked: test_symmetric_memory.py.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from configs.errors import ConfigError, DeadlineError, EngineError
from parallel.channel.store_relay import STORE_HOST
from parallel.collectives.group import Strategy, TensorParallelGroup
from parallel.collectives.library_collectives import _own_address
from parallel.collectives.shared_memory import SharedMemoryCollectives
from parallel.environment import MULTICAST_OFF, RANK_ENVIRONMENT
from tests.helpers.forks import start_forked

Body = Callable[[TensorParallelGroup], Any]

STRATEGIES = [
    "gloo",
    "shared_memory",
    pytest.param("nccl", marks=pytest.mark.multi_gpu),
]


@pytest.fixture(autouse=True)
def _environment_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else NCCL's watchdog ends the whole process when a test aborts a group.
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def join(rank: int, size: int, port: int, strategy: Strategy, **options: Any) -> TensorParallelGroup:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    device = f"cuda:{rank}" if strategy == "nccl" else "cpu"
    arguments = {"timeout_s": 30.0, **options}
    return TensorParallelGroup.create(rank=rank, size=size, store=store, device=device, strategy=strategy, **arguments)


def run_threads(size: int, strategy: Strategy, body: Body, **options: Any) -> list[Any]:
    """Runs `body` once per rank, each rank a thread; returns results, or the errors raised, in rank order."""
    if strategy == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            group = join(rank, size, master.port, strategy, **options)
            try:
                results[rank] = body(group)
            finally:
                group.close()
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def run_processes(size: int, strategy: Strategy, body: Body, **options: Any) -> list[Any]:
    """As run_threads, each rank a forked process; a rank that was killed gives its exit code as text."""

    def rank_main(rank: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        try:
            group = join(rank, size, pipe.recv(), strategy, **options)
            result = body(group)
            group.close()
        except Exception as error:  # noqa: BLE001 - handed to the test
            result = error
        pipe.send_bytes(pickle.dumps(result))

    pipes = [multiprocessing.Pipe() for _ in range(size)]
    ranks = start_forked(rank_main, [(rank, pipe[1]) for rank, pipe in enumerate(pipes)])
    # Only now: a process forked beside the store's server threads may inherit a lock that one of them holds.
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for ours, theirs in pipes:
        theirs.close()
        ours.send(master.port)
    results: list[Any] = []
    for (ours, _), process in zip(pipes, ranks, strict=True):
        try:
            assert ours.poll(60)
            results.append(pickle.loads(ours.recv_bytes()))
        except EOFError:
            process.join(20)
            results.append(f"exit code {process.exitcode}")
    for process in ranks:
        process.join(20)
        assert not process.is_alive()
    return results


@functools.cache
def contributions(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """One tensor per rank, with magnitudes so mixed that another order of adding gives other bits.

    Every call gives the same tensors: a rank clones its own before it reduces it.
    """
    generator = torch.Generator().manual_seed(17)
    if not dtype.is_floating_point:
        return [torch.randint(-1000, 1000, shape, generator=generator, dtype=dtype) for _ in range(size)]
    scale = 10.0 ** torch.randint(-3, 3, (size, *shape), generator=generator)
    return list((torch.randn((size, *shape), generator=generator) * scale).to(dtype))


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    wide = torch.float32 if parts[0].dtype.is_floating_point else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())


SHAPES = [(1,), (7,), (3, 576), (0, 576), (64, 1025), (300_007,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]


@functools.cache
def sums_of_everything(size: int) -> list[Tensor]:
    """What `reduce_everything` returns on each of `size` ranks. Called before they are forked, it spares them the
    making of the contributions.
    """
    return [ordered_sum(contributions(size, shape, dtype)) for dtype in DTYPES for shape in SHAPES]


def reduce_everything(group: TensorParallelGroup) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = contributions(group.size, shape, dtype)[group.rank].clone().to(group.device)
            assert group.all_reduce(x) is x
            results.append(x.cpu())
    return results


@pytest.mark.parametrize(
    ("strategy", "size", "run"),
    [
        ("gloo", 3, run_threads),
        ("gloo", 2, run_processes),
        ("shared_memory", 2, run_threads),
        ("shared_memory", 3, run_processes),
        ("shared_memory", 5, run_threads),
    ],
)
def test_all_reduce_sums_in_rank_order_to_the_bit(run: Callable[..., list[Any]], size: int, strategy: Strategy) -> None:
    expected = sums_of_everything(size)
    for result in run(size, strategy, reduce_everything):
        if isinstance(result, Exception):
            raise result
        for got, want in zip(result, expected, strict=True):
            assert same_bits(got, want)


@pytest.mark.multi_gpu
def test_all_reduce_over_nccl_is_the_sum() -> None:
    for result in run_threads(2, "nccl", reduce_everything):
        if isinstance(result, Exception):
            raise result
        for got, want in zip(result, sums_of_everything(2), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_gather_stacks_in_rank_order(strategy: Strategy) -> None:
    size = 2 if strategy == "nccl" else 3
    shapes = [(1,), (5, 3), (), (40_000,)]
    results = run_threads(
        size,
        strategy,
        lambda group: [
            group.all_gather(torch.full(shape, float(group.rank), device=group.device)).cpu() for shape in shapes
        ],
    )
    for result in results:
        for shape, gathered in zip(shapes, result, strict=True):
            assert gathered.shape == (size, *shape)
            for rank in range(size):
                assert (gathered[rank] == rank).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_with_strides_are_reduced_in_place(strategy: Strategy) -> None:
    def body(group: TensorParallelGroup) -> Tensor:
        x = torch.ones(4, 6, device=group.device)
        group.all_reduce(x.t()[1:3])
        return x.cpu()

    expected = torch.ones(4, 6)
    expected[:, 1:3] = 2
    for result in run_threads(2, strategy, body):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_carries_tensors_larger_than_its_buffers(size: int) -> None:
    count = 3_000_001  # 12 MB through buffers of 4 MiB

    def body(group: TensorParallelGroup) -> tuple[Tensor, Tensor]:
        x = contributions(size, (count,), torch.float32)[group.rank].clone()
        return group.all_gather(x)[:, ::1000].clone(), group.all_reduce(x)

    parts = contributions(size, (count,), torch.float32)
    for gathered, total in run_threads(size, "shared_memory", body):
        assert same_bits(total, ordered_sum(parts))
        assert torch.equal(gathered, torch.stack(parts)[:, ::1000])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_barrier_waits_for_the_last_rank(strategy: Strategy) -> None:
    def body(group: TensorParallelGroup) -> tuple[float, float]:
        time.sleep(0.2 * group.rank)
        entered = time.monotonic()
        group.barrier()
        return entered, time.monotonic()

    results = run_threads(2, strategy, body)
    assert min(left for _, left in results) >= max(entered for entered, _ in results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_abort_from_another_thread_ends_a_blocked_collective(strategy: Strategy) -> None:
    ended = threading.Event()

    def body(group: TensorParallelGroup) -> None:
        group.barrier()
        if group.rank == 1:
            assert ended.wait(20)  # never comes to the barrier
            return
        timer = threading.Timer(0.2, group.abort, ("rank 1 died",))
        timer.start()
        try:
            with pytest.raises(EngineError, match="rank 1 died"):
                group.barrier()
            with pytest.raises(EngineError, match="rank 1 died"):
                group.all_reduce(torch.ones(3, device=group.device))
        finally:
            ended.set()
        timer.join()

    assert run_threads(2, strategy, body) == [None, None]


@pytest.mark.parametrize("strategy", ["gloo", "shared_memory"])
def test_a_peer_that_stays_away_ends_in_a_deadline_that_names_its_setting(strategy: Strategy) -> None:
    ended = threading.Event()

    def body(group: TensorParallelGroup) -> None:
        if group.rank == 1:
            assert ended.wait(20)
            return
        try:
            group.all_reduce(torch.ones(3))
        finally:
            ended.set()

    error = run_threads(2, strategy, body, timeout_s=0.4)[0]
    assert isinstance(error, DeadlineError)
    assert "parallel.step_timeout_s=0.4" in str(error)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_never_joins_ends_the_meeting_at_the_deadline(strategy: Strategy) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in range(2):
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"parallel\.step_timeout_s=0\.3"):
            join(rank, 2, master.port, strategy, timeout_s=0.3, generation=rank + 1)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("strategy", ["gloo", "shared_memory"])
def test_a_killed_rank_ends_its_peers_wait(strategy: Strategy) -> None:
    def body(group: TensorParallelGroup) -> None:
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), 9)
        group.all_reduce(torch.ones(3))

    survivor, dead = run_processes(2, strategy, body, timeout_s=4.0)  # also for the two to meet
    assert isinstance(survivor, EngineError)
    assert dead == "exit code -9"


def test_one_rank_that_gives_up_ends_the_others_with_its_reason() -> None:
    def body(group: TensorParallelGroup) -> None:
        if group.rank == 2:
            group.abort("rank 2 ran out of memory")
        else:
            group.all_reduce(torch.ones(3))

    for error in run_threads(3, "shared_memory", body)[:2]:
        assert isinstance(error, EngineError)
        assert "rank 2 ran out of memory" in str(error)


@pytest.mark.parametrize(("size", "spin_us"), [(2, 0), (3, 50)])
def test_random_skew_never_mixes_two_rounds(size: int, spin_us: int) -> None:
    num_rounds = 2000

    def body(group: TensorParallelGroup) -> int:
        chance = random.Random(group.rank)
        wrong = 0
        for i in range(num_rounds):
            if chance.random() < 0.02:
                time.sleep(chance.random() * 0.002)
            x = torch.full((1 + i % 7 * 100,), float(i * (group.rank + 1)))
            group.all_reduce(x)
            wrong += int(not bool((x == i * group.size * (group.size + 1) / 2).all()))
        return wrong

    assert run_processes(size, "shared_memory", body, spin_us=spin_us) == [0] * size


def test_sliced_and_whole_sums_mix_without_racing() -> None:
    def body(group: TensorParallelGroup) -> int:
        chance, wrong = random.Random(group.rank), 0
        for i in range(200):
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.002)
            x = torch.full((400_000 if i % 3 else 5,), float(i + group.rank))
            group.all_reduce(x)
            wrong += int(not bool((x == 3 * i + 3).all()))
        return wrong

    assert run_processes(3, "shared_memory", body) == [0, 0, 0]


def test_nothing_is_left_in_dev_shm_nor_open() -> None:
    before, open_before = set(os.listdir("/dev/shm")), open_segments()
    for generation in (1, 2, 3):
        run_processes(2, "shared_memory", reduce_everything, generation=generation)
        run_threads(2, "shared_memory", lambda group: group.barrier(), generation=generation)
    deadline = time.monotonic() + 20
    while left := set(os.listdir("/dev/shm")) - before:  # processes of other tests may be making theirs
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert open_segments() <= open_before


def open_segments() -> set[str]:
    """Descriptors of this process that hold a segment."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:lockstep" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(fd)
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def test_generations_share_a_store_without_meeting() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups: dict[tuple[int, int], TensorParallelGroup] = {}

    def enter(generation: int, rank: int) -> None:
        groups[generation, rank] = join(rank, 2, master.port, "shared_memory", generation=generation)

    threads = [threading.Thread(target=enter, args=(generation, rank)) for generation in (1, 2) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    groups[1, 0].abort("generation 1 is over")
    with pytest.raises(EngineError, match="generation 1 is over"):
        groups[1, 1].barrier()
    wait = threading.Thread(target=groups[2, 1].barrier)
    wait.start()
    groups[2, 0].barrier()
    wait.join(10)
    for group in groups.values():
        group.close()


@pytest.mark.parametrize("strategy", ["gloo", "shared_memory"])
def test_survivors_of_an_abort_meet_a_new_rank_in_the_next_generation(strategy: Strategy) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> TCPStore:
        return TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)

    def rank_main(rank: int) -> tuple[bool, list[float]]:
        group = join(rank, 3, master.port, strategy)
        survivor = group
        group.barrier()
        if rank == 1:
            group.abort("rank 1 leaves")
            group.close()
            group = join(rank, 3, master.port, strategy, generation=2)
        else:
            timer = threading.Timer(0.2, group.abort, ("rank 1 has left",))
            timer.start()
            with pytest.raises(EngineError):
                group.all_reduce(torch.ones(3))
            timer.join()
            group.rejoin(client(), 2)
        sums = [float(group.all_reduce(torch.full((5,), 10.0**rank + i))[0]) for i in range(4)]
        group.close()
        return group is survivor, sums

    with ThreadPoolExecutor(3) as ranks:
        results = list(ranks.map(rank_main, range(3)))
    assert results == [(rank != 1, [111.0 + 3 * i for i in range(4)]) for rank in range(3)]


def test_a_rank_finds_the_address_its_peers_reach_it_by_over_ipv6(ipv6_loopback: str) -> None:
    listening = socket.create_server((ipv6_loopback, 0), family=socket.AF_INET6)
    port = listening.getsockname()[1]
    master = TCPStore(ipv6_loopback, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    master.set(STORE_HOST, ipv6_loopback)
    store = PrefixStore("generation", master)
    store.set("network/1", "that of another node")
    address = _own_address(rank=0, size=2, store=store, timeout_s=5.0)
    assert address == ipv6_loopback
    assert ProcessGroupGloo.create_device(hostname=address) is not None


def test_group_of_one_is_the_identity() -> None:
    group = TensorParallelGroup.single()
    x = torch.arange(4.0)
    assert group.all_reduce(x) is x
    assert torch.equal(group.all_gather(x), x[None])
    group.barrier()
    group.abort("nobody listens")
    group.close()


def test_a_closed_group_says_so() -> None:
    def body(group: TensorParallelGroup) -> None:
        group.close()
        group.close()
        with pytest.raises(EngineError, match="closed"):
            group.all_reduce(torch.ones(1))

    assert run_threads(2, "shared_memory", body) == [None, None]


@pytest.mark.parametrize(
    ("strategy", "device"),
    [("shared_memory", "cuda:0"), ("gloo", "cuda:0"), ("nccl", "cpu"), ("symmetric_memory", "cpu")],
)
def test_a_strategy_is_refused_for_the_wrong_device(strategy: Strategy, device: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=rf"parallel\.all_reduce={strategy} does not serve device={device[:3]}"):
        TensorParallelGroup.create(rank=0, size=2, store=store, device=device, strategy=strategy, timeout_s=1.0)


@pytest.mark.parametrize("strategy", ["nccl", "symmetric_memory"])
@pytest.mark.parametrize("name", sorted(MULTICAST_OFF))
@pytest.mark.parametrize("value", [None, "other"])
def test_a_rank_on_a_gpu_is_refused_where_multicast_is_not_off(
    strategy: Strategy, name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"but not so set: {name};.*runtime_env"):
        TensorParallelGroup.create(rank=0, size=2, store=HashStore(), device="cuda:0", strategy=strategy, timeout_s=1.0)


def test_small_buffers_give_the_same_bits() -> None:
    """Pieces, slices and whole tensors are one sum: the size of the buffers is no part of the answer."""
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = contributions(3, (10_001,), torch.bfloat16)
    totals: list[Any] = [None] * 3

    def rank_main(rank: int) -> None:
        store = TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)
        collectives = SharedMemoryCollectives.create(
            rank=rank, size=3, store=store, timeout_s=20, spin_us=0, buffer_bytes=4096
        )
        x = parts[rank].clone()
        collectives.all_reduce(x)
        totals[rank] = x
        collectives.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for total in totals:
        assert same_bits(total, ordered_sum(parts))
