"""Time of a recurrent layer's kernels on one GPU at the shape of Qwen3.5-9B, and whether decodes have a prompt's bits.

    python -m benchmarks.recurrent [--rows 1 16 64 256] [--prompts 16x2048 1x8192]

bf16, random tokens and weights. Beside ours stand fla-core's kernels where it is installed: `fused_recurrent`, which
writes the state after every token, and `chunk` for prompts, both for the same heads. The floor is the bytes of the
states, and of the recent entries that a decode reads in the middle of a chunk, over the speed of copies of large
tensors (benchmarks/bandwidth.py).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
import triton

from attention.state_pool import RowStates, StateLayer, StatePool
from benchmarks.bandwidth import measure
from benchmarks.graph_timing import graph_us
from worker.kernels import conv, delta
from worker.kernels.cpu_delta import DeltaArgs

KEYS, VALUES, SIZE, WIDTH = 16, 32, 128, 4
CHANNELS = (2 * KEYS + VALUES) * SIZE
_STATE_BYTES = VALUES * SIZE * SIZE * 4
_ENTRY_BYTES = (KEYS + VALUES) * SIZE * 2 + VALUES * 4
_MIDDLE = 32
"""Number of recent entries of a decode in the middle of a chunk."""


class Layer:
    """A Gated DeltaNet layer, its convolution, and the states of `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        sizes = (0, 3 * CHANNELS), (32, CHANNELS), (0, VALUES * SIZE * SIZE), (128, KEYS * SIZE), (128, VALUES * SIZE)
        dtypes = torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32
        tensors = tuple((*size, dtype) for size, dtype in zip((*sizes, (128, VALUES)), dtypes, strict=True))
        torch.manual_seed(0)
        self.pool = StatePool([StateLayer(0, tensors)], num_rows, 0, torch.device("cuda"))
        self.weight = torch.randn(WIDTH, CHANNELS, device="cuda")
        decay = (torch.rand(VALUES, device="cuda") for _ in range(2))
        self.args = DeltaArgs(KEYS, VALUES, SIZE, SIZE, 1, False, 1e-6, *decay, torch.ones(SIZE, device="cuda"))

    def states(self, lengths: list[int], ends: list[int]) -> RowStates:
        """A step's rows of `lengths` new tokens, and `ends` tokens in all."""
        cu = [0, *itertools.accumulate(lengths)]
        rows = list(range(1, len(lengths) + 1)), cu, ends, [0] * len(lengths)
        tensors = (torch.tensor(it, dtype=torch.int32, device="cuda") for it in rows)
        return self.pool.begin(cu[-1], *tensors, is_decode=max(lengths) == 1)

    def convolve(self, x: torch.Tensor, states: RowStates) -> torch.Tensor:
        slots, recent = self.pool.tensors(0)[:2]
        return conv.causal_conv(x, self.weight, None, states, slots, recent, silu=True, normed=(2 * KEYS, SIZE))

    def run(self, qkv: torch.Tensor, gates: tuple[torch.Tensor, ...], states: RowStates) -> torch.Tensor:
        slots, *recent = self.pool.tensors(0)[2:]
        z, b, a = gates
        return delta.delta_net(qkv, (z, b, a), self.args, states, slots, (recent[0], recent[1], recent[2]))


def inputs(num_tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """q, k, v before the convolution, and z, b, a."""
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    return random(num_tokens, CHANNELS), tuple(random(num_tokens, it) for it in (VALUES * SIZE, VALUES, VALUES))


def num_differing(cuts: list[int]) -> int:
    """Number of elements of two rows' outputs that differ if they are computed in steps that end at `cuts`."""
    x, gates = inputs(2 * cuts[-1])
    found = []
    for ends in ([cuts[-1]], cuts):
        layer, outs = Layer(2), []
        for start, stop in itertools.pairwise([0, *ends]):
            states = layer.states([stop - start] * 2, [stop] * 2)
            of_step = [torch.cat((it[start:stop], it[cuts[-1] + start : cuts[-1] + stop])) for it in (x, *gates)]
            outs.append(
                layer.run(layer.convolve(of_step[0], states), tuple(of_step[1:]), states).view(2, -1, VALUES * SIZE)
            )
        found.append(torch.cat(outs, dim=1))
    return int((found[0] != found[1]).sum())


def peer_us(num_rows: int, length: int) -> str:
    """Microseconds of fla-core's kernel for `num_rows` rows of `length` tokens, with its name. Empty if fla-core is not
    installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        return ""
    name, kernel, keys = "fused_recurrent", fused_recurrent_gated_delta_rule, KEYS
    if length > 1:
        name, kernel, keys = "chunk", chunk_gated_delta_rule, VALUES  # for as many key heads as value heads
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k = random(num_rows, length, keys, SIZE), random(num_rows, length, keys, SIZE)
    v, b = random(num_rows, length, VALUES, SIZE), random(num_rows, length, VALUES).sigmoid()
    g, h = (
        -torch.rand(num_rows, length, VALUES, device="cuda"),
        torch.zeros(num_rows, VALUES, SIZE, SIZE, device="cuda"),
    )

    @torch.no_grad()
    def run() -> None:
        kernel(q, k, v, g=g, beta=b, initial_state=h, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return f", {name} {graph_us(run, 1):.1f}"


def report(num_rows: int, length: int, peak: float) -> None:
    """Prints the times of `num_rows` rows that get `length` tokens each: the first, or one in the middle of a chunk."""
    layer = Layer(num_rows)
    if length == 1:
        layer.states([64 + _MIDDLE] * num_rows, [64 + _MIDDLE] * num_rows)
    states = layer.states([length] * num_rows, [length if length > 1 else 64 + _MIDDLE + 1] * num_rows)
    x, gates = inputs(num_rows * length)
    qkv = layer.convolve(x, states)

    def each_us(run: Callable[[], object]) -> float:
        def repeat() -> None:
            for _ in range(8):
                run()

        return graph_us(repeat, 8)

    of_conv = each_us(lambda: layer.convolve(x, states))
    us = each_us(lambda: layer.run(qkv, gates, states))
    floor = num_rows * (_STATE_BYTES + (_MIDDLE * _ENTRY_BYTES if length == 1 else 0)) / peak * 1e6
    print(
        f"{num_rows} x {length}: {us:.1f} us, convolution {of_conv:.1f}, floor {floor:.1f}{peer_us(num_rows, length)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--prompts", nargs="*", default=["16x2048", "1x8192"])
    args = parser.parse_args()
    peak = measure("cuda") * 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"Copies move {peak / 1e12:.2f} TB/s.")
    shapes = [(it, 1) for it in args.rows] + [tuple(map(int, it.split("x"))) for it in args.prompts]
    for cuts in ([*range(1, 201)], [50, 64, 128, 131, 133, 197, 300]):
        print(f"{num_differing(cuts)} elements differ in {len(cuts)} steps from one step")
    for shape in shapes:
        report(*shape, peak)


if __name__ == "__main__":
    main()
