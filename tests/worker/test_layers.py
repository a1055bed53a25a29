"""The decoder's small layers, on CPU and on a GPU, against formulas written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer
from attention.rotation import LatentNorm
from configs.errors import ConfigError
from configs.rope import RopeConfig
from parallel.collectives.interface import FusedSum
from parallel.plan import Span
from worker.layers.activation import ActAndMul
from worker.layers.norm import RMSNorm
from worker.layers.rotary import KernelRotation, RotaryEmbedding, TorchRotation, inverse_frequencies

EPS = 1e-5
on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class _Ramp:
    """A checkpoint whose every tensor is 0.5 to 1.5."""

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        assert name == "model.norm.weight"
        out.copy_(torch.linspace(0.5, 1.5, out.numel()))


def _norm(size: int, device: str) -> RMSNorm:
    norm = RMSNorm(size, EPS, dtype=torch.float32, device=torch.device(device))
    norm.load(_Ramp(), "model.norm.weight")
    return norm


def _random(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@on_each
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_norm_divides_by_the_root_mean_square(device: str, num_tokens: int) -> None:
    norm, x = _norm(96, device), _random(num_tokens, 96, device=device)
    expected = x / torch.sqrt(x.square().mean(1, keepdim=True) + EPS) * torch.linspace(0.5, 1.5, 96, device=device)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm.weight.cpu(), torch.linspace(0.5, 1.5, 96))


@on_each
def test_adding_norm_adds_to_the_residual_in_place(device: str) -> None:
    norm, x, residual = _norm(96, device), _random(3, 96, device=device), _random(3, 96, device=device, seed=1)
    x_before, total = x.clone(), residual + x
    normed = norm.add(x, residual)
    assert torch.equal(residual, total)
    assert torch.equal(x, x_before)
    torch.testing.assert_close(normed, norm(total))


@on_each
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_offset_of_a_norms_weight_is_added_in_fp32(dtype: torch.dtype, num_tokens: int, device: str) -> None:
    norm = RMSNorm(96, EPS, dtype=dtype, device=torch.device(device), offset=1.0)
    norm.load(_Ramp(), "model.norm.weight")
    x, residual = (_random(num_tokens, 96, device=device, seed=seed).to(dtype) for seed in (0, 1))
    for normed, of in ((norm(x), x), (norm.add(x, residual), residual)):
        factor = torch.rsqrt(of.float().square().mean(1, keepdim=True) + EPS)
        expected = of.float() * factor * torch.linspace(1.5, 2.5, 96, device=device)
        assert normed.dtype is dtype
        torch.testing.assert_close(normed, expected.to(dtype))
    # No multiple of 1/64, so no number of bf16.
    assert norm.weight[1].item() == pytest.approx(1.5 + 1 / 95, rel=1e-6)


def test_the_norm_of_a_sum_that_is_still_to_be_done_is_that_of_the_sum() -> None:
    norm, x = _norm(96, "cpu"), _random(3, 96, device="cpu")

    def finish(residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += 2 * x  # two ranks with the same part
        return F.rms_norm(residual, (96,), weight, eps)

    torch.testing.assert_close(norm(FusedSum(x, finish)), norm(2 * x))


@on_each
@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_the_activation_of_the_gate_scales_the_up_projection(hidden_act: str, device: str) -> None:
    x = _random(3, 256, device=device)
    gate, up = x[:, :128], x[:, 128:]
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda g: F.gelu(g, approximate="tanh")}[hidden_act]
    torch.testing.assert_close(ActAndMul(hidden_act)(x.clone()), act(gate) * up)


def test_refuses_an_activation_it_does_not_know() -> None:
    with pytest.raises(
        ConfigError, match="hidden_act=swish7 is not supported; supported are gelu, gelu_pytorch_tanh, silu"
    ):
        ActAndMul("swish7")


@on_each
def test_the_rotary_tables_turn_pairs_of_halves_by_position_times_frequency(device: str) -> None:
    scaling = (("factor", 4.0), ("original_max_position_embeddings", 32))
    rope = RopeConfig(theta=1e4, scaling_type="yarn", scaling=scaling)
    positions = torch.tensor([0, 1, 31, 127])
    qkv = _random(4, 3 * 64, device="cpu")
    inv_freq, factor = inverse_frequencies(rope, 64)
    assert factor > 1
    turns = factor * torch.exp(1j * torch.outer(positions.float(), inv_freq)).unsqueeze(1)
    expected = torch.complex(*qkv[:, :128].view(4, 2, 64).chunk(2, dim=-1)) * turns
    heads = torch.cat((expected.real, expected.imag), dim=-1)
    q, k = heads.unbind(1)
    layer = AttentionLayer(layer_id=0, tp_q_head_num=1, tp_k_head_num=1, head_dim=64, scale=1.0)
    rotation = RotaryEmbedding(rope, 64, 128, dtype=torch.float32, device=torch.device(device)).at(positions.to(device))
    pool = TokenToKVPool([layer], num_pages=2, page_size=2, dtype=torch.float32, device=torch.device(device))
    k_slots, v_slots = (slots.fill_(7.0) for slots in pool.slots(0))
    slots = torch.tensor([4, 1, 5, 2], device=device)
    turned = rotation.norm_rotate_store(qkv.to(device), layer, None, pool, slots)
    torch.testing.assert_close(turned.cpu(), q)
    torch.testing.assert_close(k_slots[slots].cpu(), k)
    assert torch.equal(v_slots[slots].cpu(), qkv[:, 128:])
    assert (k_slots[[0, 3]] == 7).all()
    assert (v_slots[[0, 3]] == 7).all()


def test_where_no_position_turns_a_head_queries_alone_have_a_temperature(interpreter: None) -> None:
    rope, positions = RopeConfig(theta=1e4, partial=0.0, temperature=(0.5, 4)), torch.tensor([2, 3, 11, 30])
    layer = AttentionLayer(layer_id=0, tp_q_head_num=3, tp_k_head_num=1, head_dim=16, scale=1.0)
    slots, qkv = torch.tensor([4, 1, 5, 2]), _random(4, 5 * 16, device="cpu")
    factors = 1 + 0.5 * torch.log1p(torch.tensor([0.0, 1.0, 3.0, 7.0]))[:, None]
    by_torch = RotaryEmbedding(rope, 0, 31, dtype=torch.float32, device=torch.device("cpu")).at(positions)
    for rotation in (by_torch, KernelRotation(torch.empty(31, 0), positions, factors)):
        pool = TokenToKVPool([layer], num_pages=2, page_size=2, dtype=torch.float32, device=torch.device("cpu"))
        q = rotation.norm_rotate_store(qkv.clone(), layer, None, pool, slots)
        torch.testing.assert_close(q, qkv[:, :48] * factors)
        assert torch.equal(torch.cat([it[slots] for it in pool.slots(0)], dim=1), qkv[:, 48:])


def test_the_kernels_tables_turn_latent_layers_as_those_of_torch_do(interpreter: None) -> None:
    cos, sin = _random(4, 4, device="cpu"), _random(4, 4, device="cpu")
    positions, slots = torch.tensor([3, 0, 2]), torch.tensor([4, 1, 2])
    layer = LatentLayer(
        layer_id=0, tp_q_head_num=2, tp_k_head_num=1, head_dim=40, scale=1.0, latent_dim=32, nope_dim=12, v_dim=4
    )
    by_torch = TorchRotation(*(torch.cat(it, dim=1)[positions].unsqueeze(1) for it in ((cos, cos), (-sin, sin))))
    results = []
    for rotation in (by_torch, KernelRotation(torch.cat((cos, sin), dim=1), positions)):
        pool = TokenToKVPool([layer], num_pages=2, page_size=2, dtype=torch.float32, device=torch.device("cpu"))
        q, norm = _random(3, 2, 20, device="cpu"), LatentNorm(torch.linspace(0.5, 1.5, 32), 1e-6)
        rotation.norm_rotate_store_latent(q, _random(3, 40, device="cpu"), layer, norm, pool, slots)
        results += [q, pool.slots(0)[0][slots]]
    torch.testing.assert_close(results[2:], results[:2])
