"""Time of a decode step's matrix products on one GPU: the kernel for a few rows against cuBLAS.

    python -m benchmarks.skinny_gemm

bf16. A CUDA graph holds the same product with many weights, more than the L2 cache holds. The floor is the weight's
bytes over the speed of copies of large tensors (benchmarks/bandwidth.py).
"""

from __future__ import annotations

import torch
import triton

from benchmarks.bandwidth import measure
from benchmarks.graph_timing import graph_us
from parallel.numerics.kernels.skinny_gemm import is_faster, skinny_gemm

TARGET_BYTES = 450 << 20  # weights that a graph reads
# One rank's part of a layer: name, hidden, width of qkv, of o's input, of one half of gate_up.
LAYERS = (
    ("Qwen3-0.6B", 1024, 4096, 2048, 3072),
    ("Qwen3-8B", 4096, 6144, 4096, 12288),
    ("Qwen3-8B / 2", 4096, 3072, 2048, 6144),
    ("Qwen3-8B / 4", 4096, 1536, 1024, 3072),
    ("Qwen3-32B / 4", 5120, 2560, 2048, 6400),
)


def product_us(num_rows: int, out_features: int, in_features: int) -> tuple[float, float]:
    """(kernel, cuBLAS), microseconds."""
    copies = max(TARGET_BYTES // (2 * out_features * in_features), 2)
    weights = torch.randn(copies, out_features, in_features, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(num_rows, out_features, device="cuda", dtype=torch.bfloat16)

    def kernel() -> None:
        for weight in weights:
            skinny_gemm(x, weight, None, out=out)

    def cublas() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    return graph_us(kernel, copies), graph_us(cublas, copies)


def main() -> None:
    peak = measure("cuda") * 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, us in graphs")
    print("layer, rows | qkv, o, gate_up, down: kernel / cuBLAS (floor), * cuBLAS is taken | sum as taken, of cuBLAS")
    for name, hidden, qkv, o, inter in LAYERS:
        for num_rows in (1, 2, 4, 8, 16):
            cells, taken, all_cublas = [], 0.0, 0.0
            for out_features, in_features in ((qkv, hidden), (hidden, o), (2 * inter, hidden), (hidden, inter)):
                kernel, cublas = product_us(num_rows, out_features, in_features)
                used = is_faster(num_rows, out_features, in_features)
                floor = 2 * out_features * in_features / peak * 1e6
                cells.append(f"{kernel:5.1f} / {cublas:5.1f} ({floor:4.1f}){' ' if used else '*'}")
                taken += kernel if used else cublas
                all_cublas += cublas
            print(f"{name:13} {num_rows:2} | {'  '.join(cells)} | {taken:6.1f} / {all_cublas:6.1f}", flush=True)


if __name__ == "__main__":
    main()
