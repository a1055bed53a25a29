"""The kernels of recurrent layers for GPUs, interpreted and on a GPU: they compute what the C kernels do, and a token's
bits do not depend on how its row is cut into steps."""

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

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels compiled for a GPU take no CPU tensors"
)
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
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
    "drafts": [0, 62, 65, 66, 67, 126, 129, 130, NUM_TOKENS],
}


def run(
    of_conv: ModuleType, of_delta: ModuleType, cuts: list[int], device: torch.device, drafts: int = 0, accepted: int = 0
) -> tuple[torch.Tensor, ...]:
    """The convolution's output for values and the layer's, of a row in these steps, with a row beside it; and the row's
    state.

    Args:
        drafts: number of wrong tokens after those of each step, which are rejected.
        accepted: number of the last tokens of each longer step that are drafts, and right.
    """
    torch.manual_seed(0)
    pool = StatePool([LAYER], 3, 0, device)
    x, weight = torch.randn(NUM_TOKENS, CHANNELS), torch.randn(WIDTH, CHANNELS) / 2
    gates = torch.randn(NUM_TOKENS, VALUES * (VALUE_DIM + 2))
    decay = torch.rand(VALUES), torch.rand(VALUES)
    of_layer = (it.to(device) for it in (*decay, torch.rand(VALUE_DIM) + 0.5))
    args = DeltaArgs(KEYS, VALUES, KEY_DIM, VALUE_DIM, 1, False, 1e-6, *of_layer)
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start, stop in itertools.pairwise(cuts):
        wrong, length = torch.randn(drafts, CHANNELS), stop - start + drafts
        inputs = torch.cat((torch.randn(1, CHANNELS), x[start:stop], wrong))
        of_gates = torch.cat((gates[:1], gates[start:stop], torch.randn(drafts, gates.shape[1])))
        rows = [[1, 2], [0, 1, 1 + length], [1, stop + drafts], [0, drafts + accepted * (length > accepted)]]
        of_rows = (torch.tensor(it, dtype=torch.int32, device=device) for it in rows)
        states = pool.begin(1 + length, *of_rows, is_decode=length == 1)
        conv_slots, conv_recent, slots, keys, values, decays = pool.tensors(0)
        inputs, of_gates = inputs.to(device), of_gates.to(device)
        normed = {} if of_conv is cpu_conv else {"normed": (2 * KEYS, KEY_DIM)}
        of_pool = states, conv_slots, conv_recent
        qkv = of_conv.causal_conv(inputs, weight.to(device), None, *of_pool, silu=True, **normed)
        z, b, a = torch.split(of_gates, [VALUES * VALUE_DIM, VALUES, VALUES], dim=1)
        out = of_delta.delta_net(qkv, (z, b, a), args, states, slots, (keys, values, decays))
        outs.append((qkv[1 : 1 + stop - start, 2 * KEYS * KEY_DIM :], out[1 : 1 + stop - start]))
    convolved, out = (torch.cat(it).cpu() for it in zip(*outs, strict=True))
    return convolved, out, pool.tensors(0)[2][2].cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "drafts", "accepted"), [("whole", 0, 0), ("parts", 2, 0), ("tokens", 0, 0), ("drafts", 0, 2)]
)
def test_gpu_kernels_compute_what_c_kernels_do_with_the_same_bits_for_all_cuts(
    name: str, drafts: int, accepted: int, device: str
) -> None:
    expected = run(cpu_conv, cpu_delta, CUTS["whole"], CPU)
    got = run(conv, delta, CUTS[name], torch.device(device), drafts, accepted)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    if (
        device == "cuda" or name == "parts"
    ):  # the bits of NumPy's products depend on other lines, and decodes have others
        whole = run(conv, delta, CUTS["whole"], torch.device(device))
        assert all(map(torch.equal, got, whole))


@INTERPRETED
def test_a_gate_multiplies_by_its_sigmoid() -> None:
    x, gate = torch.randn(3, 700), torch.randn(3, 700)
    expected = cpu_pointwise.mul_sigmoid_(x.clone(), gate)
    torch.testing.assert_close(activation.mul_sigmoid_(x, gate), expected)
