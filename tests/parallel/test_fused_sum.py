"""Sums over the ranks in the kernel of the next norm: the arithmetic in the interpreter, ranks that meet on GPUs."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="a CPU install has no Triton")

import triton
import triton.language as tl

from configs.errors import DeadlineError, EngineError
from configs.layers import Axis, Cut, Linear
from parallel.collectives.group import TensorParallelGroup
from parallel.collectives.interface import PartialSum
from parallel.collectives.symmetric_memory import PeerSizes, SymmetricMemoryCollectives, way_of
from parallel.kernels.all_reduce_norm import _nodes_of_ranks, in_rank_order, nodes_of
from parallel.kernels.tree_sum import add_norm_row, finish, sum_add_norm
from parallel.layers.linear import RowParallelLinear
from parallel.numerics.arithmetic import FAST, LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import LayerShard, Span
from parallel.tree import SumTree
from tests.helpers.rank_processes import Ranks, digest, part_of
from worker.layers.norm import RMSNorm

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5
SHAPES = [(1, 4096), (2, 4096), (7, 4096), (64, 4096), (1, 8), (3, 576), (33, 1000), (128, 512), (5, 2560), (2, 16384)]
LARGE_SHAPES = [(129, 4096), (512, 4096), (1000, 1000), (2000, 576), (300, 16384)]
SIZES_OF_STEP = PeerSizes(rows=2048, row_bytes=32768, sum_bytes=64 << 20)

SIZES = [pytest.param(size, marks=pytest.mark.multi_gpu) for size in (2, 3, 4)]


def expected_of(parts: list[Tensor], residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream to the bit, and the norm of it in fp32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    residual = (total + residual.float()).to(residual.dtype)
    return residual, F.rms_norm(residual.float(), residual.shape[1:], weight.float(), EPS)


def check_result(
    normed: Tensor, residual: Tensor, parts: list[Tensor], residual_before: Tensor, weight: Tensor
) -> None:
    expected, expected_norm = expected_of(parts, residual_before, weight)
    assert torch.equal(residual.cpu(), expected)
    torch.testing.assert_close(normed.cpu(), expected_norm.to(normed.dtype))


@triton.jit
def _local_kernel(
    out_ptr,
    residual_ptr,
    weight_ptr,
    bases,
    offset,
    eps,
    NODES: tl.constexpr,
    ADDS: tl.constexpr,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The kernel without the meeting of the ranks, whose PTX the interpreter has not."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    residual_ptr += row * SIZE
    residual = tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    row_bytes: tl.constexpr = SIZE * (DTYPE.primitive_bitwidth // 8)
    offset, node_bytes = offset + row * row_bytes, tl.num_programs(0) * row_bytes
    x = finish(_nodes_of_ranks(bases, offset, node_bytes, columns, inside, NODES, DTYPE), ADDS)[2 * len(ADDS)]
    add_norm_row(out_ptr + row * SIZE, residual_ptr, x, residual, weight, columns, inside, eps, SIZE)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels compiled for a GPU take no CPU tensors")
@pytest.mark.parametrize("dtype", [FP32, torch.float16])
@pytest.mark.parametrize(("size", "shape"), [(2, (1, 64)), (3, (4, 576)), (8, (2, 1000))])
def test_summands_are_added_in_rank_order_and_then_the_residual(
    size: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    # Of unequal sizes, so that another order would round otherwise.
    parts = [part_of(rank, shape, dtype) * (1000 if rank % 2 else 3) for rank in range(size)]
    memory = [torch.cat((torch.full((32,), float("nan"), dtype=dtype), part.flatten())) for part in parts]
    residual, weight = part_of(20, shape, dtype), part_of(21, (1, shape[1]), dtype)[0]
    before, normed = residual.clone(), torch.empty_like(residual)
    bases = tuple(tensor.data_ptr() for tensor in memory)
    _local_kernel[(shape[0],)](
        normed,
        residual,
        weight,
        bases,
        32 * dtype.itemsize,
        EPS,
        NODES=nodes_of((1,) * size),
        ADDS=in_rank_order(size),
        DTYPE=tl.float32 if dtype is FP32 else tl.float16,
        SIZE=shape[1],
        BLOCK=1 << (shape[1] - 1).bit_length(),
    )
    check_result(normed, residual, parts, before, weight)


ADDS = ((1, 2), (0, 4), (5, 3))
"""The tree (0 + (1 + 2)) + 3."""


def tree_of(*counts: int) -> SumTree:
    """Of ranks that bring so many nodes."""
    return SumTree(tuple((Span(0, 1),) * count for count in counts), ADDS)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels compiled for a GPU take no CPU tensors")
@pytest.mark.parametrize("counts", [(1, 3), (3, 0, 1), (1, 2, 1), (1, 1, 1, 1), (4,)])
def test_nodes_are_added_as_their_tree_says_wherever_they_lie(counts: tuple[int, ...]) -> None:
    shape = (3, 1000)
    nodes = torch.stack([part_of(i, shape, FP32) * (1000 if i % 2 else 3) for i in range(4)])
    before, weight = part_of(20, shape, torch.float16), part_of(21, (1, shape[1]), torch.float16)[0]
    memory = [torch.cat((torch.full((32,), float("nan")), part.flatten())) for part in nodes.split(counts)]
    residual, normed = before.clone(), torch.empty_like(before)
    _local_kernel[(shape[0],)](
        normed,
        residual,
        weight,
        tuple(tensor.data_ptr() for tensor in memory),
        128,
        EPS,
        NODES=nodes_of(counts),
        ADDS=ADDS,
        DTYPE=tl.float32,
        SIZE=shape[1],
        BLOCK=1024,
    )
    alone = before.clone()
    assert torch.equal(sum_add_norm(nodes, ADDS, alone, weight, EPS), normed)
    assert torch.equal(alone, residual)
    total = (nodes[0] + (nodes[1] + nodes[2])) + nodes[3]
    check_result(normed, residual, [total], before, weight)


def test_how_ranks_sum_depends_on_bytes_type_and_room() -> None:
    sizes = PeerSizes(rows=600, sum_bytes=16 << 20)
    for size, shape, of, way in [
        (2, (8, 4096), BF16, "small"),
        (8, (8, 4096), BF16, "small"),
        (8, (64, 4096), BF16, "large"),  # too much to read from each of the others
        (2, (129, 64), BF16, "large"),  # more rows than programs that run at once
        (2, (64, 16384), BF16, "large"),
        (2, (601, 64), BF16, None),
        (2, (600, 16384), BF16, None),
        (2, (8, 4096), torch.float16, None),
        (2, (8, 4096), FP32, None),
        (1, (8, 4096), BF16, None),
        (9, (8, 4096), BF16, None),
        (2, (0, 4096), BF16, None),
        (2, (8, 1001), BF16, None),
        (2, (8, 32768), BF16, None),
        (2, (64, 4096), tree_of(1, 1), "small"),
        (3, (16, 2560), tree_of(0, 2, 1), "small"),
        (2, (64, 4096), tree_of(1, 2), "large"),  # of the rank that brings the most
        (2, (512, 4096), tree_of(1, 2), "large"),
        (2, (512, 4096), tree_of(1, 3), None),
        (1, (8, 4096), tree_of(3), None),
    ]:
        assert way_of(size, shape, of, sizes) == way, (size, shape, of)
    assert way_of(2, (109, 64), BF16, sizes, num_sms=108) == "large"


# One GPU, where each rank is a stream.


def ranks_on_one_gpu(size: int, timeout_s: float) -> list[tuple[SymmetricMemoryCollectives, torch.cuda.Stream]]:
    num_bytes = SymmetricMemoryCollectives.bytes_of(SIZES_OF_STEP)
    memories = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(size)]
    addresses = [memory.data_ptr() for memory in memories]
    sums = [
        SymmetricMemoryCollectives(memory, addresses, SIZES_OF_STEP, rank=i, timeout_s=timeout_s)
        for i, memory in enumerate(memories)
    ]
    torch.cuda.synchronize()
    return [(each, torch.cuda.Stream()) for each in sums]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_are_streams_of_one_gpu_get_the_same_sums(size: int) -> None:
    members = ranks_on_one_gpu(size, timeout_s=20.0)
    # More programs of all ranks together cannot all run at once.
    shapes = [shape for shape in SHAPES if size * shape[0] <= 128] + [(130, 512), (200, 4096)]
    for shape in shapes * 3:
        parts = [part_of(rank, shape, BF16) for rank in range(size)]
        before, weight = part_of(20, shape, BF16), part_of(21, (1, shape[1]), BF16)[0]
        residuals = [before.cuda() for _ in range(size)]
        on_gpu, parts_on_gpu = weight.cuda(), [part.cuda() for part in parts]
        torch.cuda.synchronize()
        results = []
        for (sums, stream), part, residual in zip(members, parts_on_gpu, residuals, strict=True):
            with torch.cuda.stream(stream):
                partial_sum = sums.partial_sum(shape, BF16)
                partial_sum.summand.copy_(part)
                results.append(partial_sum.add_norm(residual, on_gpu, EPS))
        torch.cuda.synchronize()
        for (sums, _), normed, residual in zip(members, results, residuals, strict=True):
            sums.check_alive()
            check_result(normed, residual, parts, before, weight)
            assert torch.equal(normed, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(1, 3), (3, 0, 1), (1, 2, 1)])
def test_ranks_that_are_streams_of_one_gpu_finish_a_tree_as_one_rank_does(
    counts: tuple[int, ...],
) -> None:
    members = ranks_on_one_gpu(len(counts), timeout_s=20.0)
    for shape in [(1, 4096), (7, 4096), (16, 2560), (33, 1000), (1, 16384), (131, 576), (200, 4096)] * 3:
        nodes = torch.stack([part_of(i, shape, FP32) * (1000 if i % 2 else 3) for i in range(4)]).cuda()
        before, weight = part_of(20, shape, BF16).cuda(), part_of(21, (1, shape[1]), BF16)[0].cuda()
        alone = before.clone()
        expected = sum_add_norm(nodes, ADDS, alone, weight, EPS)
        residuals = [before.clone() for _ in counts]
        torch.cuda.synchronize()
        results = []
        for (sums, stream), part, residual in zip(members, nodes.split(counts), residuals, strict=True):
            with torch.cuda.stream(stream):
                node_sum = sums.partial_sum(shape, tree_of(*counts))
                node_sum.summand.copy_(part)
                results.append(node_sum.add_norm(residual, weight, EPS))
        torch.cuda.synchronize()
        for (sums, _), normed, residual in zip(members, results, residuals, strict=True):
            sums.check_alive()
            assert torch.equal(residual, alone)
            assert torch.equal(normed, expected)


def queue_sums(sums: SymmetricMemoryCollectives, num_sums: int) -> Any:
    """Queues sums that nobody else comes to; the event behind them."""
    residual, weight = torch.zeros(4, 4096, dtype=BF16, device="cuda"), torch.ones(4096, dtype=BF16, device="cuda")
    for _ in range(num_sums):
        partial_sum = sums.partial_sum((4, 4096), BF16)
        partial_sum.summand.fill_(1.0)
        partial_sum.add_norm(residual, weight, EPS)
    done = torch.cuda.Event()
    done.record()
    return done


def seconds_until(done: Any, limit_s: float) -> float:
    began = time.monotonic()
    while not done.query():
        assert time.monotonic() - began < limit_s, f"the stream does not drain within {limit_s:g} s"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.gpu
def test_a_wait_ends_at_its_deadline_and_no_later_one_waits() -> None:
    (sums, _), _ = ranks_on_one_gpu(2, timeout_s=1.5)
    done = queue_sums(sums, 10)
    sums.check_alive()
    assert seconds_until(done, 3.0) > 0.5
    with pytest.raises(DeadlineError, match=r"parallel\.step_timeout_s=1\.5"):
        sums.check_alive()
    with pytest.raises(DeadlineError):
        queue_sums(sums, 1)


@pytest.mark.gpu
def test_an_abort_ends_a_wait_within_a_second() -> None:
    (sums, _), _ = ranks_on_one_gpu(2, timeout_s=60.0)
    done = queue_sums(sums, 10)
    time.sleep(0.3)
    assert not done.query()
    sums.abort("told to")
    seconds_until(done, 1.0)
    with pytest.raises(EngineError, match="told to"):
        sums.check_alive()
    with pytest.raises(EngineError, match="told to"):
        queue_sums(sums, 1)


# Several GPUs, where each rank is a process.


def sums(group: TensorParallelGroup) -> list[str]:
    """Sums of all shapes; digests of their bits."""
    digests = []
    for shape in (SHAPES + LARGE_SHAPES) * 3:
        parts = [part_of(rank, shape, BF16) for rank in range(group.size)]
        before, weight = part_of(20, shape, BF16), part_of(21, (1, shape[1]), BF16)[0]
        wide = torch.zeros(shape[0], shape[1] + 64, dtype=BF16, device=group.device)
        residual = wide[:, : shape[1]].copy_(before)
        partial_sum = group.partial_sum(shape, BF16)
        assert partial_sum is not None
        partial_sum.summand.copy_(parts[group.rank])
        normed = partial_sum.add_norm(residual, weight.to(group.device), EPS)
        check_result(normed, residual, parts, before, weight)
        assert not bool(wide[:, shape[1] :].any()), "wrote beside the residual's rows"
        digests += [digest(residual), digest(normed)]
    group.check_alive()
    return digests


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_same_bits(ranks: Ranks, size: int) -> None:
    results = ranks.run(size, "symmetric_memory", sums, sizes=SIZES_OF_STEP)
    assert len(results[0]) > 20
    assert all(result == results[0] for result in results)


def steps(group: TensorParallelGroup, num_steps: int, buckets: list[tuple[int, int]], begins_with_gather: bool) -> int:
    """Replays graphs of (rows, number of sums) between eager steps, at changing speeds; elements that were wrong."""
    hidden = 1024
    size, device = group.size, group.device
    counter = torch.zeros((), device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    ranks_of_all = torch.arange(size, device=device)
    row_term = (torch.arange(300, device=device) % 5)[:, None].expand(300, hidden).contiguous()
    weight = torch.ones(hidden, dtype=BF16, device=device)

    def step(num_rows: int, num_sums: int) -> None:
        # Integers up to 210, which bf16 holds.
        own = (row_term[:num_rows] + counter + group.rank).to(BF16)
        total = ((row_term[:num_rows] + counter) * size + size * (size - 1) // 2).to(BF16)
        if begins_with_gather:
            wrong.add_((group.all_gather(own[0])[:, 0] != (counter + ranks_of_all).to(BF16)).sum())
        for i in range(num_sums):
            partial_sum = group.partial_sum((num_rows, hidden), BF16)
            assert partial_sum is not None
            torch.mul(own, i % 3 + 1, out=partial_sum.summand)
            residual = torch.zeros(num_rows, hidden, dtype=BF16, device=device)
            normed = partial_sum.add_norm(residual, weight, EPS)
            wrong.add_((residual != total * (i % 3 + 1)).sum() + (normed != 1).sum())

    graphs = []
    for bucket in buckets:
        for _ in range(2):
            step(*bucket)
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step(*bucket)
        graphs.append(graph)
    same, own_random = random.Random(5), random.Random(group.rank)
    for i in range(num_steps):
        counter.fill_(i % 13)
        if own_random.random() < 0.1:
            torch.cuda._sleep(own_random.randrange(400_000))
        which = same.randrange(len(graphs) + 1)
        if which < len(graphs):
            graphs[which].replay()
        else:
            step(1 + i % 9, 3 if begins_with_gather else 4)
        if i % 23 == 0:
            gathered = group.all_gather(torch.full((4,), float(group.rank + i), device=device))
            expected = torch.arange(size, device=device)[:, None] + i
            wrong.add_((gathered != expected).sum())
        if i % 29 == 0:
            large = torch.full((2048, 1024), 1.0, dtype=BF16, device=device)
            wrong.add_((group.all_reduce(large) != size).sum())
    total_wrong = int(wrong)
    group.check_alive()
    return total_wrong


@pytest.mark.parametrize("size", SIZES)
def test_replays_of_an_even_number_of_sums_need_no_other_collective(ranks: Ranks, size: int) -> None:
    buckets = [(1, 2), (8, 72), (5, 2), (40, 12), (300, 3)]
    assert ranks.run(size, "symmetric_memory", steps, 1000, buckets, False, sizes=SIZES_OF_STEP) == [0] * size


@pytest.mark.parametrize("size", SIZES)
def test_replays_that_begin_with_a_gather_may_hold_any_number_of_sums(ranks: Ranks, size: int) -> None:
    buckets = [(1, 2), (8, 72), (5, 3), (40, 1), (299, 5)]
    assert ranks.run(size, "symmetric_memory", steps, 1000, buckets, True, sizes=SIZES_OF_STEP) == [0] * size


class Weights(TensorSource):
    """A TensorSource of one seeded weight and bias."""

    def __init__(self, out_features: int, in_features: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        self.bias = torch.randn(out_features, generator=generator)

    def read(self, name: str, out: Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        tensor = self.bias if name.endswith(".bias") else self.weight
        out.copy_(tensor if columns is None else tensor[:, slice(*columns)])


def layers(group: TensorParallelGroup) -> list[str]:
    """A row-parallel layer and the norm behind it against the whole weight; digests of what must be equal."""
    hidden, width = 512, 768
    source = Weights(hidden, width)
    placed: dict[str, Any] = {"dtype": BF16, "device": group.device}
    span = Span(width * group.rank // group.size, width * (group.rank + 1) // group.size)
    norm = RMSNorm(hidden, EPS, **placed)
    norm.weight.fill_(1.0)
    digests = []
    for num_tokens, bias, fused in [
        (1, False, True),
        (5, False, True),
        (600, False, True),
        (2100, False, False),
        (5, True, False),
    ]:
        linear = Linear("o", hidden, width, Cut(Axis.MLP_COLUMNS, 1), bias)
        row = RowParallelLinear(
            linear, LayerContext((LayerShard({Axis.MLP_COLUMNS: span}),) * group.size, group, FAST, **placed)
        )
        row.load(source, "")
        x, before = part_of(0, (num_tokens, width), BF16), part_of(1, (num_tokens, hidden), BF16)
        residual = before.to(group.device)
        y = row.for_norm(x[:, slice(*span)].to(group.device))
        assert isinstance(y, PartialSum) == fused
        normed = norm.add(y, residual)
        want = F.linear(x.float(), source.weight.to(BF16).float(), source.bias if bias else None) + before.float()
        torch.testing.assert_close(residual.cpu().float(), want, atol=0.05, rtol=0.02)
        torch.testing.assert_close(normed.cpu().float(), F.rms_norm(want, (hidden,), eps=EPS), atol=0.05, rtol=0.02)
        digests += [digest(residual), digest(normed)]
    return digests


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_leaves_its_sum_to_the_norm_where_that_is_fused(ranks: Ranks, size: int) -> None:
    results = ranks.run(size, "symmetric_memory", layers, sizes=SIZES_OF_STEP)
    assert all(result == results[0] for result in results)


def left_alone(group: TensorParallelGroup, end: Callable[[TensorParallelGroup], None] | None) -> str:
    """Rank 0 replays 72 sums that rank 1 does not come to; what its calls raise once the stream has drained."""
    hidden = 4096
    residual = torch.zeros(1, hidden, dtype=BF16, device=group.device)
    weight = torch.ones(hidden, dtype=BF16, device=group.device)

    def step() -> None:
        for _ in range(72):
            partial_sum = group.partial_sum((1, hidden), BF16)
            assert partial_sum is not None
            partial_sum.summand.fill_(1.0)
            partial_sum.add_norm(residual, weight, EPS)

    step()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    if group.rank == 1:
        time.sleep(10.0 if end is None else 2.0)
        return ""
    graph.replay()
    done: Any = torch.cuda.Event()
    done.record()
    timer = threading.Timer(0.3, end or (lambda _: None), [group])
    timer.start()
    seconds_until(done, 10.0 if end is None else 1.3)
    del graph
    timer.join()
    try:
        group.partial_sum((1, hidden), BF16).add_norm(residual, weight, EPS)  # type: ignore[union-attr]
    except EngineError as error:
        with pytest.raises(type(error)):
            group.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told_to(group: TensorParallelGroup) -> None:
    group.abort("told to")


@pytest.mark.multi_gpu
def test_an_abort_drains_a_step_whose_peer_never_comes(ranks: Ranks) -> None:
    assert ranks.run(2, "symmetric_memory", left_alone, told_to)[0] == "EngineError: told to"
    # The processes are fit for another group.
    assert ranks.run(2, "symmetric_memory", steps, 20, [(2, 2)], False) == [0, 0]


@pytest.mark.multi_gpu
def test_a_deadline_drains_a_step_whose_peer_never_comes(ranks: Ranks) -> None:
    raised = ranks.run(2, "symmetric_memory", left_alone, None, timeout_s=6.0)[0]
    assert raised.startswith(
        "DeadlineError: rank 0 waited for another in a collective longer than parallel.step_timeout_s=6"
    )
    assert ranks.run(2, "symmetric_memory", steps, 20, [(2, 2)], False) == [0, 0]
