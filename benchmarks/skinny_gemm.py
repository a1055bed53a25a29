"""Time of a decode step's matrix products on one GPU: the Triton kernel against cuBLAS, alone and in whole layers.

    python -m benchmarks.skinny_gemm [--json FILE] [--seconds 80] [--peak-gb-s 4270]

bf16. A CUDA graph holds the same product with many weights, more than the L2 cache holds, or a few whole layers:
products with small kernels between them that stand for norm, rotation, attention and activation. `early` is a start
while the kernel before still runs (programmatic dependent launch). The floor is the weight's bytes over `--peak-gb-s`
(copies of large tensors on an H200). Every answer is checked against an fp32 product.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
import triton.language as tl

from parallel.kernels.skinny_gemm import GemmTuning, skinny_gemm

DEVICE = torch.device("cuda")
POOL_BYTES = 2600 << 20
TARGET_BYTES = 450 << 20  # of weights that a graph reads
MAX_COPIES = 128
PREFETCH = 512
MAX_ERROR = 2.0**-7  # of a value up to 1; of larger ones this times the value

# block_n, block_k, num_warps, num_stages
TILES = (
    (16, 256, 2, 4),
    (16, 256, 4, 5),
    (32, 64, 2, 6),
    (32, 128, 4, 5),
    (32, 256, 4, 3),
    (64, 64, 4, 6),
    (64, 128, 4, 4),
    (128, 64, 4, 5),
)
# Of one row, without tensor cores.
VECTORS = ((8, 512, 4, 4), (4, 1024, 4, 1), (8, 512, 4, 1), (16, 512, 4, 1))


@dataclass(frozen=True)
class Product:
    """One weight of one rank."""

    name: str
    out_features: int
    in_features: int
    gated: bool = False
    """With the activation: the product of silu(first half) and second half comes out."""
    fp32: bool = False

    @property
    def num_columns(self) -> int:
        return self.out_features // 2 if self.gated else self.out_features

    @property
    def num_bytes(self) -> int:
        return 2 * self.out_features * self.in_features


@dataclass(frozen=True)
class Layer:
    """The widths of one decoder layer on one rank."""

    name: str
    hidden: int
    q: int
    kv: int
    inter: int

    @property
    def products(self) -> tuple[Product, Product, Product, Product]:
        """qkv, o, gate_up (not gated), down."""
        return (
            Product(f"{self.name} qkv", self.q + 2 * self.kv, self.hidden),
            Product(f"{self.name} o", self.hidden, self.q),
            Product(f"{self.name} gate_up", 2 * self.inter, self.hidden),
            Product(f"{self.name} down", self.hidden, self.inter),
        )


LAYERS = (
    Layer("8b", 4096, 4096, 1024, 12288),
    Layer("0.6b", 1024, 2048, 1024, 3072),
    Layer("8b/4", 4096, 1024, 256, 3072),
    Layer("8b/2", 4096, 2048, 512, 6144),
    Layer("32b/4", 5120, 2048, 256, 6400),
)
HEADS = (Product("0.6b head", 151936, 1024, fp32=True), Product("8b head", 151936, 4096, fp32=True))


@triton.jit
def _norm_kernel(out_ptr, x_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Stands for norm, rotation and attention: reads a row, then writes one of the same size."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / SIZE + 1e-6)
    tl.store(out_ptr + row * SIZE + columns, x.to(out_ptr.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def _silu_kernel(out_ptr, x_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """silu(gate) * up."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * size + columns, mask=columns < size, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + columns, mask=columns < size, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=columns < size)


def norm(x: torch.Tensor, width: int, early: bool) -> torch.Tensor:
    """The normed first `width` columns."""
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_kernel[(len(x),)](
        out, x, x.stride(0), SIZE=width, BLOCK=block, EARLY=early, num_warps=min(block // 512, 16), launch_pdl=early
    )
    return out


def silu_and_mul(x: torch.Tensor, early: bool) -> torch.Tensor:
    size = x.shape[1] // 2
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    _silu_kernel[(len(x), triton.cdiv(size, 1024))](out, x, size, BLOCK=1024, EARLY=early, launch_pdl=early)
    return out


@dataclass(frozen=True)
class Result:
    """One measurement of the kernel."""

    us: float
    tuning: GemmTuning
    early: bool

    def label(self) -> str:
        t = self.tuning
        kind = "" if t.tensor_cores else "v"
        tile = f"{kind}{t.block_n}.{t.block_k}.{t.num_warps}.{t.num_stages}/{t.num_splits}"
        return tile + ("+" if self.early else "") + ("p" if t.prefetch else "")


def tunings(product: Product, num_rows: int) -> Iterator[tuple[GemmTuning, bool]]:
    """What the sweep tries: every tile, with up to three numbers of splits, early or not."""
    shapes = [(tile, True) for tile in TILES if tile[0] >= num_rows or num_rows <= 16]
    shapes += [(tile, False) for tile in VECTORS if num_rows == 1]
    for (block_n, block_k, num_warps, num_stages), tensor_cores in shapes:
        if product.gated and block_n > 64:
            continue
        num_blocks = triton.cdiv(product.num_columns, block_n)
        most = 1 << (max(product.in_features // (2 * block_k), 1).bit_length() - 1)
        splits = {min(2 ** max(round(math.log2(target / num_blocks)), 0), 16, most) for target in (160, 400, 1000)}
        for num_splits in sorted(splits):
            tuning = GemmTuning(
                block_n=block_n,
                block_k=block_k,
                num_warps=num_warps,
                num_stages=num_stages,
                num_splits=num_splits,
                tensor_cores=tensor_cores,
            )
            yield tuning, False
            yield replace(tuning, prefetch=PREFETCH), True
            if num_rows == 1:
                yield tuning, True


def graph_us(run: Callable[[], object], count: int) -> float:
    """Microseconds over `count`: the median of 3 measurements of two replays of a captured graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the GPU is busy while the rest is queued
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / 2 / count)
    return statistics.median(times)


class Benchmark:
    """What has been measured, and how."""

    def __init__(self, peak_gb_s: float, seconds: float) -> None:
        self._began = time.perf_counter()
        self._seconds = seconds
        self._peak_gb_s = peak_gb_s
        self._pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device=DEVICE).normal_(std=1 / 64)
        self._arrived = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)
        self.best: dict[tuple[Product, int], list[Result]] = {}
        """Every measurement of a product with so many rows, the fastest first."""
        self.records: list[dict[str, object]] = []
        self.num_wrong = 0

    def in_time(self) -> bool:
        return time.perf_counter() - self._began < self._seconds

    def floor_us(self, product: Product) -> float:
        return product.num_bytes / self._peak_gb_s / 1e3

    def weights(self, product: Product) -> list[torch.Tensor]:
        """As many weights as a graph needs, one behind the other in the pool."""
        size = product.out_features * product.in_features
        copies = min(max(-(-TARGET_BYTES // product.num_bytes), 2), MAX_COPIES, len(self._pool) // size)
        return list(self._pool[: copies * size].view(copies, product.out_features, product.in_features))

    def gemm(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tuning: GemmTuning, early: bool, gated: bool
    ) -> torch.Tensor:
        arrived = self._arrived if tuning.num_splits > 1 else None
        return skinny_gemm(x, weight, None, out=out, tuning=tuning, arrived=arrived, early=early, gated=gated)

    def compile(self, cases: Iterable[tuple[Product, int, GemmTuning, bool]]) -> None:
        """Compiles what `cases` need, many kernels at a time, by launching each once. Not on the clock."""
        began = time.perf_counter()
        x = torch.ones(32, 1 << 15, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty(32 * 160_000, dtype=torch.float32, device=DEVICE)
        unlike = {}
        for product, num_rows, tuning, early in cases:
            even = product.in_features % tuning.block_k == 0
            key = ((num_rows + 15) // 16, tuning, early, product.gated, product.fp32, even)
            unlike[key] = (product, num_rows, tuning, early)

        def launch(case: tuple[Product, int, GemmTuning, bool]) -> None:
            product, num_rows, tuning, early = case
            y = out.view(torch.float32 if product.fp32 else torch.bfloat16)
            y = y[: num_rows * product.num_columns].view(num_rows, -1)
            rows = x[:num_rows, : product.in_features]
            with contextlib.suppress(triton.runtime.errors.OutOfResources):
                self.gemm(rows, self.weights(product)[0], y, tuning, early, product.gated)

        first, *others = unlike.values()
        launch(first)  # alone: it sets up the driver
        with ThreadPoolExecutor() as pool:
            list(pool.map(launch, others))
        torch.cuda.synchronize()
        self._arrived.zero_()
        self._began += time.perf_counter() - began

    def measure(self, product: Product, num_rows: int, tries: Sequence[tuple[GemmTuning, bool]]) -> float:
        """Microseconds of cuBLAS; the kernel's go to `best`, without what the GPU has not the shared memory for."""
        weights = self.weights(product)
        x = torch.randn(num_rows, product.in_features, device=DEVICE).bfloat16()
        reference = x.float() @ weights[-1].float().T
        if product.gated:
            gate, up = reference.chunk(2, 1)
            reference = torch.nn.functional.silu(gate) * up
        dtype = torch.float32 if product.fp32 else torch.bfloat16
        out = torch.empty(num_rows, product.num_columns, dtype=dtype, device=DEVICE)
        results = self.best.setdefault((product, num_rows), [])
        for tuning, early in tries:

            def run(tuning: GemmTuning = tuning, early: bool = early) -> None:
                for weight in weights:
                    self.gemm(x, weight, out, tuning, early, product.gated)

            out.fill_(torch.nan)
            try:
                us = graph_us(run, len(weights))
            except triton.runtime.errors.OutOfResources:
                continue
            result = Result(us, tuning, early)
            error = ((out.float() - reference).abs() / reference.abs().clamp(min=1)).nan_to_num(torch.inf).max()
            if not float(error) < MAX_ERROR or int(self._arrived.abs().max()) != 0:
                self.num_wrong += 1
                print(f"WRONG: {product.name} {num_rows} rows {result.label()}: error {float(error):.4f}")
                self._arrived.zero_()
                continue
            results.append(result)
            self._record(product, num_rows, result.label(), us)
        results.sort(key=lambda result: result.us)

        def blas() -> None:
            for weight in weights:
                if product.fp32:
                    torch.mm(x, weight.t(), out_dtype=torch.float32)
                elif product.gated:
                    silu_and_mul(torch.mm(x, weight.t()), early=False)
                else:
                    torch.mm(x, weight.t())

        us = graph_us(blas, len(weights))
        self._record(product, num_rows, "cublas", us)
        return us

    def _record(self, product: Product, num_rows: int, name: str, us: float) -> None:
        row = {"product": product.name, "n": product.out_features, "k": product.in_features, "gated": product.gated}
        self.records.append({**row, "rows": num_rows, "run": name, "us": round(us, 2)})

    def chain_us(self, layer: Layer, num_rows: int, *, blas: bool, early: str, gated: bool, prefetch: bool) -> float:
        """Microseconds of a layer; `early`: no, products or all."""
        products = list(layer.products)
        if gated:
            products[2] = replace(products[2], gated=True)
        num_bytes = sum(product.num_bytes for product in products)
        num_layers = min(max(-(-TARGET_BYTES // num_bytes), 3), 32)
        weights, offset = [], 0
        for product in products * num_layers:
            size = product.num_bytes // 2
            weights.append(self._pool[offset : offset + size].view(product.out_features, product.in_features))
            offset += size
        chosen = []
        for product in products:
            fits = [result.tuning for result in self.best[product, num_rows] if result.early == (early != "no")]
            if prefetch:
                fits = [tuning for tuning in fits if tuning.prefetch]
            chosen.append(fits[0] if prefetch else replace(fits[0], prefetch=0))

        def multiply(x: torch.Tensor, i: int, early: bool) -> torch.Tensor:
            product, weight = products[i % 4], weights[i]
            if blas:
                return torch.mm(x, weight.t())
            out = torch.empty(num_rows, product.num_columns, dtype=x.dtype, device=DEVICE)
            return self.gemm(x, weight, out, chosen[i % 4], early, product.gated)

        first = torch.randn(num_rows, layer.hidden, device=DEVICE).bfloat16()

        def run(gemm_early: bool, small_early: bool) -> torch.Tensor:
            y = first
            for i in range(0, len(weights), 4):
                qkv = multiply(norm(y, layer.hidden, small_early), i, gemm_early)
                y = multiply(norm(norm(qkv, layer.q, small_early), layer.q, small_early), i + 1, gemm_early)
                y = multiply(norm(y, layer.hidden, small_early), i + 2, gemm_early)
                y = multiply(y if gated else silu_and_mul(y, small_early), i + 3, gemm_early)
            return y

        outputs: list[torch.Tensor] = []
        us = graph_us(lambda: outputs.append(run(early != "no", early == "all")), num_layers)
        if not blas and not torch.equal(outputs[-1], run(False, False)):
            self.num_wrong += 1
            print(f"WRONG: layers {layer.name} {num_rows} rows, early {early}: not the bits of one kernel at a time")
        return us


def sweep(bench: Benchmark, products: Sequence[Product], num_rows: int, *, narrow_to: int | None = None) -> None:
    """Measures products and prints a line of each; `narrow_to`: only what was best with so many rows, not printed."""
    if not bench.in_time():
        return
    tries = {}
    for product in products:
        if narrow_to is None:
            tries[product] = list(tunings(product, num_rows))
        else:
            of_tiles = [result for result in bench.best.get((product, narrow_to), []) if result.tuning.tensor_cores]
            plain = [result for result in of_tiles if not result.early][:2]
            tries[product] = [(r.tuning, r.early) for r in plain + [r for r in of_tiles if r.early][:3]]
    bench.compile((product, num_rows, *one) for product in products for one in tries[product])
    for product in products:
        if not bench.in_time():
            print("out of time")
            return
        blas = bench.measure(product, num_rows, tries[product])
        if narrow_to is not None:
            continue
        results = bench.best[product, num_rows]
        plain = [result for result in results if not result.early][:2]
        early = [result for result in results if result.early][:3]
        size = f"{product.out_features}x{product.in_features}" + (" act" if product.gated else "")
        cells = "  ".join(f"{r.us:.1f} {r.label()}" for r in plain)
        cells += "  |  " + "  ".join(f"{r.us:.1f} {r.label()}" for r in early)
        print(
            f"{product.name:13} {size:16} {num_rows:2}  {bench.floor_us(product):5.1f} {blas:6.1f} |  {cells}",
            flush=True,
        )


def chains(bench: Benchmark, layers: Sequence[Layer], num_rows: int) -> None:
    """Prints a line of each layer."""
    for layer in layers:
        gated = replace(layer.products[2], gated=True)
        if not bench.in_time() or not all(bench.best.get((one, num_rows)) for one in (*layer.products, gated)):
            return
        runs = {
            "cublas": (True, "no", False, False),
            "plain": (False, "no", False, False),
            "plain act": (False, "no", True, False),
            "products early": (False, "products", False, True),
            "all early": (False, "all", False, False),
            "all early prefetch": (False, "all", False, True),
            "all early prefetch act": (False, "all", True, True),
        }
        floor = sum(bench.floor_us(product) for product in layer.products)
        line = f"layer {layer.name:6} {num_rows:2} rows, floor {floor:.1f}:"
        for name, (blas, early, gated, prefetch) in runs.items():
            us = bench.chain_us(layer, num_rows, blas=blas, early=early, gated=gated, prefetch=prefetch)
            bench.records.append({"layer": layer.name, "rows": num_rows, "run": name, "us": round(us, 2)})
            line += f" {name} {us:.1f},"
        print(line.rstrip(","), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where every measurement goes as well")
    parser.add_argument("--seconds", type=float, default=80.0, help="what is left by then is not measured")
    parser.add_argument("--peak-gb-s", type=float, default=4270.0)
    args = parser.parse_args()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    bench = Benchmark(args.peak_gb_s, args.seconds)
    print(f"{machine}, bf16, us in CUDA graphs")
    print("product, size, rows, floor, cuBLAS | the best | the best that start early (+; p: prefetch), as")
    print("[v: no tensor cores]block_n.block_k.num_warps.num_stages/num_splits")
    first, rest = LAYERS[:2], LAYERS[2:]

    def of(layers: Sequence[Layer]) -> list[Product]:
        return [one for layer in layers for one in (*layer.products, replace(layer.products[2], gated=True))]

    for num_rows in (1, 16):
        sweep(bench, of(first), num_rows)
        chains(bench, first, num_rows)
    sweep(bench, HEADS, 1)
    for num_rows in (1, 16):
        sweep(bench, of(rest), num_rows)
        chains(bench, rest, num_rows)
    for num_rows in (32, 4, 2, 8):
        sweep(bench, of(first), num_rows, narrow_to=None if num_rows == 32 else 16)
        chains(bench, first, num_rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "measurements": bench.records}, indent=1) + "\n")
    print(f"{bench.num_wrong} wrong")


if __name__ == "__main__":
    main()
