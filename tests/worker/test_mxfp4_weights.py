"""Experts that stay in four bits: their products are those of the same weights read in the activations' type.

In Triton's interpreter, and in bf16 on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU install has no Triton")

import triton
import triton.language as tl

from configs.biased_mixture import BiasedMixture
from configs.errors import CheckpointError
from configs.layers import Axis
from configs.model_config import ModelConfig
from configs.quantization import FP8_BLOCKS
from configs.read_config import read_model_config
from configs.schema import EngineConfig
from configs.weight_dtypes import WeightDtypes, weight_dtypes
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, ExactArithmetic, LayerContext
from parallel.numerics.kernels.mxfp4_groups import block_tiles
from parallel.numerics.mxfp4 import Mxfp4Matrix
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import LayerShard, ShardPlan, Span
from parallel.step_cost import StepCost
from worker.layers.experts import CudaExperts
from worker.layers.step import Padding
from worker.weights.checkpoint import Checkpoint
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.host_memory import tensors
from worker.weights.quantised_weights import QuantisedCheckpoint

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks/models"
SIZES = {
    "hidden_size": 160,  # a group and a block of the next
    "intermediate_size": 352,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "vocab_size": 100,
}
CPU = torch.device("cpu")
DOWN = "model.layers.0.mlp.experts.down_proj"


def four_bit_model(path: Path, **changes: Any) -> ModelConfig:
    config = json.loads((SHAPES / "gpt-oss-20b/config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | SIZES | changes))
    return read_model_config(path)


def _spec(model: ModelConfig) -> BiasedMixture:
    spec = model.layers[0].feed_forward
    assert isinstance(spec, BiasedMixture)
    return spec


def _experts(model: ModelConfig, columns: Span, source: TensorSource, device: torch.device) -> CudaExperts:
    shard = LayerShard({Axis.EXPERT_COLUMNS: columns})
    context = LayerContext((shard,), TensorParallelGroup.single(device), FAST, _dtype(device), device)
    layer = CudaExperts(_spec(model), context)
    layer.load(source, model.layer_prefix(0))
    return layer


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter has no bf16


def _dtypes(layer: CudaExperts) -> set[torch.dtype]:
    return {it.dtype for it in tensors(layer)}


def _blocks(source: TensorSource, name: str, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
    codes = torch.empty(columns.size, rows.size // 2, dtype=torch.uint8)
    exponents = torch.empty(columns.size, rows.size // 32, dtype=torch.uint8)
    assert source.read_mxfp4(name, codes, exponents, rows=rows, columns=columns)
    return codes, exponents


class _Codes(TensorSource):
    """A matrix of 256 inputs and 129 outputs: all codes, each output with an exponent of its own from 0 on, in blocks
    that differ."""

    def __init__(self) -> None:
        outputs, places = torch.arange(129).unsqueeze(1), torch.arange(128)
        self.codes = (outputs * 7 + places * 13 + places // 16 * 5 & 255).to(torch.uint8)
        self.exponents = ((outputs + torch.arange(8) * 16) % 129).to(torch.uint8)

    def read_mxfp4(self, name: str, codes: Tensor, exponents: Tensor, *, rows: Span, columns: Span) -> bool:
        codes.copy_(self.codes)
        exponents.copy_(self.exponents)
        return True

    def values(self) -> Tensor:
        """[129, 256] fp64."""
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
        halves = torch.stack((self.codes & 15, self.codes >> 4), -1).view(129, 8, 32).long()
        signed = magnitudes[halves & 7] * (1 - 2 * (halves >> 3))
        return torch.ldexp(signed, self.exponents.unsqueeze(2).double() - 127).flatten(1)


@triton.jit
def _decode_kernel(out_ptr, codes_ptr, exponents_ptr, num_rows, IS_COMPILED: tl.constexpr):
    rows, places = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 32)[None, :]
    rows, group = tl.minimum(rows, num_rows - 1), tl.program_id(1)
    words = tl.load(codes_ptr + rows[:, None] * 64 + group * 32 + places)
    exponents = tl.load(exponents_ptr + group * num_rows + rows)[:, None]
    w0, w1, w2, w3 = block_tiles(words, exponents, out_ptr.dtype.element_ty, IS_COMPILED)
    out = out_ptr + rows[:, None] * 256 + group * 128 + places
    tl.store(out, w0)
    tl.store(out + 32, w1)
    tl.store(out + 64, w2)
    tl.store(out + 96, w3)


def test_every_code_and_exponent_is_the_number_that_it_stands_for(device: torch.device) -> None:
    source, matrix = _Codes(), Mxfp4Matrix.empty(1, 129, 256, device)
    matrix.read(source, "", 0, Span(0, 256), Span(0, 129))
    out = torch.empty(129, 256, device=device, dtype=_dtype(device))
    _decode_kernel[(9, 2)](out, matrix.codes, matrix.exponents, 129, IS_COMPILED=device.type == "cuda")
    assert torch.equal(out.cpu().double(), source.values())


def _both(
    model: ModelConfig, columns: Span, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> tuple[CudaExperts, CudaExperts]:
    """Experts that are kept in four bits, and that are read."""
    source, both = DummyCheckpoint(model), []
    for keeps in (True, False):
        monkeypatch.setattr(LayerContext, "keeps_mxfp4", keeps)
        both.append(_experts(model, columns, source, device))
    assert torch.int16 in _dtypes(both[0]) - _dtypes(both[1])
    return both[0], both[1]


def _difference(layers: tuple[CudaExperts, CudaExperts], num_tokens: int, size: int, device: torch.device) -> float:
    """The size of the difference over that of the second one's answers. The second of several tokens is padding."""
    x = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(num_tokens))
    x, slots = x.to(device, _dtype(device)), torch.full((num_tokens,), 16, device=device)
    x[1:2], slots[1:2] = torch.nan, 0
    found, expected = (it.partial(x, Padding(slots, 16)).double() for it in layers)
    assert not found[1:2].any()
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("num_tokens", "columns"),
    [  # each pair by itself, and blocks of 16, 32, 64 and 128 pairs
        (1, Span(32, 128)),
        (3, Span(160, 352)),
        (14, Span(320, 352)),
        (20, Span(0, 128)),
        (100, Span(160, 352)),
        pytest.param(300, Span(0, 352), marks=pytest.mark.gpu),
    ],
)
def test_experts_in_four_bits_are_those_of_the_weights_read(
    tmp_path: Path, device: torch.device, columns: Span, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = _both(four_bit_model(tmp_path), columns, device, monkeypatch)
    assert _difference(layers, num_tokens, 160, device) < (1e-6 if device.type == "cpu" else 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [Span(0, 2880), Span(960, 1920), Span(736, 1472)], ids=["tp1", "tp3", "tp4"])
def test_on_a_gpu_experts_of_gpt_oss_in_four_bits_are_those_of_the_weights_read(
    tmp_path: Path, columns: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, shape = torch.device("cuda"), {"hidden_size": 2880, "intermediate_size": 2880}
    model = four_bit_model(tmp_path, **shape, num_local_experts=32, num_experts_per_tok=4)
    layers = _both(model, columns, cuda, monkeypatch)
    for num_tokens in (1, 2, 8, 9, 64, 100, 300, 2000):
        assert _difference(layers, num_tokens, 2880, cuda) < 4e-3, num_tokens


def test_refuses_weights_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(DummyCheckpoint):
        def read_mxfp4(self, name: str, codes: Tensor, exponents: Tensor, **spans: Span) -> bool:
            exponents.fill_(128)
            exponents[-1, -1] = 129 if name == DOWN else 0
            return True

    monkeypatch.setattr(LayerContext, "keeps_mxfp4", True)
    model = four_bit_model(tmp_path)
    with pytest.raises(CheckpointError, match=f"tensor {DOWN} in MXFP4 has blocks of a power above 2"):
        _experts(model, Span(0, 352), Large(model), CPU)


def test_exact_numerics_and_cpus_read_them(tmp_path: Path) -> None:
    model = four_bit_model(tmp_path)
    shard, group = LayerShard({Axis.EXPERT_COLUMNS: Span(0, 352)}), TensorParallelGroup.single()
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert LayerContext((shard,), group, FAST, bf16, cuda).keeps_mxfp4
    assert not LayerContext((shard,), group, FAST, torch.float16, cuda).keeps_mxfp4
    assert not LayerContext((shard,), group, ExactArithmetic(CPU), bf16, cuda).keeps_mxfp4
    assert not LayerContext((shard,), group, FAST, bf16, CPU).keeps_mxfp4
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", numerics="fast")
    assert weight_dtypes(config, model) == WeightDtypes(mxfp4=True)
    assert weight_dtypes(config.model_copy(update={"quantization": "fp8"}), model) == WeightDtypes(fp8=True, mxfp4=True)
    for other in ({"device": "cpu"}, {"dtype": "float16"}, {"numerics": "exact"}):
        assert weight_dtypes(config.model_copy(update=other), model) == WeightDtypes()


def test_weights_in_fp8_stay_so_on_gpus_where_that_is_faster(tmp_path: Path) -> None:
    model = dataclasses.replace(four_bit_model(tmp_path, quantization_config=None), weight_scales=FP8_BLOCKS)
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", numerics="fast")
    assert weight_dtypes(config, model) == WeightDtypes(fp8=True)
    for other in ({"device": "cpu"}, {"dtype": "float32"}, {"numerics": "exact"}):
        assert weight_dtypes(config.model_copy(update=other), model) == WeightDtypes()
    assert weight_dtypes(config.model_copy(update={"numerics": "exact", "quantization": "fp8"}), model) == WeightDtypes(
        fp8=True
    )


def test_four_bits_count_with_their_scales() -> None:
    model, config = (
        read_model_config(SHAPES / "gpt-oss-20b"),
        EngineConfig(model="m", device="cuda", dtype="bfloat16", numerics="fast"),
    )
    experts = 24 * 32 * 3 * 2880 * 2880
    for size in (1, 4):
        plan = ShardPlan.create(model, size)
        needed = sum(plan.weight_bytes(rank, config) for rank in range(size))
        plain = 2 * sum(map(plan.weight_elements, range(size)))
        assert plain - needed == experts * (16 - 4 - 8 / 32) / 8
    starts, lens = torch.zeros(1, dtype=torch.int32).numpy(), torch.ones(1, dtype=torch.int32).numpy()
    read = [
        StepCost.of(plan, 2, dtypes=dtypes).step(starts, lens, 1)[1]
        for dtypes in (WeightDtypes(), WeightDtypes(mxfp4=True))
    ]
    assert read[0] - read[1] == pytest.approx(experts / 8 * (16 - 4 - 8 / 32) / 8)


def test_random_weights_in_four_bits_are_near_those_of_the_shape_and_the_same_however_they_are_read(
    tmp_path: Path,
) -> None:
    model = four_bit_model(tmp_path)
    source, plain = DummyCheckpoint(model), DummyCheckpoint(four_bit_model(tmp_path, quantization_config=None))
    values, near = torch.empty(4, 352, 160), torch.empty(4, 352, 160)
    source.read(DOWN, values)
    plain.read(DOWN, near)
    assert not torch.equal(values, near)
    assert (values - near).norm() < 0.15 * near.norm()
    part = torch.empty(40, 50)
    source.read(DOWN, part, rows=Span(330, 370), columns=Span(7, 57))
    assert torch.equal(part, values.flatten(0, 1)[330:370, 7:57])
    names = [f"{model.layer_prefix(0)}{it.name}" for it in _spec(model).tensors if it.may_be_mxfp4]
    stored = {name: torch.empty(it.shape) for name, it in model.stored_tensors().items() if name not in names}
    for name, tensor in stored.items():
        source.read(name, tensor)
    for name in names:
        matrices, inputs, outputs = model.stored_tensors()[name].shape
        blocks = [_blocks(source, name, Span(i * inputs, (i + 1) * inputs), Span(0, outputs)) for i in range(matrices)]
        codes, stored[f"{name}_scales"] = (torch.stack(it) for it in zip(*blocks, strict=True))
        stored[f"{name}_blocks"] = codes.view(matrices, outputs, inputs // 32, 16)
    written, rows, columns = Checkpoint.of_tensors(stored, model), Span(352 + 32, 352 + 128), Span(3, 9)
    assert [name for name in model.stored_tensors() if written.is_mxfp4(name)] == names
    assert [name for name in model.stored_tensors() if source.is_mxfp4(name)] == names
    written.read(DOWN, near)
    assert torch.equal(near, values)
    expected = _blocks(source, DOWN, rows, columns)
    for other in (written, QuantisedCheckpoint(written, model)):
        before = other.bytes_loaded
        assert all(map(torch.equal, _blocks(other, DOWN, rows, columns), expected))
        assert other.bytes_loaded - before == 96 * 6 * 17 // 32
