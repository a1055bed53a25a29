"""Time of one layer's experts on one GPU, router included, at the shape of Qwen3-30B-A3B, or gpt-oss-20b, or of one of
its ranks.

    python -m benchmarks.moe [--columns 768 384] [--tokens 1 16 ...] [--exact] [--sweep] [--kernels]
    python -m benchmarks.moe --gpt-oss --mxfp4 [--columns 2880 736] [--sweep]

bf16, random weights and tokens. A CUDA graph holds layers with weights of their own, so that no expert is still in the
L2 cache; the router of each chooses nearly uniformly. The floor is the bytes of the distinct experts chosen over the
speed of copies of large tensors (benchmarks/bandwidth.py), which is the floor of few tokens only. `--exact` times the
kernels of exact numerics, up to the rank's node, and requires of candidates that they have the same bits. `--sweep`
times the candidates for the kernels' table of tiles and prints the best; `--kernels` adds each kernel's own time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch.profiler import ProfilerActivity, profile

from benchmarks.bandwidth import measure
from benchmarks.graph_timing import graph_us
from configs.quantization import MXFP4_BYTES
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.mxfp4 import Mxfp4Matrix
from parallel.plan import Span, leaf_columns
from worker.kernels import grouped_experts, moe, pair_experts, routing
from worker.kernels.grouped_experts import Biases, ExpertWeight, Tile, Tiles
from worker.kernels.moe import MOST_BYTES, choose_tiles, mixture
from worker.kernels.routing import router_logits

COLUMNS = 768
NUM_LAYERS = 8
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
_COMPILING_THREADS = 16

# Values are (block_n, block_k, num_warps, num_stages) of the two products, by block_m, the pairs of a block.
_GATE_UP = {
    1: (
        *((8, 512, 4, 3), (8, 512, 4, 2), (4, 512, 4, 3), (4, 512, 4, 4), (4, 1024, 4, 3), (8, 256, 4, 4)),
        *((4, 256, 2, 5), (2, 1024, 4, 4), (16, 256, 4, 3), (8, 512, 8, 3)),
    ),
    16: (
        *((32, 128, 4, 4), (32, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 5), (16, 256, 4, 4), (16, 128, 2, 6)),
        *((32, 256, 4, 3), (64, 128, 8, 3), (32, 64, 4, 6), (16, 256, 2, 4)),
    ),
    32: ((64, 64, 4, 4), (64, 128, 4, 3), (32, 128, 4, 4), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 8, 3)),
    64: ((64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 8, 4), (128, 64, 8, 4)),
    128: ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 4, 4), (64, 64, 8, 4), (64, 64, 4, 3), (128, 128, 8, 2)),
}
_DOWN = {
    1: (
        *((8, 256, 4, 6), (8, 256, 4, 4), (4, 256, 4, 4), (4, 256, 2, 6), (16, 256, 4, 4), (16, 128, 4, 6)),
        *((8, 128, 2, 6), (4, 128, 2, 8), (8, 256, 8, 4), (4, 128, 1, 8), (8, 128, 1, 6), (16, 128, 2, 6)),
        *((8, 256, 2, 4), (8, 256, 2, 6), (4, 256, 1, 6), (8, 128, 1, 8), (4, 128, 1, 12)),
    ),
    16: (
        *((64, 128, 4, 4), (32, 128, 4, 4), (128, 128, 4, 3), (64, 64, 4, 5), (32, 256, 4, 3), (128, 64, 4, 4)),
        *((64, 128, 8, 4), (16, 256, 2, 4), (64, 256, 4, 2)),
    ),
    32: ((128, 64, 4, 4), (64, 128, 4, 4), (128, 128, 4, 3), (128, 64, 8, 4), (256, 64, 8, 3), (64, 64, 4, 5)),
    64: ((128, 64, 4, 4), (128, 128, 8, 3), (256, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 4), (256, 64, 4, 3)),
    128: ((256, 64, 8, 4), (256, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3), (128, 64, 4, 3)),
}
_EXACT_GATE_UP = _GATE_UP | {
    1: ((16, 128, 2, 6), (16, 128, 2, 4), (16, 256, 2, 4), (16, 256, 4, 3), (32, 128, 4, 4), (8, 256, 1, 4)),
}
_EXACT_DOWN = {
    1: ((32, 64, 2, 10), (32, 64, 2, 6), (16, 64, 1, 10), (16, 64, 1, 16), (32, 64, 1, 10), (64, 64, 4, 8)),
    16: ((128, 64, 4, 4), (64, 64, 4, 5), (64, 64, 2, 5), (128, 64, 4, 3), (128, 64, 8, 4)),
    32: ((128, 64, 4, 4), (64, 64, 4, 5), (128, 64, 8, 4), (128, 64, 4, 3)),
    64: ((128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)),
    128: ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 8, 4), (64, 64, 4, 4)),
}
# Steps are groups of 128 columns, or several groups side by side.
_FP8_GATE_UP = {
    1: tuple((n, k, w, st) for n in (8, 16, 32) for k, w in ((512, 4), (1024, 8), (256, 2)) for st in (2, 3, 4, 6)),
    16: tuple((n, 128, w, st) for n in (32, 64, 128) for w in (4, 8) for st in (3, 4, 5, 6)),
    32: tuple((n, 128, w, st) for n in (32, 64, 128) for w in (4, 8) for st in (3, 4)),
    64: tuple((n, 128, w, st) for n in (32, 64) for w in (4, 8) for st in (3, 4)),
    128: tuple((n, 128, 8, st) for n in (32, 64) for st in (3, 4)),
}
_FP8_DOWN = {
    1: tuple((n, 128, w, st) for n in (8, 16, 32) for w in (4, 8) for st in (2, 3, 4, 6)),
    16: tuple((n, 128, w, st) for n in (64, 128, 256) for w in (4, 8) for st in (3, 4, 5)),
    32: tuple((n, 128, w, st) for n in (64, 128, 256) for w in (4, 8) for st in (3, 4)),
    64: tuple((n, 128, w, st) for n in (64, 128) for w in (4, 8) for st in (3, 4)),
    128: tuple((n, 128, 8, st) for n in (64, 128) for st in (3, 4)),
}
_MXFP4_GATE_UP = {
    1: tuple((n, k, w, st) for n in (8, 16, 32) for k, w in ((512, 4), (1024, 8), (256, 2)) for st in (3, 4, 5, 6)),
    16: tuple((n, 128, w, st) for n in (16, 32, 64) for w in (2, 4, 8) for st in (3, 4, 5)),
    32: tuple((n, 128, w, st) for n in (32, 64) for w in (4, 8) for st in (3, 4)),
    64: tuple((n, 128, w, st) for n in (32, 64) for w in (4, 8) for st in (2, 3)),
    128: tuple((n, 128, w, st) for n in (32, 64) for w in (4, 8) for st in (2, 3)),
}
_MXFP4_DOWN = {
    1: tuple((n, 128, w, st) for n in (16, 32, 64) for w in (4, 8) for st in (3, 4, 5, 6)),
    16: tuple((n, 128, w, st) for n in (32, 64, 128) for w in (2, 4, 8) for st in (3, 4, 5)),
    32: tuple((n, 128, w, st) for n in (64, 128) for w in (4, 8) for st in (3, 4)),
    64: tuple((n, 128, w, st) for n in (64, 128) for w in (4, 8) for st in (2, 3)),
    128: tuple((n, 128, w, st) for n in (64, 128) for w in (4, 8) for st in (2, 3)),
}
_LEAF = leaf_columns(COLUMNS)
# Up to so many tokens, the blocks that are tried.
_BLOCKS = ((1, (1,)), (8, (1, 16)), (32, (16,)), (128, (16, 32)), (512, (16, 32, 64)), (8192, (64, 128)))


class Shape(NamedTuple):
    """A layer's, but for the columns of an expert."""

    hidden: int
    num_experts: int
    top_k: int
    has_biases: bool


QWEN3_30B_A3B = Shape(2048, 128, 8, False)
GPT_OSS_20B = Shape(2880, 32, 4, True)


@dataclass(frozen=True)
class Layer:
    shape: Shape
    router: torch.Tensor
    w13: ExpertWeight
    w2: ExpertWeight
    biases: Biases | None
    exact: bool
    most_bytes: int = MOST_BYTES

    @classmethod
    def create(cls, shape: Shape, columns: int, kind: type, *, exact: bool, most_bytes: int) -> Layer:
        hidden, num_experts = shape.hidden, shape.num_experts

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

        def experts(num_rows: int, num_columns: int) -> ExpertWeight:
            if kind is torch.Tensor:
                return random(num_experts, num_rows, num_columns)
            if kind is Mxfp4Matrix:
                in_four = Mxfp4Matrix.empty(num_experts, num_rows, num_columns, torch.device("cuda"))
                in_four.codes.random_()
                in_four.exponents.fill_(0xF3F3F3F3 - (1 << 32))  # 2 ** -10
                return in_four
            spans = [Span(0, num_rows)], Span(0, num_columns)
            made = Fp8Matrix.empty([(128, 128)], *spans, torch.device("cuda"), num_experts)
            made.values.copy_(random(num_experts, num_rows, num_columns) * 128)
            made.scales.fill_(1 / 128)
            return made

        biases = None
        if shape.has_biases:
            of_router = torch.zeros(num_experts, device="cuda")
            biases = Biases(of_router, random(num_experts, 2 * columns), random(num_experts, hidden), 7.0, 1.702)
        weights = random(num_experts, hidden), experts(2 * columns, hidden), experts(hidden, columns)
        return cls(shape, *weights, biases, exact, most_bytes)

    def run(self, x: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
        weights = self.router, self.w13, self.w2
        options: dict[str, Any] = {"top_k": self.shape.top_k, "normalise": True, "round_to": torch.bfloat16}
        options |= {"tiles": tiles, "biases": self.biases}
        if not self.exact:
            out = torch.empty_like(x)
            mixture(x, *weights, out=out, **options)
            return out
        nodes = (Span(0, self.w2.shape[2] // _LEAF),)
        out = torch.empty(1, *x.shape, device=x.device)
        mixture(x, *weights, leaf=_LEAF, nodes=nodes, out=out, most_bytes=self.most_bytes, **options)
        return out[0]

    def choose(self, num_tokens: int) -> Tiles:
        return choose_tiles(num_tokens, self.shape.top_k, self.shape.num_experts, type(self.w13), self.exact)

    @property
    def candidates(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Tiles of the two products, by block_m."""
        if self.exact:
            return _EXACT_GATE_UP, _EXACT_DOWN
        tables = {Fp8Matrix: (_FP8_GATE_UP, _FP8_DOWN), Mxfp4Matrix: (_MXFP4_GATE_UP, _MXFP4_DOWN)}
        return tables.get(type(self.w13), (_GATE_UP, _DOWN))

    @property
    def element_bytes(self) -> float:
        """Bytes of an element of an expert, with its share of scales in MXFP4."""
        return {Fp8Matrix: 1.0, Mxfp4Matrix: float(MXFP4_BYTES)}.get(type(self.w13), 2.0)


def _candidate_blocks(num_tokens: int) -> tuple[int, ...]:
    """Pairs of a block."""
    return next(blocks for most, blocks in _BLOCKS if num_tokens <= most)


def layer_us(layers: Sequence[Layer], x: torch.Tensor, tiles: Tiles | None = None) -> float:
    """Microseconds of one layer."""

    def run() -> None:
        for layer in layers:
            layer.run(x, tiles)

    return graph_us(run, len(layers))


def num_experts_hit(layers: Sequence[Layer], x: torch.Tensor) -> float:
    """Distinct experts that the tokens choose, mean over the layers."""
    hit = [router_logits(x, it.router).sum(0).topk(it.shape.top_k, dim=1).indices.unique().numel() for it in layers]
    return sum(hit) / len(layers)


def _report(layers: Sequence[Layer], x: torch.Tensor, columns: int, us: float, tiles: Tiles, peak: float) -> None:
    num_tokens, hit, shape = len(x), num_experts_hit(layers, x), layers[0].shape
    expert_bytes = hit * 3 * columns * shape.hidden * layers[0].element_bytes
    floor_us = expert_bytes / peak * 1e6
    tflops = num_tokens * shape.top_k * 6 * columns * shape.hidden / us / 1e6
    print(
        f"{columns:4} columns, {num_tokens:4} tokens: {us:7.1f} us | {hit:5.1f} experts, {expert_bytes / 1e6:6.1f} MB, "
        f"floor {floor_us:5.1f} us, {floor_us / us:4.0%} of it | {tflops:5.1f} TFLOP/s | {_named(tiles)}",
        flush=True,
    )


def _named(tiles: Tiles) -> str:
    cut = [f"{it.block_n} x {it.block_k}, {it.num_warps} w, {it.num_stages} st" for it in _both(tiles)]
    return f"block_m {tiles.block_m}: {'; '.join(cut)}"


def _both(tiles: Tiles) -> tuple[Tile, Tile]:
    return tiles.gate_up, tiles.down


def _compile(layer: Layer, tokens: Iterable[int]) -> None:
    """Every candidate of these numbers of tokens, many at once."""

    def run(num_tokens: int, tiles: Tiles) -> None:
        x = torch.zeros(num_tokens, layer.shape.hidden, device="cuda", dtype=torch.bfloat16)
        try:
            layer.run(x, tiles)
        except triton.runtime.errors.OutOfResources as error:
            print(f"{_named(tiles)}: {error}")

    jobs: dict[Tiles, int] = {}
    for num_tokens in tokens:
        for block_m in _candidate_blocks(num_tokens):
            gate_ups, downs = (candidates[block_m] for candidates in layer.candidates)
            for i in range(max(len(gate_ups), len(downs))):
                gate_up, down = Tile(*gate_ups[i % len(gate_ups)]), Tile(*downs[i % len(downs)])
                tiles = Tiles(block_m, gate_up, down)
                jobs.setdefault(tiles, num_tokens)
    with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
        list(pool.map(lambda job: run(job[1], job[0]), jobs.items()))
    torch.cuda.synchronize()


def _sweep(layers: Sequence[Layer], x: torch.Tensor) -> tuple[float, Tiles]:
    """The fastest candidate: the first product's tile with the table's second, then the second's."""
    expected = layers[0].run(x).float()
    both = layers[0].candidates
    best: tuple[float, Tiles] | None = None
    for block_m in _candidate_blocks(len(x)):
        tiles = Tiles(block_m, *(Tile(*candidates[block_m][0]) for candidates in both))
        timed: dict[Tiles, float] = {}
        for field, candidates in zip(("gate_up", "down"), both, strict=True):
            for tile in candidates[block_m]:
                tried = replace(tiles, **{field: Tile(*tile)})
                if tried in timed:
                    continue
                try:
                    y = layers[0].run(x, tried).float()
                except triton.runtime.errors.OutOfResources:
                    continue
                difference = ((y - expected).norm() / expected.norm()).item()
                assert difference <= (0.0 if layers[0].exact else 0.02), f"{_named(tried)}: {difference}"
                timed[tried] = layer_us(layers, x, tried)
            tiles = min(timed, key=lambda it: timed[it])
        for tried, us in sorted(timed.items(), key=lambda item: item[1]):
            print(f"    {len(x):4} tokens {us:7.1f} us {_named(tried)}")
        if best is None or timed[tiles] < best[0]:
            best = timed[tiles], tiles
    assert best is not None
    return best


def _print_kernels(layers: Sequence[Layer], x: torch.Tensor, tiles: Tiles) -> None:
    """Each kernel's own time, eagerly launched: without what overlaps or lies between them in a graph."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for layer in layers:
            layer.run(x, tiles)
        torch.cuda.synchronize()
    averages = sorted(found.key_averages(), key=lambda it: -it.device_time_total)
    print("    " + ", ".join(f"{it.key} {it.device_time_total / len(layers):.1f}" for it in averages[:8]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", help="of an expert; the model's and half of them by default")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--exact", action="store_true", help="the kernels of exact numerics")
    parser.add_argument("--gpt-oss", action="store_true", help="the shape of gpt-oss-20b")
    kinds = parser.add_mutually_exclusive_group()
    for name, kind, what in (
        ("--fp8", Fp8Matrix, "experts in FP8, with scales of blocks of 128 x 128"),
        ("--mxfp4", Mxfp4Matrix, "experts in four bits, with scales of blocks of 32"),
    ):
        kinds.add_argument(name, dest="kind", action="store_const", const=kind, default=torch.Tensor, help=what)
    parser.add_argument("--most-bytes", type=int, default=MOST_BYTES, help="of pairs' leaves at a time, with --exact")
    parser.add_argument("--sweep", action="store_true", help="time the candidates for the table of tiles")
    parser.add_argument("--serial", action="store_true", help="start no kernel before the one in front is done")
    parser.add_argument("--kernels", action="store_true", help="each kernel's own time, by torch's profiler")
    args = parser.parse_args()
    if args.serial:
        for module in (grouped_experts, moe, pair_experts, routing):
            mock.patch.object(module, "has_dependent_launch", return_value=False).start()
    torch.manual_seed(0)
    peak = measure("cuda") * 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, in graphs of")
    print(f"{NUM_LAYERS} layers; copies move {peak / 1e12:.2f} TB/s")
    shape, whole = (GPT_OSS_20B, 2880) if args.gpt_oss else (QWEN3_30B_A3B, COLUMNS)
    for columns in args.columns or (whole, whole // 2):
        options = {"exact": args.exact, "most_bytes": args.most_bytes}
        layers = [Layer.create(shape, columns, args.kind, **options) for _ in range(NUM_LAYERS)]
        if args.sweep:
            start = time.monotonic()
            _compile(layers[0], args.tokens)
            print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
        measure("cuda")  # an idle device's clocks are low at first
        for num_tokens in args.tokens:
            x = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
            if args.sweep:
                us, tiles = _sweep(layers, x)
            else:
                tiles = layers[0].choose(num_tokens)
                us = layer_us(layers, x, tiles)
            _report(layers, x, columns, us, tiles, peak)
            if args.kernels:
                _print_kernels(layers, x, tiles)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
