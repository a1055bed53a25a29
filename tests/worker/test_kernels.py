"""The Triton kernels of the decoder layers against torch in fp32: in the interpreter on CPU tensors, or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="a CPU install has no Triton")

from parallel.numerics.kernels.fp8_groups import Groups, quantised
from worker.kernels.activation import act_and_mul, act_and_mul_in_fp8
from worker.kernels.norm import add_rms_norm, add_rms_norm_in_fp8, rms_norm
from worker.kernels.rope import latent_norm_rope_store, qk_norm_rope_store

EPS = 1e-5
NUM_SLOTS = 13
MAX_POSITIONS = 50

# exp(large) is infinite, as it should be; NumPy, which the interpreter computes with, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels compiled for a GPU take no CPU tensors"
)
# bf16, which NumPy and so the interpreter lacks, runs on the GPU only.
WHERE = [
    pytest.param("cpu", torch.float32, id="cpu-fp32", marks=_interpreted),
    pytest.param("cpu", torch.float16, id="cpu-fp16", marks=_interpreted),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
]
on_each = pytest.mark.parametrize(("device", "dtype"), WHERE)


def _random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Standard normal, the same values on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 RMSNorm over the last dimension."""
    x = x.float()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()


def _assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """`ours` is `expected` (fp32) rounded to its dtype, up to torch's tolerance for that dtype."""
    torch.testing.assert_close(ours, expected.to(ours.dtype))


@on_each
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 576), (5, 960), (2, 3584)])
def test_rms_norm_is_torchs_in_fp32(num_rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    x = 3 * _random(num_rows, size, device=device, dtype=dtype)
    weight = _random(size, device=device, dtype=dtype, seed=1)
    _assert_close(rms_norm(x, weight, EPS), _norm(x, weight))


@on_each
def test_a_norms_weight_may_be_of_fp32(device: str, dtype: torch.dtype) -> None:
    x, residual = (_random(3, 576, device=device, dtype=dtype, seed=seed) for seed in (0, 2))
    # Rounded to a half type, most of these would be others.
    weight = 1 + _random(576, device=device, dtype=torch.float32, seed=1) / 1000
    _assert_close(rms_norm(x, weight, EPS), _norm(x, weight))
    _assert_close(add_rms_norm(x, residual, weight, EPS), _norm(residual, weight))
    heads = Heads(4, 1, 64, [5, 1], norm=True, device=device, dtype=dtype)
    heads.q_weight, heads.k_weight = weight[:64], weight[64:128]
    q, k, _ = heads.expected()
    heads.run(qkv := heads.qkv.clone())
    _assert_close(qkv[:, : q.shape[1]], q)
    _assert_close(heads.k_slots[[5, 1]], k)


@on_each
def test_rms_norm_takes_rows_of_a_wider_matrix(device: str, dtype: torch.dtype) -> None:
    wide = _random(3, 1024, device=device, dtype=dtype)
    weight = _random(576, device=device, dtype=dtype, seed=1)
    normed = rms_norm(wide[:, 128:704], weight, EPS)
    assert normed.is_contiguous()
    assert torch.equal(normed, rms_norm(wide[:, 128:704].contiguous(), weight, EPS))


@on_each
def test_norms_of_no_rows_are_no_rows(device: str, dtype: torch.dtype) -> None:
    x, weight = torch.empty(0, 64, device=device, dtype=dtype), _random(64, device=device, dtype=dtype)
    assert rms_norm(x, weight, EPS).shape == (0, 64)
    assert add_rms_norm(x, x.clone(), weight, EPS).shape == (0, 64)


@on_each
@pytest.mark.parametrize(("num_rows", "size"), [(1, 576), (5, 960)])
def test_add_rms_norm_norms_the_rounded_sum(num_rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    x = _random(num_rows, size, device=device, dtype=dtype)
    wide = _random(num_rows, size + 64, device=device, dtype=dtype, seed=2)
    weight = _random(size, device=device, dtype=dtype, seed=1)
    residual, beside = wide[:, :size], wide[:, size:].clone()
    total = residual + x
    normed = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(wide[:, size:], beside)
    assert torch.equal(normed, rms_norm(total, weight, EPS))


@on_each
def test_a_rows_norm_does_not_depend_on_the_rows_beside_it(device: str, dtype: torch.dtype) -> None:
    x, residual = (_random(7, 576, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = _random(576, device=device, dtype=dtype, seed=2)
    together, summed = rms_norm(x, weight, EPS), add_rms_norm(x, residual.clone(), weight, EPS)
    for row in range(7):
        alone = slice(row, row + 1)
        assert torch.equal(rms_norm(x[alone], weight, EPS), together[alone])
        assert torch.equal(add_rms_norm(x[alone], residual[alone].clone(), weight, EPS), summed[alone])


GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@on_each
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 192), (3, 1536)])
def test_gated_activations_are_torchs_in_fp32(
    name: str, num_tokens: int, size: int, device: str, dtype: torch.dtype
) -> None:
    x = 4 * _random(num_tokens, 2 * size, device=device, dtype=dtype)
    gate, up = x.float().chunk(2, dim=1)
    _assert_close(act_and_mul(x, name), GATED[name](gate) * up)


@on_each
@pytest.mark.parametrize("name", GATED)
def test_gated_activations_vanish_and_pass_at_the_ends(name: str, device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[-60000.0, -200.0, 0.0, 200.0, 1.0, 1.0, 1.0, 0.5]], device=device, dtype=dtype)
    out = act_and_mul(x, name)
    assert out.tolist() == [[0.0, 0.0, 0.0, 100.0]]


@on_each
def test_gated_activations_take_rows_of_a_wider_matrix(device: str, dtype: torch.dtype) -> None:
    wide = _random(3, 512, device=device, dtype=dtype)
    part = wide[:, 64:448]
    assert torch.equal(act_and_mul(part, "silu"), act_and_mul(part.contiguous(), "silu"))
    for row in range(3):
        assert torch.equal(act_and_mul(part[row : row + 1], "silu"), act_and_mul(part, "silu")[row : row + 1])


@on_each
@pytest.mark.parametrize("size", [384, 1536])
def test_rows_in_fp8_are_those_that_a_kernel_of_their_own_makes(size: int, device: str, dtype: torch.dtype) -> None:
    groups, weight = Groups(0, 128, 0, 1), _random(size, device=device, dtype=dtype)
    gate_up, x, residual = (_random(5, it, device=device, dtype=dtype) for it in (2 * size, size, size))
    found = [
        (act_and_mul_in_fp8(gate_up, "silu", groups), act_and_mul(gate_up, "silu")),
        (
            add_rms_norm_in_fp8(x, residual.clone(), weight, EPS, groups),
            add_rms_norm(x, residual.clone(), weight, EPS),
        ),
    ]
    for ours, plain in found:
        meant = quantised(plain, groups)
        assert len(ours) == len(meant) == 5
        assert torch.equal(ours.values[:5].view(torch.uint8), meant.values[:5].view(torch.uint8))
        assert torch.equal(ours.scales[:, :5], meant.scales[:, :5])
        assert not ours.finished.any()
        assert ours.dtype is dtype


class Heads:
    """Inputs of `qk_norm_rope_store`, and what it should do with them."""

    def __init__(
        self, num_q_heads: int, num_kv_heads: int, head_dim: int, slots: list[int], *, norm: bool, device: str,
        dtype: torch.dtype, rotary_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.norm = num_q_heads, num_kv_heads, head_dim, norm
        num_tokens, kv_size = len(slots), num_kv_heads * head_dim
        self.qkv = _random(num_tokens, num_q_heads * head_dim + 2 * kv_size, device=device, dtype=dtype)
        self.q_weight = _random(head_dim, device=device, dtype=dtype, seed=1)
        self.k_weight = _random(head_dim, device=device, dtype=dtype, seed=2)
        num_pairs = (head_dim if rotary_dim is None else rotary_dim) // 2
        angles = torch.outer(torch.arange(MAX_POSITIONS), 1e4 ** -(torch.arange(num_pairs) / num_pairs))
        # A factor, as YaRN has, so that a table of unit vectors is not assumed.
        self.cos_sin = (1.2 * torch.cat((angles.cos(), angles.sin()), dim=1)).to(device)
        self.positions = torch.arange(num_tokens, device=device) * 7 % MAX_POSITIONS
        self.k_slots = torch.full((NUM_SLOTS, kv_size), 7.0, device=device, dtype=dtype)
        self.v_slots = torch.full((NUM_SLOTS, kv_size), 8.0, device=device, dtype=dtype)
        self.out_cache_loc = torch.tensor(slots, device=device)

    def run(self, qkv: torch.Tensor, tokens: slice = slice(None), **scales: float) -> None:
        """The kernel over `tokens`, whose rows are `qkv`."""
        qk_norm_rope_store(
            qkv,
            q_weight=self.q_weight if self.norm else None,
            k_weight=self.k_weight if self.norm else None,
            eps=EPS,
            cos_sin=self.cos_sin,
            positions=self.positions[tokens],
            k_slots=self.k_slots,
            v_slots=self.v_slots,
            out_cache_loc=self.out_cache_loc[tokens],
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            **scales,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [num_tokens, heads * head_dim] fp32 after norm and rotation."""
        sizes = [heads * self.head_dim for heads in (self.num_q_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = self.qkv.float().split(sizes, dim=1)
        return self._turned(q, self.q_weight), self._turned(k, self.k_weight), v

    def _turned(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (-1, self.head_dim))
        if self.norm:
            x = _norm(x, weight)
        cos, sin = self.cos_sin[self.positions].unsqueeze(1).chunk(2, dim=-1)
        num_pairs = cos.shape[-1]
        first, second, rest = x.split((num_pairs, num_pairs, self.head_dim - 2 * num_pairs), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).flatten(1)


@on_each
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [
        (9, 9, 64, 64),
        (9, 3, 64, 64),
        (4, 1, 96, 96),
        (12, 3, 128, 128),
        (2, 1, 256, 256),
        (9, 3, 64, 16),
        (4, 1, 96, 72),
        (2, 1, 256, 64),
        (4, 1, 96, 0),
    ],
)
def test_query_heads_turn_in_place_and_keys_and_values_go_to_their_slots(
    num_q_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, norm: bool, device: str, dtype: torch.dtype
) -> None:
    slots = [5, 12, 1]
    placed: dict[str, Any] = {"norm": norm, "device": device, "dtype": dtype, "rotary_dim": rotary_dim}
    heads = Heads(num_q_heads, num_kv_heads, head_dim, slots, **placed)
    q, k, v = heads.expected()
    qkv = heads.qkv.clone()
    heads.run(qkv)
    _assert_close(qkv[:, : q.shape[1]], q)
    assert torch.equal(qkv[:, q.shape[1] :], heads.qkv[:, q.shape[1] :])
    _assert_close(heads.k_slots[slots], k)
    assert torch.equal(heads.v_slots[slots], v.to(dtype))
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert (heads.k_slots[others] == 7).all()
    assert (heads.v_slots[others] == 8).all()


@on_each
@pytest.mark.parametrize(("num_q_heads", "latent_dim", "nope_dim", "rope_dim"), [(9, 32, 12, 8), (2, 512, 128, 64)])
def test_latents_are_normed_and_stored_with_their_keys_and_the_ends_of_query_heads_turn(
    num_q_heads: int, latent_dim: int, nope_dim: int, rope_dim: int, device: str, dtype: torch.dtype
) -> None:
    slots, q_size = [3, -1, 12, NUM_SLOTS, 1], num_q_heads * (nope_dim + rope_dim)
    heads = Heads(1, 1, rope_dim, slots, norm=False, device=device, dtype=dtype)  # for its angles
    wide = _random(5, q_size + latent_dim + rope_dim, device=device, dtype=dtype, seed=3)
    weight = _random(latent_dim, device=device, dtype=dtype, seed=4)
    latent, k_rope = wide[:, q_size:].split((latent_dim, rope_dim), dim=1)
    expected = torch.cat((_norm(latent, weight), heads._turned(k_rope.float(), weight)), dim=1)
    before = wide[:, :q_size].float().unflatten(1, (num_q_heads, -1))
    turned = heads._turned(before[..., nope_dim:].flatten(1), weight)
    around = torch.full((NUM_SLOTS + 2, latent_dim + rope_dim), 7.0, device=device, dtype=dtype)
    latent_norm_rope_store(
        wide[:, :q_size].view(5, num_q_heads, -1),
        wide[:, q_size:],
        weight=weight,
        eps=EPS,
        cos_sin=heads.cos_sin,
        positions=heads.positions,
        slots=around[1:-1],
        out_cache_loc=heads.out_cache_loc,
    )
    after = wide[:, :q_size].unflatten(1, (num_q_heads, -1))
    assert torch.equal(after[..., :nope_dim], before[..., :nope_dim].to(dtype))
    _assert_close(after[..., nope_dim:].flatten(1), turned)
    _assert_close(around[[4, 13, 2]], expected[[0, 2, 4]])
    assert (around[[0, 1, 3, *range(5, 13), 14]] == 7).all()


@on_each
def test_padding_tokens_share_slot_0_and_slots_outside_the_pool_are_not_written(
    device: str, dtype: torch.dtype
) -> None:
    slots = [0, 3, 0, -1, 4, NUM_SLOTS, 0]
    heads = Heads(3, 1, 64, slots, norm=False, device=device, dtype=dtype)
    # Memory around the pool that a write outside of it would change.
    around = [torch.full((NUM_SLOTS + 2, 64), fill, device=device, dtype=dtype) for fill in (7.0, 8.0)]
    heads.k_slots, heads.v_slots = around[0][1:-1], around[1][1:-1]
    _, k, v = heads.expected()
    qkv = heads.qkv.clone()
    heads.run(qkv)
    _assert_close(heads.k_slots[[3, 4]], k[[1, 4]])
    assert torch.equal(heads.v_slots[[3, 4]], v[[1, 4]].to(dtype))
    untouched = [0, 2, 3, *range(6, NUM_SLOTS + 2)]  # one higher than their slots; slot 0 is anybody's
    assert (around[0][untouched] == 7).all()
    assert (around[1][untouched] == 8).all()


@on_each
def test_a_tokens_heads_do_not_depend_on_the_tokens_beside_it(device: str, dtype: torch.dtype) -> None:
    heads = Heads(9, 3, 128, [2, 4, 6, 8, 1], norm=True, device=device, dtype=dtype)
    together = heads.qkv.clone()
    heads.run(together)
    k_slots, v_slots = heads.k_slots.clone(), heads.v_slots.clone()
    heads.k_slots.fill_(7)
    heads.v_slots.fill_(8)
    for token in range(5):
        alone = slice(token, token + 1)
        qkv = heads.qkv[alone].clone()
        heads.run(qkv, alone)
        assert torch.equal(qkv, together[alone])
    assert torch.equal(heads.k_slots, k_slots)
    assert torch.equal(heads.v_slots, v_slots)


@on_each
def test_a_heads_bits_do_not_depend_on_how_many_heads_the_rank_has(device: str, dtype: torch.dtype) -> None:
    whole = Heads(12, 3, 128, [5], norm=True, device=device, dtype=dtype)
    qkv = whole.qkv.clone()
    whole.run(qkv)
    # The rank of key head 1: query heads 4 to 8.
    shard = Heads(4, 1, 128, [5], norm=True, device=device, dtype=dtype)
    columns = [whole.qkv.unflatten(1, (-1, 128))[:, span] for span in (slice(4, 8), slice(13, 14), slice(16, 17))]
    shard_qkv = torch.cat(columns, dim=1).flatten(1)
    shard.run(shard_qkv)
    assert torch.equal(shard_qkv[:, :512], qkv[:, 512:1024])
    assert torch.equal(shard.k_slots[5], whole.k_slots[5, 128:256])
    assert torch.equal(shard.v_slots[5], whole.v_slots[5, 128:256])


@pytest.mark.gpu
def test_a_cuda_graph_replays_every_kernel_over_new_inputs() -> None:
    device, dtype = "cuda", torch.bfloat16
    heads = Heads(9, 3, 64, [2, 4, 6, 0, 0], norm=True, device=device, dtype=dtype)
    x, residual = (_random(5, 960, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    weight = _random(960, device=device, dtype=dtype, seed=5)

    def step() -> tuple[torch.Tensor, ...]:
        """Works on what `x`, `residual` and `heads` hold; returns what it made."""
        normed = add_rms_norm(x, residual, weight, EPS)
        activated = act_and_mul(rms_norm(normed, weight, EPS), "silu")
        heads.run(heads.qkv)
        # Slot 0 has several writers: its content is anybody's.
        return activated, residual.clone(), heads.qkv.clone(), heads.k_slots[1:].clone(), heads.v_slots[1:].clone()

    def fill(seed: int) -> None:
        for buffer in (x, residual, heads.qkv, heads.k_slots, heads.v_slots):
            buffer.copy_(_random(*buffer.shape, device=device, dtype=dtype, seed=seed))
            seed += 1
        heads.positions.copy_((torch.arange(5) * seed) % MAX_POSITIONS)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for seed in (10, 20):
        fill(seed)
        eager = step()
        fill(seed)
        graph.replay()
        for ours, expected in zip(replayed, eager, strict=True):
            assert torch.equal(ours, expected)
