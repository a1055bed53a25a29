"""The kernels of recurrent layers for GPUs, interpreted: they compute what the C kernels do, and a token's bits do not
depend on how its row is cut into steps."""

from __future__ import annotations

import itertools
import os
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.state_pool import StateLayer, StatePool
from worker.kernels import activation, conv, cpu_conv, cpu_delta, cpu_pointwise, delta
from worker.kernels.cpu_delta import DeltaArgs

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels compiled for a GPU take no CPU tensors"
)
CPU = torch.device("cpu")
KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH, NUM_TOKENS = 2, 4, 16, 32, 4, 140
CHANNELS = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
LAYER = StateLayer(
    0,
    tuple(
        (num_recent, size, torch.float32)
        for num_recent, size in (
            (0, (WIDTH - 1) * CHANNELS),
            (32, CHANNELS),
            (0, VALUES * KEY_DIM * VALUE_DIM),
            (128, KEYS * KEY_DIM),
            (128, VALUES * VALUE_DIM),
            (128, VALUES),
        )
    ),
)
CUTS = {
    "whole": [0, NUM_TOKENS],
    "parts": [0, 50, 64, 128, 131, 133, NUM_TOKENS],
    "tokens": [0, 64, *range(120, NUM_TOKENS + 1)],
}


def run(of_conv: ModuleType, of_delta: ModuleType, cuts: list[int], drafts: int = 0) -> tuple[torch.Tensor, ...]:
    """The convolution's output and the layer's, of a row in these steps, with a row beside it; and the row's state.

    Args:
        drafts: number of wrong tokens after those of each step, which are rejected.
    """
    torch.manual_seed(0)
    pool = StatePool([LAYER], 3, 0, CPU)
    x, weight = torch.randn(NUM_TOKENS, CHANNELS), torch.randn(WIDTH, CHANNELS) / 2
    gates = torch.randn(NUM_TOKENS, VALUES * (VALUE_DIM + 2))
    decay = torch.rand(VALUES), torch.rand(VALUES)
    args = DeltaArgs(KEYS, VALUES, KEY_DIM, VALUE_DIM, 1, False, 1e-6, *decay, torch.rand(VALUE_DIM) + 0.5)
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start, stop in itertools.pairwise(cuts):
        wrong, length = torch.randn(drafts, CHANNELS), stop - start + drafts
        inputs = torch.cat((torch.randn(1, CHANNELS), x[start:stop], wrong))
        of_gates = torch.cat((gates[:1], gates[start:stop], torch.randn(drafts, gates.shape[1])))
        rows = [[1, 2], [0, 1, 1 + length], [1, stop + drafts], [0, drafts]]
        states = pool.begin(1 + length, *(torch.tensor(it, dtype=torch.int32) for it in rows))
        conv_slots, conv_recent, slots, keys, values, decays = pool.tensors(0)
        qkv = of_conv.causal_conv(inputs, weight, None, states, conv_slots, conv_recent, silu=True)
        z, b, a = torch.split(of_gates, [VALUES * VALUE_DIM, VALUES, VALUES], dim=1)
        out = of_delta.delta_net(qkv, (z, b, a), args, states, slots, (keys, values, decays))
        outs.append((qkv[1 : 1 + stop - start], out[1 : 1 + stop - start]))
    convolved, out = (torch.cat(it) for it in zip(*outs, strict=True))
    return convolved, out, pool.tensors(0)[2][2]


@pytest.mark.parametrize(("name", "drafts"), [("whole", 0), ("parts", 2), ("tokens", 0)])
def test_gpu_kernels_compute_what_c_kernels_do_with_the_same_bits_for_all_cuts(name: str, drafts: int) -> None:
    expected, got = run(cpu_conv, cpu_delta, CUTS["whole"]), run(conv, delta, CUTS[name], drafts)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    whole = run(conv, delta, CUTS["whole"])
    assert all(map(torch.equal, got, whole))


def test_a_gate_multiplies_by_its_sigmoid() -> None:
    x, gate = torch.randn(3, 700), torch.randn(3, 700)
    expected = cpu_pointwise.mul_sigmoid_(x.clone(), gate)
    torch.testing.assert_close(activation.mul_sigmoid_(x, gate), expected)
