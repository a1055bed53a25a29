"""Linear layers and the vocabulary of one rank: the shards of all ranks together are the whole layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from configs.layers import Axis, Cut, GroupedQueryAttention, Linear
from configs.model_config import ModelConfig
from configs.rope import RopeConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.layers.embedding import ParallelLMHead, VocabParallelEmbedding, whole_logits
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import FAST, LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import CpuWeight, CudaWeight
from parallel.plan import LayerShard, ShardPlan, Span
from tests.helpers.dense_model import dense_model
from tests.helpers.rank_threads import on_ranks

FP32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}

ROWS, COLUMNS = Cut(Axis.MLP_COLUMNS, 0), Cut(Axis.MLP_COLUMNS, 1)


def _context(span: Span, group: TensorParallelGroup) -> LayerContext:
    return LayerContext((LayerShard({Axis.MLP_COLUMNS: span}),) * group.size, group, FAST, **FP32)


class Tensors(TensorSource):
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


def _vocabulary(vocab_size: int) -> ModelConfig:
    return dense_model(hidden_size=16, num_attention_heads=8, vocab_size=vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_products_equal_f_linear_in_every_type(dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((num_tokens, 72), (40, 72), (40,))
    )
    out = CpuWeight(weight, bias)(x)
    assert out.is_contiguous()
    assert out.dtype is dtype
    torch.testing.assert_close(out, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [None, torch.arange(40) / 10])
def test_a_product_goes_where_it_is_asked_to(dtype: torch.dtype, bias: torch.Tensor | None) -> None:
    x, weight = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in ((5, 72), (40, 72))
    )
    bias = None if bias is None else bias.to(dtype)
    out = torch.full((5, 40), float("nan"), dtype=dtype)
    matmul = CpuWeight(weight, bias)
    assert matmul(x, out) is out
    torch.testing.assert_close(out, F.linear(x, weight, bias))
    logits = torch.full((5, 40), float("nan"))
    assert matmul.in_fp32(x, logits) is logits
    assert torch.equal(matmul.in_fp32(x), logits)
    whole = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(logits, whole, msg="logits are never rounded to the weight's type")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_logits_on_cuda_are_not_rounded_to_the_type_of_the_weight(num_rows: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(num_rows, 4096, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(1024, 4096, generator=generator, device="cuda").bfloat16()
    logits = CudaWeight(weight, None).in_fp32(x)
    assert logits.dtype is torch.float32
    out = torch.full_like(logits, float("nan"))
    assert CudaWeight(weight, None).in_fp32(x, out) is out
    assert torch.equal(out, logits)
    exact = x.double() @ weight.double().t()
    assert (logits - exact).abs().max() < 0.01  # of values near 64, where bf16 steps are 0.5


def test_an_empty_span_contributes_nothing() -> None:
    source = Tensors(down__weight=(16, 32), gate__weight=(32, 16))
    context = _context(Span(32, 32), TensorParallelGroup.single())
    gate, down = Linear("gate", 32, 16, ROWS), Linear("down", 16, 32, COLUMNS)
    column = ColumnParallelLinear(gate, context=context)
    column.load(source, "")
    row = RowParallelLinear(down, context)
    row.load(source, "")
    assert torch.equal(row(column(torch.randn(3, 16))), torch.zeros(3, 16))


def test_merged_columns_and_qkv_stand_side_by_side() -> None:
    attention = GroupedQueryAttention(
        hidden_size=16,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        rope=RopeConfig(theta=1e4),
        qkv_bias=True,
    )
    merged = [Linear(name, 48, 16, ROWS, bias=True) for name in "ab"]
    x = torch.randn(5, 16)

    def check(linears: list[Linear], shard: LayerShard) -> None:
        shapes = {tensor.name.replace(".", "__"): tensor.shape for linear in linears for tensor in linear.tensors}
        source = Tensors(**{f"layer__{name}": shape for name, shape in shapes.items()})
        layer = ColumnParallelLinear(
            *linears, context=LayerContext((shard,), TensorParallelGroup.single(), FAST, **FP32)
        )
        layer.load(source, "layer.")
        parts = []
        for linear in linears:
            weight, bias = (
                source.tensors[f"layer.{tensor.name}"][slice(*shard.span_of(linear.cut))] for tensor in linear.tensors
            )
            parts.append(F.linear(x, weight, bias))
        torch.testing.assert_close(layer(x), torch.cat(parts, 1))

    check(merged, LayerShard({Axis.MLP_COLUMNS: Span(3, 9)}))
    heads = LayerShard({Axis.QUERY_HEADS: Span(2, 6), Axis.KV_HEADS: Span(1, 3)})
    check(list(attention.qkv), heads)
    assert [heads.span_of(linear.cut) for linear in attention.qkv[:2]] == [Span(16, 48), Span(8, 24)]


def test_row_parallel_sums_over_ranks_and_adds_its_bias_once() -> None:
    source, linear = Tensors(o__weight=(24, 30), o__bias=(24,)), Linear("o", 24, 30, COLUMNS, bias=True)
    x = torch.randn(4, 30)
    spans = (Span(0, 7), Span(7, 20), Span(20, 30))

    def body(group: TensorParallelGroup) -> torch.Tensor:
        layer = RowParallelLinear(linear, _context(spans[group.rank], group))
        layer.load(source, "")
        return layer(x[:, slice(*spans[group.rank])].contiguous())

    expected = F.linear(x, source.tensors["o.weight"], source.tensors["o.bias"])
    for result in on_ranks(3, body):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("wrong", [-1, 100])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_id_outside_the_vocabulary_is_an_index_error(tp_size: int, wrong: int) -> None:
    source = Tensors(e__weight=(100, 16))
    plan = ShardPlan.create(_vocabulary(100), tp_size)
    group = TensorParallelGroup(rank=0, size=tp_size, device=torch.device("cpu"), collectives=None)
    embedding = VocabParallelEmbedding(16, plan, group, **FP32)
    embedding.load(source, "e")
    with pytest.raises(IndexError):
        embedding(torch.tensor([5, wrong]))


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
        return torch.cat([whole_logits(each.local_logits(x), plan, group) for each in (head, tied)])

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
