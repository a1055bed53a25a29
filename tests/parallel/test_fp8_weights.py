"""Weights that stay in FP8: products and loads have the bits of the same weights read in the activations' type.

In Triton's interpreter, whose dot is made an ascending chain, and in bf16 on a GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("triton", reason="a CPU install has no Triton")

from configs.layers import Axis, DenseMLP
from configs.model_config import ModelConfig
from configs.quantization import FP8_BLOCKS, WeightScales
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, LayerContext
from parallel.numerics.fp8 import FP8, Fp8Matrix, Fp8Rows, multiply
from parallel.numerics.kernels.chain_gemm import use_chain_cublas
from parallel.numerics.kernels.fp8_tile import plain
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import ChainWeight, Fp8Weight, NodeWeight
from parallel.plan import LayerShard, Span, blocks_of
from tests.helpers.chain_dot import use_chain_dot
from tests.helpers.dense_model import dense_model
from tests.helpers.families import Case
from tests.helpers.family_checks import Rank
from tests.helpers.rank_threads import on_ranks
from worker.kernels.moe import mixture
from worker.layers.mlp import MLP
from worker.layers.norm import RMSNorm
from worker.weights.checkpoint import Checkpoint
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.host_memory import tensors
from worker.weights.quantised_weights import QuantisedCheckpoint

ROWS = WeightScales(1, 0, "_scale")
MATRIX = WeightScales(0, 0, "_scale")
SMALL = WeightScales(16, 12)  # no step's multiple
CPU = torch.device("cpu")
KINDS = [FP8_BLOCKS, ROWS, MATRIX, SMALL]


@pytest.fixture
def device(device: torch.device, chains: None) -> torch.device:
    if device.type == "cuda":
        use_chain_cublas()
    return device


class Matrices(TensorSource):
    """Two random matrices `a` and `b` in FP8."""

    def __init__(self, height: int, width: int, kind: WeightScales) -> None:
        random = torch.Generator().manual_seed(height + width)
        self.block = kind.block((height, width))
        self.values, self.scales = {}, {}
        for name in "ab":
            self.values[name] = (torch.randn(height, width, generator=random) * 8).to(FP8)
            shape = (-(-height // self.block[0]), -(-width // self.block[1]))
            self.scales[name] = torch.rand(shape, generator=random) + 0.1

    def read_fp8(self, name: str, out: Tensor, scales: Tensor, *, rows: Span, columns: Span) -> None:
        out.copy_(self.values[name][slice(*rows), slice(*columns)])
        down, across = blocks_of(rows, self.block[0]), blocks_of(columns, self.block[1])
        scales.copy_(self.scales[name][slice(*down), slice(*across)])

    def part(self, rows: Sequence[Span], columns: Span, device: torch.device) -> Fp8Matrix:
        """Rows of `a`, and of `b` below them."""
        made = Fp8Matrix.empty([self.block] * len(rows), rows, columns, device)
        made.read(self, "ab"[: len(rows)], rows, columns)
        return made

    def plain_part(self, rows: Sequence[Span], columns: Span, device: torch.device) -> Tensor:
        """The same in the activations' type, as a checkpoint is read."""
        made = []
        for name, span in zip("ab", rows, strict=False):
            part = self.values[name][slice(*span), slice(*columns)].to(_dtype(device))
            scales = self.scales[name][
                slice(*blocks_of(span, self.block[0])), slice(*blocks_of(columns, self.block[1]))
            ]
            multiply(part, scales, self.block, span, columns)
            made.append(part)
        return torch.cat(made).to(device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter has no bf16


def _x(num_rows: int, width: int, device: torch.device) -> Tensor:
    random = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, width, generator=random).to(device, _dtype(device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((Span(0, 256),), Span(0, 384)),
        ((Span(40, 150), Span(120, 133)), Span(64, 256)),  # they cut blocks
        ((Span(3, 50),), Span(37, 301)),
    ],
)
def test_products_have_the_bits_of_the_weight_as_it_is_read(
    device: torch.device, kind: WeightScales, rows: tuple[Span, ...], columns: Span
) -> None:
    source = Matrices(256, 384, kind)
    weight, expected = source.part(rows, columns, device), source.plain_part(rows, columns, device)
    assert torch.equal(plain(weight, expected.dtype), expected)
    bias = _x(1, len(weight), device)[0]
    for num_rows in (1, 17) if device.type == "cpu" else (1, 16, 17, 64, 128, 129, 500):
        x = _x(num_rows, columns.size, device)
        found, meant = ChainWeight(weight, bias), ChainWeight(expected, bias)
        assert torch.equal(found(x), meant(x)), num_rows
        assert torch.equal(found.in_fp32(x), meant.in_fp32(x)), num_rows


def _rounded(x: Tensor, kind: WeightScales, first: int) -> Tensor:
    """What x [num_rows, columns from `first` on] is in FP8, in fp64, by groups of at most 128 columns of a block."""
    width = kind.width if kind.width in range(1, 128) else 128
    start = first if kind.width in (0, 1) else first // width * width
    x, made = x.double().cpu(), []
    for part in x.split([it.size for it in _cut(Span(first, first + x.shape[1]), start, width)], dim=1):
        scale = part.abs().amax(1, keepdim=True).clamp(min=1e-10).float() * (1 / 448)
        made.append((part.float() * (1 / scale)).to(FP8).double() * scale.double())
    return torch.cat(made, 1)


def _cut(span: Span, start: int, width: int) -> list[Span]:
    """The parts of a span in runs of so many from `start` on."""
    edges = sorted({*span, *(it for it in range(start, span.stop, width) if it > span.start)})
    return [Span(*it) for it in itertools.pairwise(edges)]


def _error(found: Tensor, expected: Tensor) -> float:
    """The size of the difference over that of what is expected."""
    return ((found.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((Span(0, 256),), Span(0, 384)),
        ((Span(40, 150), Span(120, 133)), Span(64, 256)),
        ((Span(0, 192), Span(64, 256)), Span(192, 384)),  # of experts of 768 columns in the middle of four ranks
        ((Span(3, 50),), Span(37, 301)),
    ],
)
def test_fast_products_are_those_with_activations_in_fp8(
    device: torch.device, kind: WeightScales, rows: tuple[Span, ...], columns: Span
) -> None:
    source = Matrices(256, 384, kind)
    weight, dense = source.part(rows, columns, device), source.plain_part(rows, columns, CPU).double()
    bias = _x(1, len(weight), device)[0]
    few = (1, 3, 17) if kind is FP8_BLOCKS else (17,)
    for num_rows in few if device.type == "cpu" else (1, 2, 3, 4, 5, 16, 17, 64, 65, 128, 129, 256, 500, 515):
        x = _x(num_rows, columns.size, device)
        x[1:2] = 0.0
        expected = _rounded(x, kind, columns.start) @ dense.T
        found = Fp8Weight(weight, None)
        bound = 1e-6 if device.type == "cpu" else 1e-3  # tensor cores add FP8 in fewer bits than fp32 has
        assert _error(found.in_fp32(x), expected) < bound, num_rows
        assert _error(found(x), expected) < max(bound, 4e-3 * (device.type != "cpu")), num_rows
        out = torch.empty(num_rows, len(weight), device=device, dtype=x.dtype)
        assert _error(Fp8Weight(weight, bias)(x, out), expected + bias.double().cpu()) < max(bound, 4e-3), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "first"), [(6144, 4096, 0), (4096, 12288, 0), (2048, 192, 64), (24576, 4096, 0)])
def test_fast_products_of_models_are_those_with_activations_in_fp8(n: int, k: int, first: int) -> None:
    source, columns = Matrices(n, first + k, FP8_BLOCKS), Span(first, first + k)
    weight = source.part((Span(0, n),), columns, torch.device("cuda"))
    dense = source.plain_part((Span(0, n),), columns, CPU).cuda().double()
    x = _x(1030, k, torch.device("cuda")) * torch.linspace(0.1, 10, k, device="cuda").bfloat16()
    expected = (_rounded(x, FP8_BLOCKS, first).cuda() @ dense.T).cpu()
    product = Fp8Weight(weight, None)
    for num_rows in (1, 2, 4, 5, 16, 17, 33, 64, 65, 100, 128, 200, 256, 300, 511, 512, 513, 514, 1024, 1030):
        for y in (product(x[:num_rows]), product(x[:num_rows], torch.empty(num_rows, n, device="cuda", dtype=x.dtype))):
            assert y.shape == (num_rows, n)
            assert _error(y, expected[:num_rows]) < 4e-3, num_rows
        assert _error(product.in_fp32(x[:num_rows]), expected[:num_rows]) < 1e-3, num_rows
        assert torch.equal(product(x[:num_rows]), product(x[:num_rows])), num_rows  # parts are added in order
    x[7, 5] = torch.nan
    for num_rows in (8, 64, 512):
        is_finite = product(x[:num_rows]).isfinite()
        assert not is_finite[7].any()
        assert is_finite[[i for i in range(num_rows) if i != 7]].all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 64, 65, 300])
def test_rows_that_norm_and_activation_quantise_have_the_same_answers(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, device = dense_model(hidden_size=512, intermediate_size=1280), torch.device("cuda")
    shard, group = LayerShard({Axis.MLP_COLUMNS: Span(0, 1280)}), TensorParallelGroup.single(device)
    spec = model.layers[0].feed_forward
    assert isinstance(spec, DenseMLP)
    mlp = MLP(spec, LayerContext((shard,), group, FAST, torch.bfloat16, device))
    source = QuantisedCheckpoint(DummyCheckpoint(model), model)
    source.keeps_fp8 = True
    mlp.load(source, model.layer_prefix(0))
    norm = RMSNorm(512, 1e-6, dtype=torch.bfloat16, device=device)
    norm.weight.fill_(0.7)
    x, residual = _x(2 * num_rows, 512, device).chunk(2)

    def answer() -> tuple[Tensor, Tensor]:
        total = residual.clone()
        normed = norm.add_for(x, total, mlp.row_groups())
        assert isinstance(normed, Fp8Rows) == (mlp.row_groups() is not None)
        return mlp.partial(normed), total

    assert mlp.row_groups() is not None
    found = answer()
    monkeypatch.setattr(Fp8Weight, "row_groups", lambda _: None)
    for ours, meant in zip(found, answer(), strict=True):
        assert torch.equal(ours, meant)


@pytest.mark.parametrize("leaf", [32, 48, 128])
def test_nodes_have_the_bits_of_the_weight_as_it_is_read(device: torch.device, leaf: int) -> None:
    rows, columns = (Span(0, 40),), Span(96, 480)
    source = Matrices(40, 512, FP8_BLOCKS)
    weight, expected = source.part(rows, columns, device), source.plain_part(rows, columns, device)
    nodes = (Span(0, 1), Span(1, columns.size // leaf))
    for num_rows in (1, 17) if device.type == "cpu" else (1, 16, 17, 64, 128, 129, 500):
        x = _x(num_rows, columns.size, device)
        assert torch.equal(NodeWeight(weight, leaf, nodes)(x), NodeWeight(expected, leaf, nodes)(x)), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1536, 4096), (4096, 3072)])
def test_a_row_of_a_models_product_has_the_bits_that_it_has_among_any_others(n: int, k: int) -> None:
    use_chain_cublas()
    cuda = torch.device("cuda")
    source = Matrices(n, k, FP8_BLOCKS)
    weight, expected = (of((Span(0, n),), Span(0, k), cuda) for of in (source.part, source.plain_part))
    x = _x(700, k, cuda)
    whole = ChainWeight(expected, None)(x)
    leaf = k // 8
    nodes = NodeWeight(expected, leaf, [Span(0, 8)])(x)
    for num_rows in (1, 5, 16, 17, 33, 64, 100, 128, 129, 256, 700):
        assert torch.equal(ChainWeight(weight, None)(x[:num_rows]), whole[:num_rows]), num_rows
        assert torch.equal(NodeWeight(weight, leaf, [Span(0, 8)])(x[:num_rows]), nodes[:, :num_rows]), num_rows


def _experts(
    kind: WeightScales, size: int, columns: Span, device: torch.device, has_gate: bool, num_experts: int = 4
) -> tuple[tuple[Fp8Matrix, Fp8Matrix], tuple[Tensor, Tensor]]:
    """A rank's columns of experts' first and second weights, and the same in the activations' type."""
    names = "ab" if has_gate else "a"
    into, out_of = Matrices(400, size, kind), Matrices(size, 400, kind)
    rows, whole = [columns] * len(names), Span(0, size)
    w13 = Fp8Matrix.empty([into.block] * len(names), rows, whole, device, num_experts)
    w2 = Fp8Matrix.empty([out_of.block], [whole], columns, device, num_experts)
    plain13, plain2 = [], []
    for i in range(num_experts):
        for source in (into, out_of):
            for name, values in source.values.items():
                source.values[name] = values.roll(i + 1, 0)
                source.scales[name] = source.scales[name] * 1.3
        w13.read(into, names, rows, whole, i)
        w2.read(out_of, "a", [whole], columns, i)
        plain13.append(into.plain_part(rows, whole, device))
        plain2.append(out_of.plain_part([whole], columns, device))
    return (w13, w2), (torch.stack(plain13), torch.stack(plain2))


def _mixed(x: Tensor, router: Tensor, weights: tuple[Tensor | Fp8Matrix, ...], **options: Any) -> Tensor:
    nodes, options = options.get("nodes", ()), {"top_k": 2, "normalise": True, "round_to": torch.float32} | options
    out = torch.full((len(nodes), *x.shape) if nodes else x.shape, torch.nan, device=x.device)
    out = out if nodes else out.to(x.dtype)
    mixture(x, router, *weights, out=out, **options)  # type: ignore[arg-type]
    return out


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("num_tokens", [1, 20])  # each pair by itself, and pairs by expert
@pytest.mark.parametrize(
    ("kind", "leaf", "has_gate"), [(FP8_BLOCKS, 32, True), (SMALL, 24, True), (FP8_BLOCKS, 32, False)]
)
def test_exact_experts_have_the_bits_of_the_weights_as_they_are_read(
    device: torch.device, kind: WeightScales, leaf: int, has_gate: bool, num_tokens: int
) -> None:
    size, columns = 80, Span(96, 288)
    weights, dense = _experts(kind, size, columns, device, has_gate)
    x, router = _x(num_tokens, size, device) / 32, _x(4, size, device)
    nodes = Span(0, 2), Span(2, columns.size // leaf)
    found = _mixed(x, router, weights, leaf=leaf, nodes=nodes)
    assert found.isfinite().all()
    assert torch.equal(found, _mixed(x, router, dense, leaf=leaf, nodes=nodes))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
# Each pair by itself, and blocks of 16, 32, 64 and 128 pairs.
@pytest.mark.parametrize("num_tokens", [1, 14, 20, 100, pytest.param(300, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "has_gate"), [*((kind, True) for kind in KINDS), (KINDS[0], False)])
def test_fast_experts_are_those_with_activations_in_fp8(
    device: torch.device, kind: WeightScales, has_gate: bool, num_tokens: int
) -> None:
    size, columns = 256 if kind is FP8_BLOCKS else 80, Span(96, 288)
    weights = _experts(kind, size, columns, device, has_gate)[0]
    dense13, dense2 = _experts(kind, size, columns, CPU, has_gate)[1]
    x, router = _x(num_tokens, size, device) / 32, _x(4, size, device)
    slots = torch.ones(num_tokens, dtype=torch.int64, device=device)
    slots[1:2] = 0
    chosen = (x.double() @ router.double().T).softmax(1).cpu().topk(2, dim=1)
    shares = chosen.values / chosen.values.sum(1, keepdim=True)
    both = torch.einsum("tk,enk->ten", _rounded(x, kind, 0), dense13.double())
    gate, up = both.chunk(2, 2)
    hidden = torch.nn.functional.silu(gate) * up if has_gate else both.relu().square()
    hidden = hidden.to(x.dtype).flatten(0, 1)
    hidden = _rounded(hidden, kind, columns.start).unflatten(0, (num_tokens, 4))
    of_experts = torch.einsum("tek,enk->ten", hidden, dense2.double())
    expected = (of_experts.gather(1, chosen.indices.unsqueeze(2).expand(-1, -1, size)) * shares.unsqueeze(2)).sum(1)
    expected[1:2] = 0.0
    found = _mixed(x, router, weights, slots=slots, first_slot=1)
    # Numbers of the rounded activations are rounded again, some to others.
    assert _error(found, expected) < (1e-3 if device.type == "cpu" else 1e-2)


# ---- sources


def _model(**changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20}
    return dense_model(**sizes, intermediate_size=448, num_hidden_layers=2, tie_word_embeddings=False, **changes)


def _read(source: TensorSource, name: str, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
    block = source.scale_block(name)
    assert block is not None
    out = torch.empty(rows.size, columns.size, dtype=FP8)
    scales = torch.empty(blocks_of(rows, block[0]).size, blocks_of(columns, block[1]).size)
    source.read_fp8(name, out, scales, rows=rows, columns=columns)
    return out, scales


@pytest.mark.parametrize("kind", [None, ROWS, MATRIX, SMALL])
def test_quantised_weights_are_those_of_the_whole_matrix_wherever_they_are_cut(kind: WeightScales | None) -> None:
    model = _model(weight_scales=kind, dtype="bfloat16")
    source, name, shape = (
        QuantisedCheckpoint(DummyCheckpoint(model), model),
        "model.layers.0.mlp.down_proj.weight",
        (96, 448),
    )
    assert source.scale_block(name) == (kind or FP8_BLOCKS).block(shape)
    whole, scales = _read(source, name, Span(0, 96), Span(0, 448))
    rows, columns = Span(10, 90), Span(130, 390)
    part, of_part = _read(source, name, rows, columns)
    assert torch.equal(part.float(), whole[slice(*rows), slice(*columns)].float())
    height, width = source.scale_block(name)  # type: ignore[misc]
    assert torch.equal(of_part, scales[slice(*blocks_of(rows, height)), slice(*blocks_of(columns, width))])

    plain_values, quantised = torch.empty(96, 448, dtype=torch.bfloat16), torch.empty(80, 260)
    DummyCheckpoint(model).read(name, plain_values)
    source.read(name, quantised, rows=rows, columns=columns)
    meant = part.float()
    multiply(meant, of_part, (height, width), rows, columns)
    assert torch.equal(quantised, meant)
    # Of three bits after the first, or of the smallest number, the half.
    smallest = torch.full((80, 260), 2.0**-10)
    multiply(smallest, of_part, (height, width), rows, columns)
    meant = plain_values[slice(*rows), slice(*columns)].float()
    assert ((quantised - meant).abs() <= (meant.abs() / 16).maximum(smallest) * 1.01).all()
    assert whole.float().abs().max() == 448.0


def test_quantising_leaves_zeros_and_what_is_no_product_alone() -> None:
    model = _model()
    stored = {name: torch.zeros(it.shape) for name, it in model.stored_tensors().items()}
    stored["lm_head.weight"] = torch.randn(320, 96)
    source = QuantisedCheckpoint(Checkpoint.of_tensors(stored, model), model)
    whole, scales = _read(source, "model.layers.1.self_attn.o_proj.weight", Span(0, 96), Span(0, 120))
    assert not whole.float().any()
    assert scales.isfinite().all()
    out = torch.empty(320, 96)
    source.read("lm_head.weight", out)
    assert torch.equal(out, stored["lm_head.weight"])
    assert source.scale_block("lm_head.weight") is None
    assert source.bytes_loaded == whole.nbytes + scales.nbytes + out.nbytes


# ---- decoders


@pytest.fixture
def keeps_fp8(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on CPU keep FP8, and multiply with it by the interpreted kernels, one at a time of all threads."""
    from triton.runtime.interpreter import GridExecutor

    launch, one_at_a_time = GridExecutor.__call__, threading.Lock()

    def locked(kernel: GridExecutor, *args: object, **kwargs: object) -> None:
        with one_at_a_time:
            launch(kernel, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
    monkeypatch.setattr(LayerContext, "keeps_fp8", True)
    use_chain_dot(monkeypatch)


LEFT = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"
"""Matrices that a checkpoint in FP8 leaves plain."""


def _write_fp8(path: Path, model: ModelConfig, kind: WeightScales) -> None:
    made, source = {}, QuantisedCheckpoint(DummyCheckpoint(model), replace(model, weight_scales=kind))
    for name, it in model.stored_tensors().items():
        if it.may_be_fp8 and name not in LEFT:
            made[name], made[name + kind.suffix] = _read(source, name, Span(0, it.shape[0]), Span(0, it.shape[1]))
        else:
            made[name] = torch.empty(it.shape)
            source.read(name, made[name])
    save_file(made, path / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "exact", "tp_size"),
    [(SMALL, True, 2), (FP8_BLOCKS, True, 3), (FP8_BLOCKS, False, 1), (ROWS, False, 2), (MATRIX, False, 3)],
)
def test_decoders_with_weights_that_stay_in_fp8_have_the_logits_of_those_that_read_them(
    tmp_path: Path, kind: WeightScales, exact: bool, tp_size: int, keeps_fp8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_fp8(tmp_path, _model(), kind)
    case, ids, held = Case(None, tmp_path, _model(weight_scales=kind)), [3, 1, 4, 1, 5, 9, 2, 6], []

    def of_rank(group: TensorParallelGroup) -> list[Tensor]:
        rank = Rank.create(case, group, exact=exact)
        held.append(sum(it.dtype is FP8 for it in tensors(rank.decoder)))
        logits = rank.logits([(1, 0, ids)])[0]
        if exact:
            assert torch.equal(rank.logits([(2, 0, ids[:5])])[0], logits[:5])
        return [logits]

    results = on_ranks(tp_size, of_rank)
    assert held == [2 * 4 - 2] * tp_size, "each layer has four products, and two of the last one's are plain"
    monkeypatch.setattr(LayerContext, "keeps_fp8", False)
    [[expected]] = on_ranks(1, of_rank)
    for [logits] in results:
        assert torch.equal(logits, results[0][0])
        assert _error(logits, expected.double()) < (1e-4 if exact else 0.15), "fast ones round activations to FP8"
