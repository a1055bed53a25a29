"""Sums over the ranks of one node: the same bodies over shared_memory on CPUs, and over NCCL and symmetric memory on
GPUs. What a norm sums is in test_fused_sum.py."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import HashStore, PrefixStore

from configs.errors import EngineError
from configs.layers import Axis, Cut, Linear
from parallel.collectives.group import Strategy, TensorParallelGroup
from parallel.collectives.peer_mapping import RecountedStore, Registration
from parallel.collectives.symmetric_memory import PeerSizes
from parallel.layers.embedding import ParallelLMHead, VocabParallelEmbedding, whole_logits
from parallel.layers.linear import RowParallelLinear
from parallel.numerics.arithmetic import FAST, LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import LayerShard, ShardPlan, Span
from tests.helpers.dense_model import dense_model
from tests.helpers.rank_processes import Ranks, digest, part_of
from worker.device.memory import await_idle

BF16, FP32 = torch.bfloat16, torch.float32

CUDA_STRATEGIES = [
    pytest.param(strategy, size, marks=pytest.mark.multi_gpu)
    for strategy in ("nccl", "symmetric_memory")
    for size in (2, 3, 4)
]
STRATEGIES = [("shared_memory", 2), *CUDA_STRATEGIES]


def check_sum(total: Tensor, parts: list[Tensor]) -> None:
    """`total` is the sum within a rounding for each addition."""
    wide = torch.stack([part.double() for part in parts])
    unit = {BF16: 2.0**-8, torch.float16: 2.0**-11, FP32: 2.0**-23}[total.dtype]
    error = (total.cpu().double() - wide.sum(0)).abs()
    assert bool((error <= len(parts) * unit * wide.abs().sum(0)).all()), f"off by up to {error.max()}"


SHAPES = [(1, 4096), (2, 4096), (7, 4096), (64, 4096), (511, 4096), (512, 4096), (3, 576), (5, 1001), (1, 1), (0, 64)]


def sums(group: TensorParallelGroup, dtypes: list[torch.dtype]) -> list[str]:
    """Sums of all shapes; digests of their bits."""
    digests = []
    for dtype in dtypes:
        for shape in SHAPES:
            parts = [part_of(rank, shape, dtype) for rank in range(group.size)]
            total = group.all_reduce(parts[group.rank].clone().to(group.device))
            check_sum(total, parts)
            digests.append(digest(total))
    return digests


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES)
def test_every_rank_gets_the_same_bits_of_the_sum(ranks: Ranks, strategy: Strategy, size: int) -> None:
    dtypes = [BF16] if strategy == "shared_memory" else [BF16, FP32, torch.float16]
    results = ranks.run(size, strategy, sums, dtypes)
    assert all(result == results[0] for result in results)


def mixed_calls(group: TensorParallelGroup, num_rounds: int) -> int:
    """Sums of changing shapes between gathers and barriers; how many came out wrong."""
    wrong = 0
    for i in range(num_rounds):
        shape = (1 + i % 5 * 40, 512)
        expected = float(sum(i % 7 + rank for rank in range(group.size)))
        total = group.all_reduce(torch.full(shape, i % 7 + group.rank, dtype=BF16, device=group.device))
        gathered = group.all_gather(torch.full((i % 4 + 1,), float(group.rank + i), device=group.device))
        if i % 10 == 0:
            group.barrier()
        wrong += int(not bool((total == expected).all()))
        wrong += sum(int(not bool((gathered[rank] == rank + i).all())) for rank in range(group.size))
    return wrong


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES)
def test_sums_gathers_and_barriers_alternate(ranks: Ranks, strategy: Strategy, size: int) -> None:
    assert ranks.run(size, strategy, mixed_calls, 60) == [0] * size


def replayed(group: TensorParallelGroup, num_replays: int, shapes: list[tuple[int, int]]) -> int:
    """Replays a graph with sums and a gather over changing inputs; how many elements came out wrong."""
    inputs = [torch.zeros(shape, dtype=BF16, device=group.device) for shape in shapes]
    outputs = [torch.zeros_like(x) for x in inputs]
    gathered = torch.zeros(group.size, 8, device=group.device)

    def step() -> None:
        for x, out in zip(inputs, outputs, strict=True):
            out.copy_(group.all_reduce(x * 2))
        gathered.copy_(group.all_gather(inputs[0].view(-1)[:8].float()))

    for _ in range(2):
        step()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    for i in range(num_replays):
        for j, x in enumerate(inputs):
            x.fill_(i % 13 + j + group.rank)
        graph.replay()
        for j, out in enumerate(outputs):
            wrong += (out != 2 * sum(i % 13 + j + rank for rank in range(group.size))).sum()
        for rank in range(group.size):
            wrong += (gathered[rank] != i % 13 + rank).sum()
    total = int(wrong)
    del graph  # NCCL's communicator cannot be left while a graph holds it
    return total


@pytest.mark.parametrize(("strategy", "size"), CUDA_STRATEGIES)
def test_a_captured_step_sums_right_200_times(ranks: Ranks, strategy: Strategy, size: int) -> None:
    # The last one goes in several pieces.
    shapes = [(1, 4096), (64, 4096), (3, 1024), (256, 2048), (2048, 4096)]
    assert ranks.run(size, strategy, replayed, 200, shapes) == [0] * size


@pytest.mark.multi_gpu
def test_a_rank_that_was_replaced_meets_one_that_lives_on(ranks: Ranks) -> None:
    for _ in range(2):
        assert ranks.run(2, "symmetric_memory", mixed_calls, 10) == [0, 0]
        ranks.replace(1)
    assert ranks.run(2, "symmetric_memory", mixed_calls, 10) == [0, 0]


def left_behind(group: TensorParallelGroup) -> float:
    """Rank 0 replays a sum that the other never comes to; seconds until it has left that."""
    x = torch.ones(4096, device=group.device)
    group.all_reduce(x)
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.all_reduce(x)
    if group.rank > 0:
        graph.reset()
        return 0.0
    graph.replay()
    with pytest.raises(EngineError, match="is not idle"):
        await_idle(group.device)
    began = time.monotonic()
    aborting = threading.Thread(target=group.abort, args=("rank 1 is gone",), daemon=True)
    aborting.start()
    graph.reset()  # as `TPWorker.leave` does: the abort waits for it
    await_idle(group.device)
    aborting.join(20)
    assert not aborting.is_alive()
    return time.monotonic() - began


@pytest.mark.multi_gpu
@pytest.mark.parametrize("strategy", ["nccl", "symmetric_memory"])
def test_a_rank_leaves_a_graph_that_waits_for_one_that_is_gone_and_meets_another(
    ranks: Ranks, strategy: Strategy
) -> None:
    seconds, _ = ranks.run(2, strategy, left_behind)
    assert seconds < 5
    ranks.replace(1)
    assert ranks.run(2, strategy, mixed_calls, 10) == [0, 0]


class Tensors(TensorSource):
    """A TensorSource over seeded tensors."""

    def __init__(self, **shapes: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
            for name, shape in shapes.items()
        }

    def read(self, name: str, out: Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        tensor = self.tensors[name]
        tensor = tensor if rows is None else tensor[slice(*rows)]
        out.copy_(tensor if columns is None else tensor[:, slice(*columns)])


def layers(group: TensorParallelGroup, dtype: torch.dtype) -> list[str]:
    """Embedding, row-parallel layer and LM head against the whole weights; digests of what must be equal."""
    vocab_size, hidden_size, width = 1000, 512, 768
    model = dense_model(num_attention_heads=8, vocab_size=vocab_size)
    plan = ShardPlan.create(model, group.size)
    source = Tensors(embed=(vocab_size, hidden_size), down=(hidden_size, width))
    placed: dict[str, Any] = {"dtype": dtype, "device": group.device}
    whole = {name: tensor.to(dtype).float() for name, tensor in source.tensors.items()}
    embedding = VocabParallelEmbedding(hidden_size, plan, group, **placed)
    embedding.load(source, "embed")
    head = ParallelLMHead(hidden_size, plan, group, **placed)
    head.tie(embedding)
    span = Span(width * group.rank // group.size, width * (group.rank + 1) // group.size)
    linear = Linear("down", hidden_size, width, Cut(Axis.MLP_COLUMNS, 1))
    row = RowParallelLinear(
        linear, LayerContext((LayerShard({Axis.MLP_COLUMNS: span}),) * group.size, group, FAST, **placed)
    )
    row.load(source, "")
    digests = []
    for num_tokens in (1, 5, 33):
        ids = torch.arange(num_tokens) * 29 % vocab_size
        hidden = embedding(ids.to(group.device))
        x = part_of(0, (num_tokens, width), dtype)
        y = row(x[:, slice(*span)].to(group.device)).cpu()
        want = F.linear(x.float(), whole["down.weight"])
        torch.testing.assert_close(y.float(), want, atol=0.05 if dtype is BF16 else 1e-4, rtol=0.02)
        # The row-parallel sum came after: the embedding's rows must not have changed with it.
        assert torch.equal(hidden.cpu().float(), whole["embed.weight"][ids])
        logits = whole_logits(head.local_logits(hidden), plan, group)
        want = F.linear(hidden.cpu().float(), whole["embed.weight"])
        torch.testing.assert_close(logits.cpu(), want, atol=1e-4, rtol=1e-3)
        digests += [digest(hidden), digest(y), digest(logits)]
    return digests


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES)
def test_layers_equal_the_whole_model_on_every_rank(ranks: Ranks, strategy: Strategy, size: int) -> None:
    sizes = PeerSizes(rows=40, row_bytes=1024, sum_bytes=1 << 20)
    results = ranks.run(size, strategy, layers, FP32 if strategy == "shared_memory" else BF16, sizes=sizes)
    assert all(result == results[0] for result in results)


def test_exchanges_count_from_the_meeting_not_from_the_start_of_the_process() -> None:
    """As torch names its keys: by a count that differs between a process that met before and one that is new."""
    shared = HashStore()
    stores = [RecountedStore(shared, timedelta(seconds=5)) for _ in range(2)]
    for step in range(3):
        for rank, (store, count) in enumerate(zip(stores, (7, 0), strict=True)):
            # Through C++, as torch calls it.
            PrefixStore("meeting", store).set(f"CUDASymmetricMemory/{count + step}/{rank}", f"{step} {rank}")
        for store, count in zip(stores, (7, 0), strict=True):
            keys = [f"CUDASymmetricMemory/{count + step}/{rank}" for rank in range(2)]
            expected = [f"{step} {rank}".encode() for rank in range(2)]
            assert PrefixStore("meeting", store).multi_get(keys) == expected
            assert [PrefixStore("meeting", store).get(key) for key in keys] == expected
    assert [
        store.add(f"CUDASymmetricMemory/{count}/arrived", 1) for store, count in zip(stores, (9, 2), strict=True)
    ] == [
        1,
        2,
    ]


def test_ranks_are_found_by_name_until_they_leave() -> None:
    store = HashStore()
    PrefixStore("meeting", store).set("here/1", "1")
    registration = Registration(rank=0, size=2, store=store, timeout_s=1.0)
    found = _resolve_process_group(registration.name)
    assert (found.rank(), found.size()) == (0, 2)
    registration.close()
    with pytest.raises(RuntimeError):
        _resolve_process_group(registration.name)


def test_a_meeting_that_a_rank_stays_away_from_ends_at_the_deadline() -> None:
    store = RecountedStore(HashStore(), timedelta(seconds=0.2))
    store.set("CUDASymmetricMemory/4/0", "here")
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        PrefixStore("meeting", store).multi_get(["CUDASymmetricMemory/4/0", "CUDASymmetricMemory/4/1"])
