"""Products of exact numerics on one GPU: whether their bits are equal, and which schedule is the fastest.

    python -m benchmarks.exact_products [--only check time] [--rows 1 16 ...]

bf16, shapes of Qwen3-8B and Llama-3.1-8B over 1 to 4 ranks. `check` counts elements that differ from `chain_gemm`'s:
of its own other tiles, and of cuBLASLt that does not split K, rounded, with a bias, and in fp32; "plain" is cuBLAS as
torch has it. `time` measures o and down: cuBLAS's plain product against the tree, and with the norm behind it, which
adds the subtrees itself, in several schedules. All schedules of one product must have the same bits. Weights
are many, more than the L2 cache holds, in one CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch
import triton

from benchmarks.graph_timing import graph_us
from configs.layers import Axis, HeadGroups
from parallel.kernels.tree_sum import sum_add_norm, sum_subtrees
from parallel.numerics.kernels.chain_gemm import chain_gemm, cublas_is_faster, use_chain_cublas
from parallel.numerics.kernels.node_gemm import Tile, cut_nodes, node_gemm, pack_parts, subtrees
from parallel.plan import Span, leaf_columns
from parallel.tree import additions_of
from worker.kernels.norm import add_rms_norm

HIDDEN, HEAD_DIM, NUM_GROUPS, GROUP_HEADS = (
    4096,
    128,
    8,
    6,
)  # both models'; a group has 4 query heads, a key and a value
MODELS = {"Qwen3-8B": (12288, 151936), "Llama-3.1-8B": (14336, 128256)}
SHOWN = 4
ROWS = (1, 16, 64, 256, 2048, 8192)
CHECKED_ROWS = (1, 2, 16, 17, 64, 256, 2048)
TARGET_BYTES = 450 << 20
CHAIN_TILES = (Tile(16, 16, 128, 2, 6), Tile(16, 64, 64, 4, 4), Tile(64, 32, 64, 4, 6), Tile(128, 128, 64, 8, 4))
TREE_TILES = {
    16: (
        *(Tile(16, 32, 128, 2, 4), Tile(16, 16, 128, 2, 6), Tile(16, 64, 128, 4, 3), Tile(16, 64, 64, 2, 5)),
        *(Tile(16, 32, 64, 2, 8), Tile(16, 128, 64, 4, 3)),
    ),
    128: (
        *(Tile(64, 64, 64, 4, 4), Tile(64, 64, 128, 4, 3), Tile(64, 32, 64, 4, 6), Tile(32, 64, 64, 4, 5)),
        *(Tile(64, 128, 64, 4, 4), Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 6)),
    ),
    8192: (
        *(Tile(128, 128, 128, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 4, 4), Tile(64, 128, 64, 4, 3)),
        *(Tile(128, 64, 128, 4, 3), Tile(128, 256, 64, 8, 4)),
    ),
}
CUTS = (1, 2, 4, 8)


def random_of(*shape: int) -> torch.Tensor:
    """Elements, some of them 50 times the others, as activations have."""
    x = torch.randn(shape, device="cuda")
    return torch.where(torch.rand(shape, device="cuda") < 0.01, 50 * x, x).bfloat16()


def chain_shapes() -> Iterator[tuple[str, int]]:
    """Names and rows of the weights whose columns no rank cuts, of the widest rank."""
    for model, (columns, vocab) in MODELS.items():
        for size in (1, 2, 3, 4):
            yield f"{model} / {size} qkv", -(-NUM_GROUPS // size) * GROUP_HEADS * HEAD_DIM
            yield f"{model} / {size} gate_up", 2 * 128 * -(-columns // 128 // size)
            yield f"{model} / {size} lm_head", 64 * -(-vocab // 64 // size)


def differing(x: torch.Tensor, reference: torch.Tensor) -> int:
    return int((x != reference).sum())


def check() -> None:
    """Elements that differ from the chain's."""
    print("shape, rows | other tiles | cuBLASLt, + bias, fp32 | plain cuBLAS | is cuBLAS taken; error over fp64's")
    seen = set()
    for name, out_features in chain_shapes():
        if out_features in seen:
            continue
        seen.add(out_features)
        weight, bias = random_of(out_features, HIDDEN) / 64, random_of(out_features)
        for num_rows in CHECKED_ROWS:
            x = random_of(num_rows, HIDDEN)
            plain = torch.mm(x, weight.t())
            with chain_cublas():
                theirs = [torch.mm(x, weight.t()), torch.addmm(bias, x, weight.t())]
                theirs.append(torch.mm(x, weight.t(), out_dtype=torch.float32))
            ours = [chain_gemm(x, weight, None, out=torch.empty_like(plain))]
            ours.append(chain_gemm(x, weight, bias, out=torch.empty_like(plain)))
            ours.append(chain_gemm(x, weight, None, out=torch.empty(plain.shape, device="cuda")))
            tiles = [
                differing(chain_gemm(x, weight, None, out=torch.empty_like(ours[2]), tile=tile), ours[2])
                for tile in CHAIN_TILES
            ]
            counts = [differing(their, our) for their, our in zip(theirs, ours, strict=True)]
            error = 0.0
            if num_rows <= 64:
                error = float((ours[2] - x.double() @ weight.double().t()).abs().max())
            taken = cublas_is_faster(num_rows, out_features)
            right = not any(tiles) and not (taken and any(counts))
            print(
                f"{name:26} {out_features:6} {num_rows:5} | {tiles} | {counts} | {differing(plain, ours[0])} | "
                f"{taken}; {error:.1e}{'' if right else '  <-- WRONG'}",
                flush=True,
            )


@contextlib.contextmanager
def chain_cublas() -> Iterator[None]:
    """Within it, cuBLAS as exact numerics has it."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names}
    use_chain_cublas()
    yield
    torch.backends.cuda.preferred_blas_library(library)
    for name, setting in before.items():
        setattr(matmul, name, setting)


def tree_shapes() -> Iterator[tuple[str, int, int]]:
    """Names, leaves and their width of o and down where the ranks' leaves are one node or nearly."""
    heads = HeadGroups(Axis.QUERY_HEADS, 4 * NUM_GROUPS, Axis.KV_HEADS, NUM_GROUPS).leaf_heads
    shapes = [("o", 4 * NUM_GROUPS // heads, heads * HEAD_DIM)]
    for model, (columns, _) in MODELS.items():
        shapes.append((f"{model} down", columns // leaf_columns(columns), leaf_columns(columns)))
    for name, num_leaves, leaf in shapes:
        for size in (1, 2, 3, 4):
            yield f"{name} / {size}", -(-num_leaves // size), leaf


class Product:
    """One weight's shape and so many rows."""

    def __init__(self, num_rows: int, num_leaves: int, leaf: int) -> None:
        self.leaf, self.root = leaf, Span(0, num_leaves)
        k = num_leaves * leaf
        self.x = random_of(num_rows, k)
        self.weights = torch.randn(max(TARGET_BYTES // (2 * HIDDEN * k), 2), HIDDEN, k, device="cuda").bfloat16()
        self.residual, self.norm_weight = random_of(num_rows, HIDDEN), random_of(HIDDEN)
        self.out = torch.empty(1, num_rows, HIDDEN, device="cuda")

    def cublas_us(self, *, norm: bool) -> float:
        out = torch.empty(self.residual.shape, dtype=torch.bfloat16, device="cuda")

        def run() -> None:
            for weight in self.weights:
                torch.mm(self.x, weight.t(), out=out)
                if norm:
                    add_rms_norm(out, self.residual, self.norm_weight, 1e-6)

        return graph_us(run, len(self.weights))

    def tree_us(self) -> float:
        def run() -> None:
            for weight in self.weights:
                node_gemm(self.x, weight, leaf=self.leaf, nodes=(self.root,), out=self.out)

        return graph_us(run, len(self.weights))

    def tree_norm_us(self, tile: Tile | None = None, parts: tuple[Span, ...] | None = None) -> float:
        """The norm adds the subtrees."""
        parts = parts or subtrees((self.root,), self.leaf, len(self.x), HIDDEN)
        adds, _ = additions_of(parts, (self.root,))
        sums = torch.empty(len(parts), *self.residual.shape, device="cuda")

        def run() -> None:
            for weight in self.weights:
                node_gemm(self.x, weight, leaf=self.leaf, nodes=parts, out=sums, tile=tile, parts=parts)
                sum_add_norm(sums, adds, self.residual, self.norm_weight, 1e-6)

        us = graph_us(run, len(self.weights))
        node_gemm(self.x, self.weights[-1], leaf=self.leaf, nodes=parts, out=sums, tile=tile, parts=parts)
        sum_subtrees(sums, adds, (2 * len(adds),), out=self.out)
        return us

    def schedules(self) -> Iterator[tuple[Tile, tuple[Span, ...]]]:
        tiles = next(tiles for most, tiles in TREE_TILES.items() if len(self.x) <= most)
        for parts in {cut_nodes((self.root,), cuts) for cuts in CUTS}:
            if len(parts) * self.out.nbytes <= 1 << 28:
                yield from ((tile, parts) for tile in tiles if fits(tile, parts))


def fits(tile: Tile, parts: tuple[Span, ...]) -> bool:
    """Whether what waits in registers is not spilled."""
    depth = pack_parts(parts)[2]
    return depth <= 2 if tile.block_n == 128 else depth == 0 or tile.block_m * tile.block_n < 1 << 14


def time_trees(all_rows: list[int]) -> None:
    """Microseconds of every product, with the norm behind it, and its fastest schedule."""
    print("product, rows | cuBLAS, tree to one node | with norm: cuBLAS, tree by default, fastest schedules (us)")
    for name, num_leaves, leaf in tree_shapes():
        for num_rows in all_rows:
            product = Product(num_rows, num_leaves, leaf)
            default = product.tree_us()
            expected = product.out.clone()
            default_norm = product.tree_norm_us()
            times = {}
            for tile, parts in product.schedules():
                times[tile, parts] = product.tree_norm_us(tile, parts)
                if not torch.equal(product.out, expected):
                    print(f"  <-- WRONG: {tile} {parts} differs in {differing(product.out, expected)}")
            print(
                f"{name:22} {num_leaves:2} x {leaf} {num_rows:5} | {product.cublas_us(norm=False):7.1f} {default:7.1f} "
                f"| {product.cublas_us(norm=True):7.1f} {default_norm:7.1f};"
                + ";".join(f" {times[it]:.1f} {_named(*it)}" for it in sorted(times, key=times.__getitem__)[:SHOWN]),
                flush=True,
            )


def _named(tile: Tile, parts: tuple[Span, ...]) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}/{tile.num_warps}/{tile.num_stages} in {len(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("check", "time"), nargs="+", default=("check", "time"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16")
    if "check" in arguments.only:
        check()
    if "time" in arguments.only:
        time_trees(arguments.rows)


if __name__ == "__main__":
    main()
