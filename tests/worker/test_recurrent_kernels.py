"""The kernels of recurrent layers for GPUs, interpreted or on a GPU: they compute what the C kernels do, and a token's
bits do not depend on how its row is cut into steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.state_pool import RowStates, StateLayer, StatePool
from worker.kernels import activation, conv, cpu_conv, cpu_delta, cpu_mamba, cpu_pointwise, delta, kimi_delta, mamba
from worker.kernels.cpu_delta import DeltaArgs
from worker.kernels.cpu_mamba import MambaArgs

WIDTH, NUM_TOKENS = 4, 140
CUTS = {
    "whole": [0, NUM_TOKENS],
    "parts": [0, 50, 64, 128, 131, 133, NUM_TOKENS],
    "tokens": [0, 64, *range(124, 132), NUM_TOKENS],
    # The last entries are stored in the places of the first, which the same step reads.
    "overlap": [0, 10, NUM_TOKENS],
    "drafts": [0, 62, 65, 66, 67, 126, 129, 130, NUM_TOKENS],
}
# The interpreter has no bf16, which GPUs take here. In fp16 too, stored values are rounded.
on_cuts = pytest.mark.parametrize(
    ("name", "drafts", "accepted", "dtype"),
    [
        ("parts", 2, 0, torch.float16),
        ("tokens", 0, 0, torch.float32),
        ("overlap", 0, 0, torch.float16),
        ("drafts", 0, 2, torch.float32),
    ],
)
DELTA_NETS = {"gated": (2, 4, 16, 32, 1, False), "kimi": (2, 2, 32, 32, 32, True)}
"""Key heads, value heads, their sizes, decays of a head, and whether the gate is a sigmoid."""
MAMBA = 4, 2, 48, 128
"""Heads, groups, elements of a head, which are not a multiple of a program's, and of a state."""
Outputs = tuple[torch.Tensor, ...]


@pytest.fixture
def where(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the device, of the activations' dtype."""
    return torch.empty(0, dtype=torch.bfloat16 if device.type == "cuda" else dtype, device=device)


def pool_of(where: torch.Tensor, *sizes: tuple[int, int, bool]) -> StatePool:
    """A pool of one layer with tensors of (recent entries, elements, whether they are fp32). Others are as `where`."""
    tensors = tuple((num, size, torch.float32 if is_fp32 else where.dtype) for num, size, is_fp32 in sizes)
    return StatePool([StateLayer(0, tensors)], 3, 0, where.device)


def steps(
    pool: StatePool, x: torch.Tensor, cuts: list[int], drafts: int, accepted: int
) -> Iterator[tuple[torch.Tensor, RowStates]]:
    """The inputs of a row in these steps, with another row's token before them, and the steps' states.

    Args:
        drafts: number of wrong tokens after those of each step, which are rejected.
        accepted: number of the last tokens of each longer step that are drafts, and right.
    """
    for start, stop in itertools.pairwise(cuts):
        inputs = torch.cat((x[:1], x[start:stop], torch.randn(drafts, x.shape[1]).to(x)))
        rows = [[1, 2], [0, 1, len(inputs)], [1, stop + drafts], [0, drafts + accepted * (stop - start > accepted)]]
        tensors = (torch.tensor(it, dtype=torch.int32, device=x.device) for it in rows)
        yield inputs, pool.begin(len(inputs), *tensors, is_decode=len(inputs) == 2)


def run_delta(
    where: torch.Tensor,
    kind: str,
    kernels: tuple[ModuleType, ModuleType],
    cuts: list[int],
    drafts: int = 0,
    accepted: int = 0,
) -> Outputs:
    """The outputs of the convolution for values and of the layer, and the row's state."""
    torch.manual_seed(0)
    keys, values, key_dim, value_dim, decays, _ = DELTA_NETS[kind]
    channels, (of_conv, of_delta) = 2 * keys * key_dim + values * value_dim, kernels
    pool = pool_of(
        where,
        (0, (WIDTH - 1) * channels, False),
        (32, channels, False),
        (0, values * key_dim * value_dim, True),
        (128, keys * key_dim, False),
        (128, values * value_dim, False),
        (128, values * decays, True),
    )
    widths = [channels, values * value_dim, values, values * decays]
    x, weight = torch.randn(NUM_TOKENS, sum(widths)), torch.randn(WIDTH, channels) / 2
    x[20:40] = x[20]  # values of equal keys depend on each other the most
    parameters = 3 * torch.rand(values), torch.rand(values * decays), torch.rand(value_dim) + 0.5
    args = DeltaArgs(*DELTA_NETS[kind], 1e-6, *(it.to(where.device) for it in parameters))
    normed = {"normed": (2 * keys, key_dim)} if of_delta is delta else {}
    outs = []
    for inputs, states in steps(pool, x.to(where), cuts, drafts, accepted):
        (conv_slots, conv_recent, slots, *recent), (qkv, z, b, a) = pool.tensors(0), inputs.split(widths, dim=1)
        of_pool = states, conv_slots, conv_recent
        qkv = of_conv.causal_conv(qkv, weight.to(where.device), None, *of_pool, silu=True, **normed)
        convolved = qkv[:, 2 * keys * key_dim :]
        out = of_delta.delta_net(qkv, (z, b, a), args, states, slots, tuple(recent))
        outs.append(torch.cat((convolved, out), dim=1)[1 : len(out) - drafts])
    return torch.cat(outs), pool.tensors(0)[2][2]


def run_mamba(
    where: torch.Tensor, of_mamba: ModuleType, cuts: list[int], drafts: int = 0, accepted: int = 0
) -> Outputs:
    """The layer's outputs and the row's state."""
    torch.manual_seed(0)
    heads, groups, head_dim, state_size = MAMBA
    columns, entries = heads * head_dim, heads * head_dim + groups * state_size
    pool = pool_of(where, (0, columns * state_size, True), (128, entries, False), (128, heads, True))
    widths = [entries + groups * state_size, columns, heads]
    x, weight = torch.randn(NUM_TOKENS, sum(widths)), torch.rand(columns).to(where.device)
    of_heads = (it.to(where.device) for it in (torch.randn(heads), torch.randn(heads) - 2, torch.randn(heads)))
    args = MambaArgs(*MAMBA, *of_heads, (0.9, 1.1, 0.001, 2.0))
    outs = []
    for inputs, states in steps(pool, x.to(where), cuts, drafts, accepted):
        (slots, *recent), (xbc, z, dt) = pool.tensors(0), inputs.split(widths, dim=1)
        y, squares = of_mamba.mamba(xbc.contiguous(), (z, dt), args, states, slots, tuple(recent))
        y = of_mamba.grouped_norm(y, squares, weight, groups, columns // groups, 1e-5, where.dtype)
        outs.append(y[1 : len(y) - drafts])
    return torch.cat(outs), pool.tensors(0)[0][2]


@functools.cache
def whole_delta(kind: str, kernels: tuple[ModuleType, ModuleType], device: torch.device, dtype: torch.dtype) -> Outputs:
    return run_delta(torch.empty(0, dtype=dtype, device=device), kind, kernels, CUTS["whole"])


@functools.cache
def whole_mamba(of_mamba: ModuleType, device: torch.device, dtype: torch.dtype) -> Outputs:
    return run_mamba(torch.empty(0, dtype=dtype, device=device), of_mamba, CUTS["whole"])


def check(got: Outputs, expected: Outputs, whole: Outputs) -> None:
    """`got` is about what a C kernel computes, and has the bits of the whole prompt."""
    for ours, theirs in zip(got, expected, strict=True):
        close = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[got[0].dtype]
        torch.testing.assert_close(ours.float().cpu(), theirs.float(), atol=close, rtol=close)
    assert all(map(torch.equal, got, whole))


@on_cuts
@pytest.mark.parametrize("kind", DELTA_NETS)
def test_delta_net_computes_what_the_c_kernels_do_with_the_same_bits_for_all_cuts(
    kind: str, name: str, drafts: int, accepted: int, where: torch.Tensor
) -> None:
    kernels = conv, delta if kind == "gated" else kimi_delta
    got = run_delta(where, kind, kernels, CUTS[name], drafts, accepted)
    expected = whole_delta(kind, (cpu_conv, cpu_delta), torch.device("cpu"), where.dtype)
    check(got, expected, whole_delta(kind, kernels, where.device, where.dtype))


@on_cuts
def test_mamba_computes_what_the_c_kernel_does_with_the_same_bits_for_all_cuts(
    name: str, drafts: int, accepted: int, where: torch.Tensor
) -> None:
    got = run_mamba(where, mamba, CUTS[name], drafts, accepted)
    check(got, whole_mamba(cpu_mamba, torch.device("cpu"), where.dtype), whole_mamba(mamba, where.device, where.dtype))


def test_a_gate_multiplies_by_its_sigmoid(device: torch.device) -> None:
    x, gate = torch.randn(3, 700), torch.randn(3, 700)
    expected = cpu_pointwise.mul_sigmoid_(x.clone(), gate)
    torch.testing.assert_close(activation.mul_sigmoid_(x.to(device), gate.to(device)).cpu(), expected)
