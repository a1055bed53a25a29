"""Linear layers and the vocabulary of one rank: the shards of all ranks together are the whole layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import HashStore

from configs.model_config import ModelConfig, RopeConfig
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import TensorParallelGroup
from parallel.linear import (
    ColumnParallelLinear,
    Matmul,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel.plan import ShardPlan, Span

FP32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


class Tensors:
    """A TensorSource over tensors in memory."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name.replace("__", "."): torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        tensor = self.tensors[name]
        tensor = tensor if rows is None else tensor[slice(*rows)]
        out.copy_(tensor if columns is None else tensor[:, slice(*columns)])


def on_ranks(size: int, body: Callable[[TensorParallelGroup], torch.Tensor]) -> list[torch.Tensor]:
    """Runs `body` on every rank, each a thread; results in rank order."""
    store = HashStore()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            group = TensorParallelGroup.create(
                rank=rank, size=size, store=store, device="cpu", strategy="shared_memory", timeout_s=20.0
            )
            results[rank] = body(group)
            group.close()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _vocabulary(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=256,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_products_equal_f_linear_in_every_type(dtype: torch.dtype, pack: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((num_tokens, 72), (40, 72), (40,))
    )
    out = Matmul(weight, bias, pack=pack)(x)
    assert out.is_contiguous()
    assert out.dtype is dtype
    torch.testing.assert_close(out, F.linear(x, weight, bias))


def test_an_empty_span_contributes_nothing() -> None:
    source = Tensors(down__weight=(16, 32), gate__weight=(32, 16))
    column = ColumnParallelLinear(16, Span(32, 32), bias=False, **FP32)
    column.load(source, "gate")
    row = RowParallelLinear(Span(32, 32), 16, bias=False, group=TensorParallelGroup.single(), **FP32)
    row.load(source, "down")
    assert torch.equal(row(column(torch.randn(3, 16))), torch.zeros(3, 16))


def test_merged_columns_and_qkv_stand_side_by_side() -> None:
    source = Tensors(**{f"{n}__weight": (48, 16) for n in "abqkv"}, **{f"{n}__bias": (48,) for n in "abqkv"})
    t = source.tensors
    x = torch.randn(5, 16)

    def part(name: str, span: Span) -> torch.Tensor:
        return F.linear(x, t[f"{name}.weight"][slice(*span)], t[f"{name}.bias"][slice(*span)])

    merged = MergedColumnParallelLinear(16, (Span(3, 9), Span(40, 48)), bias=True, **FP32)
    merged.load(source, ("a", "b"))
    torch.testing.assert_close(merged(x), torch.cat((part("a", Span(3, 9)), part("b", Span(40, 48))), 1))
    qkv = QKVParallelLinear(16, 8, Span(2, 6), Span(1, 2), bias=True, **FP32)
    qkv.load(source, "q", "k", "v")
    expected = torch.cat((part("q", Span(16, 48)), part("k", Span(8, 16)), part("v", Span(8, 16))), 1)
    torch.testing.assert_close(qkv(x), expected)


def test_row_parallel_sums_over_ranks_and_adds_its_bias_once() -> None:
    source = Tensors(o__weight=(24, 30), o__bias=(24,))
    x = torch.randn(4, 30)
    spans = (Span(0, 7), Span(7, 20), Span(20, 30))

    def body(group: TensorParallelGroup) -> torch.Tensor:
        layer = RowParallelLinear(spans[group.rank], 24, bias=True, group=group, **FP32)
        layer.load(source, "o")
        return layer(x[:, slice(*spans[group.rank])].contiguous())

    expected = F.linear(x, source.tensors["o.weight"], source.tensors["o.bias"])
    for result in on_ranks(3, body):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("tp_size", "vocab_size"), [(1, 100), (2, 100), (3, 500), (4, 130), (8, 64)])
def test_embedding_and_logits_equal_the_whole_vocabulary_on_every_rank(tp_size: int, vocab_size: int) -> None:
    model = _vocabulary(vocab_size)
    source = Tensors(e__weight=(vocab_size, 16), h__weight=(vocab_size, 16))
    ids = torch.arange(vocab_size)
    x = torch.randn(3, 16)
    plan = ShardPlan.create(model, tp_size)

    def body(group: TensorParallelGroup) -> torch.Tensor:
        embedding = VocabParallelEmbedding(16, plan, group, **FP32)
        embedding.load(source, "e")
        head, tied = (ParallelLMHead(16, plan, group, **FP32) for _ in range(2))
        head.load(source, "h")
        tied.tie(embedding)
        assert torch.equal(embedding(ids), source.tensors["e.weight"])
        return torch.cat((head(x), tied(x)))

    expected = torch.cat((F.linear(x, source.tensors["h.weight"]), F.linear(x, source.tensors["e.weight"])))
    results = on_ranks(tp_size, body)
    for result in results:
        torch.testing.assert_close(result, expected)
        assert torch.equal(result, results[0])


def test_a_nan_in_the_embedding_reaches_its_own_token_only() -> None:
    source = Tensors(e__weight=(256, 16))
    for row in (0, 64, 128, 192):
        source.tensors["e.weight"][row] = float("nan")
    plan = ShardPlan.create(_vocabulary(256), 2)

    def body(group: TensorParallelGroup) -> torch.Tensor:
        embedding = VocabParallelEmbedding(16, plan, group, **FP32)
        embedding.load(source, "e")
        return embedding(torch.tensor([1, 200, 64]))

    for result in on_ranks(2, body):
        assert result.isnan().any(1).tolist() == [False, False, True]
