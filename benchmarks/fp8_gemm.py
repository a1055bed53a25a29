"""Time of products with weights in FP8 on one GPU: the kernel that reads them, a plain copy and cuBLAS, and bf16.

    python -m benchmarks.fp8_gemm [--sweep] [--exact] [--layers Qwen3-8B,...]

Activations are bf16, scales are of blocks of 128 x 128. A CUDA graph holds the same product with many weights, more
than the L2 cache holds. The floor is the bytes of the weight in FP8 over the speed of copies of large tensors. With
--exact, o and down are the nodes of exact numerics, of as many leaves as models have. --sweep tries tiles of the kernel
for a few numbers of rows, and names the fastest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import triton

from benchmarks.bandwidth import measure
from benchmarks.graph_timing import graph_us
from benchmarks.skinny_gemm import LAYERS, TARGET_BYTES
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.kernels.chain_gemm import chain_gemm, use_chain_cublas
from parallel.numerics.kernels.fp8_tile import plain
from parallel.numerics.kernels.node_gemm import Tile, node_gemm
from parallel.numerics.weight import ChainWeight, CudaWeight, NodeWeight
from parallel.plan import Span, leaf_columns

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SWEPT = (1, 16, 64, 128)
CANDIDATES = {
    16: ((16, 32, 64), (64, 128), (1, 2, 4), (4, 6, 8, 12)),
    64: ((32, 64, 128), (64, 128), (2, 4), (3, 4, 6)),
    128: ((64, 128), (64, 128), (4, 8), (3, 4)),
}
"""Columns, steps, warps and stages of tiles, by their rows."""
CUDA = torch.device("cuda")
Product = Callable[[torch.Tensor], object]


def weights_of(out_features: int, in_features: int) -> list[Fp8Matrix]:
    """Random ones, as many as a graph reads."""
    made = []
    for _ in range(max(TARGET_BYTES // (out_features * in_features), 2)):
        weight = Fp8Matrix.empty([(128, 128)], [Span(0, out_features)], Span(0, in_features), CUDA)
        weight.values.copy_(torch.randn(out_features, in_features, device=CUDA, dtype=torch.bfloat16))
        weight.scales.fill_(1 / 64)
        made.append(weight)
    return made


def time_us(products: list[Product], num_rows: int, in_features: int) -> float:
    """Microseconds of one of them."""
    x = torch.randn(num_rows, in_features, device=CUDA, dtype=torch.bfloat16)
    return graph_us(lambda: [product(x) for product in products], len(products))


def cell(weights: list[Fp8Matrix], num_rows: int, leaf: int | None) -> tuple[float, ...]:
    """bf16 as it is taken, FP8 as it is taken, FP8 by the kernel, and by a plain copy and cuBLAS."""
    out_features, in_features = weights[0].shape
    nodes = [Span(0, in_features // leaf)] if leaf else []

    def made(weight: Fp8Matrix | torch.Tensor) -> Product:
        if leaf:
            return NodeWeight(weight, leaf, nodes)
        return ChainWeight(weight, None)

    def kernel(weight: Fp8Matrix) -> Product:
        if leaf:
            out = torch.empty(1, num_rows, out_features, device=CUDA)
            return lambda x: node_gemm(x, weight, leaf=leaf, nodes=tuple(nodes), out=out)
        return lambda x: chain_gemm(
            x, weight, None, out=torch.empty(num_rows, out_features, device=CUDA, dtype=x.dtype)
        )

    def copied(weight: Fp8Matrix) -> Product:
        return lambda x: made(plain(weight, x.dtype))(x)

    dense: list[Product] = [
        made(it) if leaf else CudaWeight(it, None)
        for it in (plain(weight, torch.bfloat16) for weight in weights[: max(len(weights) // 2, 2)])
    ]
    each = dense, [made(it) for it in weights], [kernel(it) for it in weights], [copied(it) for it in weights]
    return tuple(time_us(products, num_rows, in_features) for products in each)


def sweep(weights: list[Fp8Matrix], num_rows: int, leaf: int | None) -> list[tuple[float, Tile]]:
    """Times of tiles, the fastest first; those that do not fit are left out."""
    out_features, in_features = weights[0].shape
    nodes, found = (Span(0, in_features // (leaf or in_features)),), []
    block_m = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
    for block_n, block_k, num_warps, num_stages in itertools.product(*CANDIDATES[block_m]):
        if not 32 <= block_n * block_k // (32 * num_warps) <= 128:  # elements of a thread
            continue
        tile = Tile(block_m, block_n, block_k, num_warps, num_stages)

        def product(weight: Fp8Matrix, tile: Tile = tile) -> Product:
            if leaf:
                out = torch.empty(1, num_rows, out_features, device=CUDA)
                return lambda x: node_gemm(x, weight, leaf=leaf, nodes=nodes, out=out, tile=tile)
            out = torch.empty(num_rows, out_features, device=CUDA, dtype=torch.bfloat16)
            return lambda x: chain_gemm(x, weight, None, out=out, tile=tile)

        try:
            found.append((time_us([product(it) for it in weights], num_rows, in_features), tile))
        except triton.runtime.errors.OutOfResources:
            continue
    return sorted(found, key=lambda it: it[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--layers", default="Qwen3-8B,Qwen3-8B / 4")
    given = parser.parse_args()
    if given.exact:
        use_chain_cublas()
    peak = measure("cuda") * 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, us in graphs")
    print("layer, product, rows | bf16 as taken, FP8 as taken, FP8 kernel, copy and cuBLAS (floor of FP8)")
    for name, hidden, qkv, o, inter in LAYERS:
        if name not in given.layers.split(","):
            continue
        products = {"qkv": (qkv, hidden), "o": (hidden, o), "gate_up": (2 * inter, hidden), "down": (hidden, inter)}
        for product, (out_features, in_features) in products.items():
            weights, leaf = weights_of(out_features, in_features), None
            if given.exact and product in ("o", "down"):
                leaf = o // 8 if product == "o" else leaf_columns(inter)
            floor = out_features * in_features / peak * 1e6
            for num_rows in SWEPT if given.sweep else ROWS:
                head = f"{name:13} {product:7} {num_rows:4} |"
                if given.sweep:
                    tiles = sweep(weights, num_rows, leaf)[:4]
                    print(head, *(f"{us:6.1f} {tile}" for us, tile in tiles), f"({floor:5.1f})", flush=True)
                else:
                    times = cell(weights, num_rows, leaf)
                    print(head, *(f"{us:7.1f}" for us in times), f"({floor:5.1f})", flush=True)


if __name__ == "__main__":
    main()
