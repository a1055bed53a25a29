"""Time of products with weights in FP8 on one GPU, beside bf16.

    python -m benchmarks.fp8_gemm [--rows 1 16 ...] [--layers Qwen3-8B,...] [--sweep] [--exact]

Activations are bf16, scales are of blocks of 128 x 128. A CUDA graph holds the same product with many weights, more
than the L2 cache holds. The floor is the bytes of the weight in FP8 over the speed of copies of large tensors. Fast
numerics multiply by a kernel and, many rows, by cuBLAS. With --exact there are a kernel and a plain copy with cuBLAS,
and o and down are the nodes of exact numerics, of as many leaves as models have. --sweep tries tiles of the kernel of
either for a few numbers of rows, and names the fastest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from benchmarks.bandwidth import measure
from benchmarks.graph_timing import graph_us
from benchmarks.skinny_gemm import LAYERS, TARGET_BYTES
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.kernels import fp8_gemm
from parallel.numerics.kernels.chain_gemm import chain_gemm, use_chain_cublas
from parallel.numerics.kernels.fp8_tile import plain
from parallel.numerics.kernels.node_gemm import Tile, node_gemm
from parallel.numerics.weight import ChainWeight, CudaWeight, Fp8Weight, NodeWeight
from parallel.plan import Span, leaf_columns

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
SWEPT = (1, 4, 16, 64, 128, 256)
# Tiles that are tried, by the most rows they are for: rows, columns, warps, stages, groups side by side, whether
# programs quantise, and how many there are to be.
_SIDES = ((4, 4), (8, 8), (4, 8))
FAST = {
    4: ((1, 4), (8, 16, 32, 64), _SIDES, (3, 4, 6), (True, False), (0,)),
    16: ((16, 64), (16, 32, 64), (*_SIDES, (4, 1)), (3, 4, 6), (False,), (0, 256)),
    64: ((64,), (32, 64, 128), ((4, 1), (8, 1)), (3, 4, 6), (False,), (1, 128, 256, 512)),
    1 << 62: ((64, 128), (64, 128), ((4, 1), (8, 1)), (3, 4, 5), (False,), (1, 256, 512)),
}
# Columns, steps, warps and stages of tiles of exact numerics, by their rows.
EXACT = {
    16: ((16, 32, 64), (64, 128), (1, 2, 4), (4, 6, 8, 12)),
    64: ((32, 64, 128), (64, 128), (2, 4), (3, 4, 6)),
    128: ((64, 128), (64, 128), (4, 8), (3, 4)),
}
CUDA = torch.device("cuda")
_COMPILING_THREADS = 16
Product = Callable[[torch.Tensor], object]
Kernel = Callable[[Fp8Matrix, torch.Tensor], Product]
"""The product of a weight, to be written to a tensor."""


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


def ways(weights: list[Fp8Matrix], num_rows: int, leaf: int | None, exact: bool) -> Iterator[list[Product]]:
    """The products in bf16 as they are taken, in FP8 as they are taken, by the kernel, and by cuBLAS."""
    (out_features, in_features), dtype = weights[0].shape, torch.bfloat16
    nodes = [Span(0, in_features // leaf)] if leaf else []
    dense = [plain(weight, dtype) for weight in weights[: max(len(weights) // 2, 2)]]
    out = torch.empty(1, num_rows, out_features, device=CUDA, dtype=torch.float32 if leaf else dtype)
    yield [NodeWeight(it, leaf, nodes) if leaf else CudaWeight(it, None) for it in dense]
    if not exact:
        yield [Fp8Weight(it, None) for it in weights]
        yield [lambda x, it=it: fp8_gemm.fp8_gemm(x, it, None, out=out[0]) for it in weights]  # type: ignore[misc]
        yield [lambda x, it=it: fp8_gemm.scaled_mm(x, it) for it in weights]  # type: ignore[misc]
        return

    def made(weight: Fp8Matrix | torch.Tensor) -> Product:
        return NodeWeight(weight, leaf, nodes) if leaf else ChainWeight(weight, None)

    yield [made(it) for it in weights]
    yield [exact_kernel(leaf, None)(it, out) for it in weights]
    yield [lambda x, it=it: made(plain(it, dtype))(x) for it in weights]  # type: ignore[misc]


def exact_kernel(leaf: int | None, tile: Tile | None) -> Kernel:
    """The kernel of exact numerics, of nodes where there are leaves."""

    def kernel(weight: Fp8Matrix, out: torch.Tensor) -> Product:
        if leaf:
            nodes = (Span(0, weight.shape[1] // leaf),)
            return lambda x: node_gemm(x, weight, leaf=leaf, nodes=nodes, out=out, tile=tile)
        return lambda x: chain_gemm(x, weight, None, out=out[0], tile=tile)

    return kernel


def candidates(num_rows: int, leaf: int | None, exact: bool) -> Iterator[tuple[object, Kernel]]:
    """Tiles and the kernels with them."""
    if exact:
        block_m = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
        for block_n, block_k, num_warps, num_stages in itertools.product(*EXACT[block_m]):
            if 32 <= block_n * block_k // (32 * num_warps) <= 128:  # elements of a thread
                tile = Tile(block_m, block_n, block_k, num_warps, num_stages)
                yield tile, exact_kernel(leaf, tile)
        return
    found = next(found for most, found in FAST.items() if num_rows <= most)
    for block_m, block_n, (num_warps, side), num_stages, quantises, programs in itertools.product(*found):
        most = 64 if side == 1 else 32  # sums of a thread, which there are twice
        if max(block_m, 16) * block_n * side <= most * 32 * num_warps:
            fast = fp8_gemm.Tile(block_m, block_n, num_warps, num_stages, side, quantises, programs)
            yield fast, lambda it, out, fast=fast: lambda x: fp8_gemm.fp8_gemm(x, it, None, out=out[0], tile=fast)  # type: ignore[misc]


def sweep(weights: list[Fp8Matrix], num_rows: int, leaf: int | None, exact: bool) -> list[tuple[float, str]]:
    """Times of tiles, the fastest first; those that do not fit are left out."""
    out_features, in_features = weights[0].shape
    out = torch.empty(1, num_rows, out_features, device=CUDA, dtype=torch.float32 if leaf else torch.bfloat16)
    x = torch.randn(num_rows, in_features, device=CUDA, dtype=torch.bfloat16)

    def fits(kernel: Kernel) -> bool:
        try:
            kernel(weights[0], out.clone())(x)
        except triton.runtime.errors.OutOfResources:
            return False
        return True

    tried = list(candidates(num_rows, leaf, exact))
    with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
        fitting = [it for it, fit in zip(tried, pool.map(fits, (kernel for _, kernel in tried)), strict=True) if fit]
    torch.cuda.synchronize()
    timed = [
        (time_us([kernel(it, out) for it in weights], num_rows, in_features), str(tile)) for tile, kernel in fitting
    ]
    return sorted(timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--layers", default="Qwen3-8B")
    parser.add_argument("--rows", type=int, nargs="+")
    given = parser.parse_args()
    if given.exact:
        use_chain_cublas()
    peak = measure("cuda") * 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, us in graphs")
    last = "copy and cuBLAS" if given.exact else "FP8 by cuBLAS"
    print(f"layer, product, rows | bf16 as taken, FP8 as taken, FP8 kernel, {last} (floor of FP8)")
    for name, hidden, qkv, o, inter in LAYERS:
        if name not in given.layers.split(","):
            continue
        products = {"qkv": (qkv, hidden), "o": (hidden, o), "gate_up": (2 * inter, hidden), "down": (hidden, inter)}
        for product, (out_features, in_features) in products.items():
            weights, leaf = weights_of(out_features, in_features), None
            if given.exact and product in ("o", "down"):
                leaf = o // 8 if product == "o" else leaf_columns(inter)
            floor = out_features * in_features / peak * 1e6
            for num_rows in given.rows or (SWEPT if given.sweep else ROWS):
                head = f"{name:13} {product:7} {num_rows:4} |"
                if given.sweep:
                    tiles = sweep(weights, num_rows, leaf, given.exact)[:5]
                    print(head, *(f"\n    {us:6.1f} {tile}" for us, tile in tiles), f"({floor:5.1f})", flush=True)
                else:
                    found = ways(weights, num_rows, leaf, given.exact)
                    times = [time_us(each, num_rows, in_features) for each in found]
                    print(head, *(f"{us:7.1f}" for us in times), f"({floor:5.1f})", flush=True)


if __name__ == "__main__":
    main()
