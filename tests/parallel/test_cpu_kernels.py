"""The C kernels of CPU ranks: values against fp64, bits against those of a row alone, and a chain against rationals."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F

from configs.errors import ConfigError
from parallel.numerics.kernels import cpu_products
from parallel.numerics.kernels.c_library import load
from parallel.numerics.kernels.cpu_products import Mixture, mixed_products, node_products, pack, pack_in_place, product
from parallel.plan import Span
from worker.kernels.cpu_pointwise import act_and_mul, add_rms_norm, clamped_act_and_mul, rms_norm, softcap_, softmax

FP32 = torch.float32
TYPES = [torch.float32, torch.bfloat16, torch.float16]
of_each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bits are the same: -0.0 is not 0.0, and a NaN is itself."""
    as_integers = torch.int32 if a.dtype is FP32 else torch.int16
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(as_integers), b.contiguous().view(as_integers))


def _close(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a rounding to y's type and what an fp32 chain over a thousand products of `_random` loses (2e-4 here)."""
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(y.dtype).eps, atol=5e-4)


@of_each_type
@pytest.mark.parametrize("out_dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 64), (5, 100, 600), (70, 130, 1030), (3, 1, 1)], ids=str)
def test_products_are_those_of_fp64_rounded_once(
    dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    x, weight = _random(m, k, dtype=dtype), _random(n, k, dtype=dtype, seed=1)
    exact = x.double() @ weight.double().t()
    _close(product(x, pack(weight), n, out_dtype=out_dtype), exact)
    for bias in (_random(n, seed=2), _random(n, dtype=dtype, seed=2)):
        in_fp32 = product(x, pack(weight), n, out_dtype=FP32) + bias.float()
        out = torch.empty(m, n, dtype=out_dtype)
        assert product(x, pack(weight), n, bias, out) is out
        assert _same(out, in_fp32.to(out_dtype))


@of_each_type
def test_a_rows_bits_are_the_same_among_any_other_rows(dtype: torch.dtype, threads: int) -> None:
    x, packed = _random(70, 530, dtype=dtype), pack(_random(200, 530, dtype=dtype, seed=1))
    alone = torch.cat([product(row, packed, 200) for row in x.split(1)])
    for m in range(1, 71):
        assert _same(product(x[:m], packed, 200), alone[:m])
    assert _same(product(x[13:31], packed, 200), alone[13:31])


@of_each_type
def test_a_columns_bits_are_the_same_in_any_shard(dtype: torch.dtype, threads: int) -> None:
    x, weight = _random(7, 530, dtype=dtype), _random(330, 530, dtype=dtype, seed=1)
    whole = product(x, pack(weight), 330)
    for begin, end in pairwise([0, 1, 64, 130, 131, 297, 330]):
        assert _same(product(x, pack(weight[begin:end]), end - begin), whole[:, begin:end])


def test_the_number_of_threads_changes_no_bit() -> None:
    x, packed, before = _random(100, 600), pack(_random(330, 600, seed=1)), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            nodes = torch.empty(2, 100, 330)
            node_products(x, packed, 330, 64, [(0, 4), (4, 10)], nodes)
            results.append((product(x, packed, 330), nodes))
    finally:
        torch.set_num_threads(before)
    for y, nodes in results[1:]:
        assert _same(y, results[0][0])
        assert _same(nodes, results[0][1])


def _rounded(x: Fraction) -> Fraction:
    """To fp32, halves to even."""
    if not x:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length() - 24
    if abs(x) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    unit = Fraction(2) ** max(exponent, -149)
    return round(x / unit) * unit


@of_each_type
def test_every_step_of_a_chain_is_one_fused_multiply_add(dtype: torch.dtype) -> None:
    x, weight = _random(7, 60, dtype=dtype), _random(3, 60, dtype=dtype, seed=1)
    y, num_other = product(x, pack(weight), 3, out_dtype=FP32), 0
    for m, row in enumerate(x.tolist()):
        for n, column in enumerate(weight.tolist()):
            fused = apart = Fraction(0)
            for a, b in zip(row, column, strict=True):
                exact = Fraction(a) * Fraction(b)
                fused, apart = _rounded(fused + exact), _rounded(apart + _rounded(exact))
            assert Fraction(y[m, n].item()) == fused
            num_other += apart != fused
    # Products of 16-bit numbers are fp32 numbers mostly, fused or not.
    assert num_other or dtype is not FP32


def _cover(begin: int, end: int, a: int, b: int) -> list[tuple[int, int]]:
    """The largest subtrees of the halving tree over [a, b) whose leaves are those of [begin, end)."""
    if end <= a or b <= begin:
        return []
    if begin <= a and b <= end:
        return [(a, b)]
    middle = a + -(-(b - a) // 2)
    return _cover(begin, end, a, middle) + _cover(begin, end, middle, b)


def _tree(values: dict[tuple[int, int], torch.Tensor], a: int, b: int) -> torch.Tensor:
    if (a, b) in values:
        return values[a, b]
    middle = a + -(-(b - a) // 2)
    return _tree(values, a, middle) + _tree(values, middle, b)


@of_each_type
@pytest.mark.parametrize(("num_leaves", "leaf", "k"), [(7, 64, 448), (9, 64, 530), (3, 600, 1700), (1, 64, 20)])
def test_ranks_nodes_add_up_to_the_bits_of_one_rank(dtype: torch.dtype, num_leaves: int, leaf: int, k: int) -> None:
    x, weight = _random(50, k, dtype=dtype), _random(70, k, dtype=dtype, seed=1)
    whole = torch.empty(1, 50, 70)
    node_products(x, pack(weight), 70, leaf, [(0, num_leaves)], whole)
    _close(whole[0], x.double() @ weight.double().t())
    leaves = {
        (i, i + 1): product(part, pack(columns), 70, out_dtype=FP32)
        for i, (part, columns) in enumerate(zip(x.split(leaf, 1), weight.split(leaf, 1), strict=True))
    }
    assert _same(_tree(leaves, 0, num_leaves), whole[0])
    for split in range(num_leaves + 1):
        values = {}
        for begin, end in ((0, split), (split, num_leaves)):
            nodes = _cover(begin, end, 0, num_leaves)
            columns = slice(begin * leaf, end * leaf)
            out = torch.empty(len(nodes), 50, 70)
            own = [(a - begin, b - begin) for a, b in nodes]
            node_products(x[:, columns], pack(weight[:, columns]), 70, leaf, own, out)
            values |= dict(zip(nodes, out, strict=True))
        assert _same(_tree(values, 0, num_leaves), whole[0])


def _mixed(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, factors: torch.Tensor, leaf: int, spans: list[Span]
) -> torch.Tensor:
    """[num_nodes, num_rows, num_columns] of x [num_rows, K], the same row for each of its experts [num_rows, k]."""
    order = experts.flatten().argsort(stable=True)
    rows = order // experts.shape[1]
    ends = experts.flatten().bincount(minlength=len(weights)).cumsum(0)
    mixture = Mixture(ends, rows, factors.flatten()[order])
    out = torch.full((len(spans), len(x), weights.shape[1]), torch.nan)
    mixed_products(x[rows], torch.stack([pack(weight) for weight in weights]), leaf, spans, mixture, out)
    return out


@of_each_type
@pytest.mark.parametrize("num_leaves", [1, 3, 6])
def test_mixtures_add_their_weights_in_order_leaf_by_leaf(dtype: torch.dtype, num_leaves: int, threads: int) -> None:
    leaf = 40
    num_inputs = leaf * num_leaves - 7  # the last leaf is shorter
    x, weights = _random(130, num_inputs, dtype=dtype), _random(5, 70, num_inputs, dtype=dtype, seed=1)
    experts = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(130)])
    factors = _random(130, 3, seed=2)
    [y] = _mixed(x, weights, experts, factors, leaf, [Span(0, num_leaves)])
    each = torch.stack([x.double() @ weight.double().t() for weight in weights], 1)
    chosen = each.gather(1, experts.unsqueeze(2).expand(-1, -1, 70))
    _close(y, (factors.double().unsqueeze(2) * chosen).sum(1))
    leaves = [Span(i, i + 1) for i in range(num_leaves)]
    values = {
        tuple(node): value
        for node, value in zip(leaves, _mixed(x, weights, experts, factors, leaf, leaves), strict=True)
    }
    assert _same(y, _tree(values, 0, num_leaves))
    for i in (0, 64, 129):  # alone, whatever the order of its experts
        again = experts[i : i + 1].flip(1), factors[i : i + 1].flip(1)
        assert _same(y[i : i + 1], _mixed(x[i : i + 1], weights, *again, leaf, [Span(0, num_leaves)])[0])


def test_a_mixture_leaves_out_what_is_behind_its_last_end() -> None:
    x, weights = _random(3, 64), _random(2, 70, 64, seed=1)
    mixture = Mixture(torch.tensor([0, 1]), torch.tensor([2, 0, 1]), torch.ones(3))
    out = torch.full((1, 4, 70), torch.nan)
    mixed_products(x, torch.stack([pack(weight) for weight in weights]), 64, [Span(0, 1)], mixture, out)
    assert _same(out[0, 2], product(x[:1], pack(weights[1]), 70)[0])
    assert not out[0, [0, 1, 3]].any()


def test_a_cache_of_kernels_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkstemp", full)
    source = tmp_path / "kernel.c"
    source.write_text("int one(void) { return 1; }")
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/lockstep/kernels, .*No space left on device; set XDG_CACHE_HOME"
    ):
        load(source)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load(source).one() == 1, "there is room again"
    (broken := tmp_path / "broken.c").write_text("int one(")
    with pytest.raises(ConfigError, match=rf"did not compile broken\.c into {tmp_path}/lockstep/kernels, "):
        load(broken)  # the compiler itself may find the disk full


def test_products_of_no_rows_or_no_inputs() -> None:
    weight, bias = _random(70, 12), _random(70)
    assert product(weight[:0], pack(weight), 70).shape == (0, 70)
    assert _same(product(torch.empty(3, 0), pack(weight[:, :0]), 70, bias), bias.expand(3, 70))
    assert _same(product(torch.empty(3, 0), pack(weight[:, :0]), 70), torch.zeros(3, 70))


@pytest.mark.parametrize("piece", [1, 20_000, 1 << 18])
def test_a_weight_is_packed_where_it_lies(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(cpu_products, "_PIECE", piece)
    weight = _random(320, 100)
    expected, place = pack(weight), weight.data_ptr()
    packed = pack_in_place(weight)
    assert packed.data_ptr() == place
    assert _same(packed, expected)
    assert pack_in_place(torch.empty(128, 0)).shape == (2, 0, 64)


def test_rows_may_lie_apart_and_a_weight_be_packed_in_blocks() -> None:
    wide, weight = _random(9, 300), _random(150, 100, seed=1)
    packed = pack(weight)
    assert packed.shape == (3, 100, 64)
    assert not packed[2, :, 22:].any()
    assert _same(product(wide[:, 50:150], packed, 150), product(wide[:, 50:150].clone(), packed, 150))
    blocks = torch.full_like(packed, torch.nan)
    for i, rows in enumerate(weight.split(64)):
        pack(rows, out=blocks[i : i + 1])
    assert _same(blocks, packed)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("num_rows", [1, 6])
def test_every_16_bit_weight_is_read_as_it_is(dtype: torch.dtype, num_rows: int) -> None:
    weight = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).unsqueeze(1)
    y = product(torch.ones(num_rows, 1, dtype=dtype), pack(weight), len(weight), out_dtype=FP32)
    assert torch.equal(y.nan_to_num(nan=1e39), weight.t().float().nan_to_num(nan=1e39).expand_as(y))
    x = weight.t().expand(num_rows, -1)[:, :600].contiguous()
    values = torch.cat([product(x[:, i : i + 1], pack(torch.ones(1, 1, dtype=dtype)), 1) for i in range(600)], 1)
    assert torch.equal(values.nan_to_num(), x.nan_to_num())


@of_each_type
def test_infinities_and_nans_pass_through_products_and_stay_in_their_rows(dtype: torch.dtype) -> None:
    x, weight = _random(7, 96, dtype=dtype), _random(70, 96, dtype=dtype, seed=1)
    clean, packed = product(x, pack(weight), 70), pack(weight)
    x[2, 5], x[4, 90] = torch.nan, torch.inf
    y = product(x, packed, 70)
    assert y[2].isnan().all()
    assert torch.equal(y[4], weight[:, 90].sign() * torch.inf)
    others = [0, 1, 3, 5, 6]
    assert _same(y[others], clean[others])


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()


@of_each_type
@pytest.mark.parametrize("size", [1, 15, 16, 17, 576])
def test_norms_are_those_of_fp64_rounded_once_wherever_rows_lie(dtype: torch.dtype, size: int, threads: int) -> None:
    wide = _random(70, 5, size + 3, dtype=dtype)
    heads = wide[:, 1:4, :size]
    for weight in (_random(size, dtype=dtype, seed=1), _random(size, seed=1)):
        y = rms_norm(heads, weight, 1e-5)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), _normed(heads, weight), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
        alone = [rms_norm(head.clone(), weight, 1e-5) for head in heads.reshape(-1, size)]
        assert _same(y.view(-1, size), torch.stack(alone))
        assert _same(rms_norm(heads[:, 0], weight, 1e-5), y[:, 0])


@of_each_type
def test_adding_norms_round_the_sum_before_they_norm_it(dtype: torch.dtype, threads: int) -> None:
    for x_type in (dtype, FP32):
        x, wide = _random(70, 600, dtype=x_type)[:, :577], _random(70, 600, dtype=dtype, seed=1)
        residual, weight = wide[:, :577], _random(577, dtype=dtype, seed=2)
        total = (x.float() + residual.float()).to(dtype)
        beyond = wide[:, 577:].clone()
        y = add_rms_norm(x, residual, weight, 1e-5)
        assert _same(residual, total)
        assert _same(wide[:, 577:], beyond)
        assert _same(y, rms_norm(total, weight, 1e-5))


@of_each_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 31, 1536])
def test_gated_activations_are_those_of_fp64_rounded_once(
    dtype: torch.dtype, activation: str, size: int, threads: int
) -> None:
    x = 4 * _random(40, 2 * size + 5, dtype=dtype)[:, : 2 * size]
    y = act_and_mul(x, activation)
    gate, up = x.double().chunk(2, 1)
    expected = ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(y.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=4e-6)
    for column in {0, size // 2, size - 1}:
        pair = x[:, [column, size + column]]
        assert _same(act_and_mul(pair, activation), y[:, column : column + 1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_large_and_of_odd_gates(activation: str) -> None:
    gate = torch.tensor([-0.0, 0.0, 1e30, torch.inf, torch.nan, -200.0])
    y = act_and_mul(torch.cat((gate, torch.ones(6))).unsqueeze(0), activation)[0]
    assert _same(y[:4], gate[:4])
    assert y[4].isnan()
    assert abs(y[5].item()) == 0


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 40000)], ids=str)
def test_soft_caps_are_within_a_few_ulp_of_the_cap(shape: tuple[int, ...], threads: int) -> None:
    x = 40 * _random(*shape)
    before = x.clone()
    assert softcap_(x, 30.0) is x
    torch.testing.assert_close(x.double(), 30 * torch.tanh(before.double() / 30), rtol=0, atol=4 * 30 * 2**-23)
    for i in {0, x.numel() // 2, x.numel() - 1}:
        assert _same(softcap_(before.flatten()[i : i + 1].clone(), 30.0), x.flatten()[i : i + 1])


def test_soft_caps_of_odd_values() -> None:
    x = softcap_(torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan]), 30.0)
    assert _same(x[:4], torch.tensor([-0.0, 0.0, 30.0, -30.0]))
    assert x[4].isnan()


@of_each_type
@pytest.mark.parametrize("size", [16, 45])
def test_clamped_activations_are_those_of_fp64_rounded_once(dtype: torch.dtype, size: int) -> None:
    x = _random(9, 2 * size, dtype=dtype) * 3
    gate, up = x.double().clamp(max=2.0).chunk(2, 1)
    y = clamped_act_and_mul(x, 2.0, 1.702)
    _close(y, (up.clamp(-2.0) + 1) * gate * torch.sigmoid(1.702 * gate))
    assert _same(y[:, -5:], clamped_act_and_mul(torch.cat((x[:, size - 5 : size], x[:, -5:]), 1), 2.0, 1.702))
    x[0, 3] = x[1, size + 3] = torch.nan
    assert clamped_act_and_mul(x, 2.0, 1.702).isnan().nonzero().tolist() == [[0, 3], [1, 3]]


@pytest.mark.parametrize("size", [1, 2, 16, 33, 128])
def test_a_softmax_is_that_of_fp64_wherever_its_elements_lie(size: int) -> None:
    logits = _random(7, size + 3)[:, :size] * 20
    whole = softmax(logits, logits)
    torch.testing.assert_close(whole.double(), logits.double().softmax(1), rtol=1e-5, atol=1e-30)
    order = torch.arange(size).flip(0)[: size // 2 + 1]
    assert _same(softmax(logits[:, order], logits), whole[:, order])
    assert _same(softmax(logits[3:4], logits[3:4]), whole[3:4])
