"""Time of one layer's attention in a decode step: the Triton kernel against FlashAttention-3, on one GPU.

    python -m benchmarks.decode_attention [--kv-dtype fp8_e4m3] [--json FILE] [--seconds 80] [--peak-gb-s 4270]

Keys and values are bf16, or FP8, which FA3 is not asked for; head_dim 128, on pages of random order. A CUDA graph
holds the attention of many layers, each with pages of its own, so that none finds its keys in the L2 cache. Printed is
the time of one layer with all kernels it needs, and the share that the bytes of its keys and values over the time are
of `--peak-gb-s` (copies of large tensors on an H200). First several tunings of the kernel are tried on a few batches;
the best of them then run in every batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from attention.fa3_builds import FA3Provider, load_provider
from attention.forward_batch import PagedMetadata
from attention.kernels.decode import DecodeTuning, choose, paged_decode
from attention.kv_pool import FP8
from attention.layer import AttentionLayer
from benchmarks.graph_timing import graph_us

HEAD_DIM = 128
MAX_TOKENS = 40_960  # in a row: the width of the page table
POOL_BYTES = 4 << 30  # for keys; as much for values
TARGET_BYTES = 1 << 30  # keys and values that a graph reads
MIN_LAYERS, MAX_LAYERS = 4, 128
MIXED = "mixed"
DEVICE = torch.device("cuda")

# block_n, num_warps, num_stages
SHAPES = (
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (64, 2, 3),
    (64, 8, 3),
    (32, 4, 3),
    (32, 4, 4),
    (32, 4, 5),
    (32, 2, 3),
    (32, 2, 4),
    (32, 1, 3),
    (16, 1, 4),
    (16, 2, 5),
    (128, 4, 2),
    (128, 8, 2),
    # More bytes on their way, for FP8.
    (64, 4, 5),
    (64, 8, 4),
    (32, 2, 5),
    (128, 8, 3),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch on one rank."""

    num_q_heads: int
    num_kv_heads: int
    batch_size: int
    context: int | str
    """Tokens of every row, or MIXED: 100 to 2000, evenly distributed."""
    page_size: int = 64

    @property
    def group(self) -> str:
        """Batches of one group take the same shapes of the kernel."""
        programs = self.batch_size * self.num_kv_heads
        return "few" if programs <= 64 else "some" if programs <= 256 else "wave" if programs <= 640 else "many"

    def name(self) -> str:
        pages = "" if self.page_size == 64 else f" p{self.page_size}"
        return f"{self.num_q_heads}/{self.num_kv_heads} B{self.batch_size}{pages} {self.context}"

    def lens(self) -> torch.Tensor:
        """[batch_size] int64, host."""
        if isinstance(self.context, int):
            return torch.full((self.batch_size,), self.context)
        return torch.randint(100, 2001, (self.batch_size,), generator=torch.Generator().manual_seed(0))


class Inputs:
    """Page tables of as many layers as a graph needs, over one pool."""

    def __init__(self, case: Case, pool: tuple[torch.Tensor, torch.Tensor]) -> None:
        lens, page = case.lens(), case.page_size
        self.layer = AttentionLayer(
            layer_id=0,
            tp_q_head_num=case.num_q_heads,
            tp_k_head_num=case.num_kv_heads,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
        )
        shape = (-1, page, case.num_kv_heads, HEAD_DIM)
        self.k, self.v = (tensor.view(shape) for tensor in pool)
        self.num_bytes = 2 * self.k.element_size() * HEAD_DIM * case.num_kv_heads * int(lens.sum())
        pages = -(-lens // page)
        num_pages = int(pages.sum())
        num_layers = min(max(math.ceil(TARGET_BYTES / self.num_bytes), MIN_LAYERS), MAX_LAYERS)
        num_layers = min(num_layers, (len(self.k) - 1) // num_pages)
        table = torch.full((num_layers, case.batch_size, MAX_TOKENS // page), 1 << 30, dtype=torch.int32, device=DEVICE)
        used = (torch.arange(table.shape[2]) < pages[:, None]).to(DEVICE).expand(table.shape)
        table[used] = 1 + torch.randperm(num_layers * num_pages, dtype=torch.int32, device=DEVICE)
        self.paged = [
            PagedMetadata(
                cache_seqlens=lens.to(DEVICE, torch.int32),
                cu_seqlens_q=torch.arange(case.batch_size + 1, dtype=torch.int32, device=DEVICE),
                page_table=rows,
                max_seqlen_q=1,
            )
            for rows in table
        ]
        width = (case.num_q_heads + 2 * case.num_kv_heads) * HEAD_DIM
        qkv = torch.randn(case.batch_size, width, dtype=torch.bfloat16, device=DEVICE)
        self.q = qkv[:, : case.num_q_heads * HEAD_DIM].view(-1, case.num_q_heads, HEAD_DIM)
        self.out = torch.empty(self.q.shape, dtype=torch.bfloat16, device=DEVICE)

    def kernel(self, tuning: DecodeTuning | None) -> Callable[[], None]:
        """All layers by the Triton kernel; `out` is then the last one's."""

        def run() -> None:
            for paged in self.paged:
                paged_decode(self.q, self.k, self.v, paged, self.layer, out=self.out, tuning=tuning)

        return run

    def fa3(self, provider: FA3Provider, *, num_splits: int) -> Callable[[], None]:
        """All layers by FA3."""

        def run() -> None:
            for paged in self.paged:
                provider.attend(self.q, self.k, self.v, paged, self.layer, num_splits=num_splits, out=self.out)

        return run

    def us(self, run: Callable[[], None]) -> float:
        """Microseconds of one layer."""
        return graph_us(run, len(self.paged))


class Benchmark:
    """Measurements, and how they were made."""

    def __init__(self, peak_gb_s: float, seconds: float, kv_dtype: torch.dtype) -> None:
        self._began = time.perf_counter()
        self._seconds = seconds
        self.peak_gb_s = peak_gb_s
        size = POOL_BYTES // kv_dtype.itemsize
        self._pool = (
            torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_().to(kv_dtype),
            torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_().to(kv_dtype),
        )
        self._provider = load_provider(None) if kv_dtype is torch.bfloat16 else None
        self.records: list[dict[str, object]] = []

    def in_time(self) -> bool:
        return time.perf_counter() - self._began < self._seconds

    def kernel(self, case: Case, inputs: Inputs, tunings: Iterable[DecodeTuning]) -> dict[DecodeTuning, float]:
        """Microseconds by tuning; without those that this GPU has not the registers or shared memory for."""
        times = {}
        for tuning in tunings:
            try:
                times[tuning] = inputs.us(inputs.kernel(tuning))
            except RuntimeError as error:
                print(f"{case.name()}: {label(tuning)}: {str(error).splitlines()[0][:100]}")
                continue
            self._record(case, inputs, label(tuning), times[tuning])
        return times

    def fa3(self, case: Case, inputs: Inputs) -> dict[str, float]:
        """Microseconds by what FA3 is told; none in FP8."""
        times: dict[str, float] = {}
        for name, num_splits in (("auto", 0), ("one", 1)):
            if self._provider is None:
                break
            times[name] = inputs.us(inputs.fa3(self._provider, num_splits=num_splits))
            self._record(case, inputs, f"fa3 {name}", times[name])
        return times

    def _record(self, case: Case, inputs: Inputs, name: str, us: float) -> None:
        self.records.append(
            {
                "case": case.name(),
                "run": name,
                "us": us,
                "gb_s": inputs.num_bytes / us / 1e3,
                "layers": len(inputs.paged),
            }
        )

    def inputs(self, case: Case) -> Inputs:
        return Inputs(case, self._pool)

    def error(self, inputs: Inputs) -> float | None:
        """Largest difference of the kernel, as it tunes itself, from FA3 in the last layer; None in FP8."""
        if self._provider is None:
            return None
        inputs.fa3(self._provider, num_splits=1)()
        theirs = inputs.out.float()
        inputs.out.fill_(torch.nan)
        inputs.kernel(None)()
        return float((inputs.out.float() - theirs).abs().nan_to_num(torch.inf).max())


def label(tuning: DecodeTuning) -> str:
    """Letter of the shape, number of splits, + where the join starts early."""
    shape = SHAPES.index((tuning.block_n, tuning.num_warps, tuning.num_stages))
    return f"{chr(ord('a') + shape)}{tuning.num_splits}" + "+" * tuning.early_join


def tuning_of(shape: tuple[int, int, int], num_splits: int, *, early_join: bool = True) -> DecodeTuning:
    return DecodeTuning(
        block_n=shape[0],
        num_warps=shape[1],
        num_stages=shape[2],
        num_splits=num_splits,
        early_join=early_join and num_splits > 1,
    )


def sweep(bench: Benchmark) -> dict[str, list[tuple[int, int, int]]]:
    """Tries every shape on a few batches. Prints the times and returns the best shapes of each group of batches."""
    columns = {
        Case(32, 8, 1, 400): (8, 32),
        Case(32, 8, 1, 1500): (16, 64),
        Case(32, 8, 16, 400): (2, 4),
        Case(8, 2, 64, MIXED): (2, 4),
        Case(32, 8, 16, 8192): (2, 4),
        Case(32, 8, 64, 400): (1, 2),
        Case(32, 8, 64, MIXED): (1, 2),
        Case(32, 8, 256, 400): (1,),
        Case(32, 8, 256, MIXED): (1, 2),
    }
    times: dict[tuple[Case, int], dict[DecodeTuning, float]] = {}
    for i, (case, all_splits) in enumerate(columns.items()):
        inputs = bench.inputs(case)
        print(
            f"[{i}] {case.name()}: {inputs.num_bytes / bench.peak_gb_s / 1e3:.1f} us by bytes, {len(inputs.paged)} "
            f"layers, largest difference from FA3 {bench.error(inputs)}"
        )
        for splits in all_splits:
            times[case, splits] = bench.kernel(case, inputs, [tuning_of(shape, splits) for shape in SHAPES])
    print("us, [batch]/splits".ljust(20) + "".join(f"{f'[{[*columns].index(case)}]/{n}':>8}" for case, n in times))
    for shape in SHAPES:
        cells = [measured.get(tuning_of(shape, splits)) for (_, splits), measured in times.items()]
        name = f"{label(tuning_of(shape, 0))[0]}: {shape[0]} keys {shape[1]}w {shape[2]}s"
        print(name.ljust(20) + "".join(f"{'-':>8}" if us is None else f"{us:>8.1f}" for us in cells), flush=True)
    return best_shapes(times)


def best_shapes(times: dict[tuple[Case, int], dict[DecodeTuning, float]]) -> dict[str, list[tuple[int, int, int]]]:
    """The three shapes of each group whose times are the smallest multiples of the best, over the group's batches."""
    slowdowns: dict[str, dict[tuple[int, int, int], float]] = {}
    for case in dict.fromkeys(case for case, _ in times):
        merged = [(tuning, us) for (it, _), all_us in times.items() if it == case for tuning, us in all_us.items()]
        best = min(us for _, us in merged)
        for shape in SHAPES:
            own = [us for tuning, us in merged if tuning_of(shape, tuning.num_splits) == tuning]
            slowdowns.setdefault(case.group, {}).setdefault(shape, 0.0)
            slowdowns[case.group][shape] += math.log(min(own, default=1e9) / best)
    return {group: sorted(by_shape, key=by_shape.__getitem__)[:3] for group, by_shape in slowdowns.items()}


def candidates(case: Case, shapes: Sequence[tuple[int, int, int]], itemsize: int) -> list[DecodeTuning]:
    """The shapes with as many splits as `choose` would, with twice and half as many, and with a join in its turn."""
    chosen = choose(case.batch_size, case.num_kv_heads, itemsize)
    splits = sorted({max(chosen.num_splits // 2, 1), chosen.num_splits, min(2 * chosen.num_splits, 128)})
    tunings = [tuning_of(shape, count) for shape in shapes[:2] for count in splits]
    tunings += [tuning_of(shape, chosen.num_splits) for shape in shapes[2:]]
    tunings.append(tuning_of(shapes[0], chosen.num_splits, early_join=False))
    return list(dict.fromkeys([chosen, *tunings]))


def table(bench: Benchmark, shapes: dict[str, list[tuple[int, int, int]]]) -> None:
    """Prints every batch: the kernel at its best tuning and at its own, and FA3's two."""
    contexts: tuple[int | str, ...] = (224, 400, 800, 1500, MIXED)
    heads = [(32, 8), (16, 8), (16, 4), (8, 2)]
    rows = [(*pair, batch, 64) for batch in (64, 256) for pair in heads] + [(32, 8, 64, 16)]
    rows += [(*pair, batch, 64) for batch in (128, 16, 1, 32, 8) for pair in heads]
    print("us of the best tuning, its share of the peak, the tuning, [us as the kernel tunes itself]")
    print("then FA3: its own splits/one split")
    print(" " * 16 + "".join(f"{context:<39}" for context in contexts))
    for num_q_heads, num_kv_heads, batch_size, page_size in rows:
        cells, name = [], ""
        for context in contexts:
            case = Case(num_q_heads, num_kv_heads, batch_size, context, page_size)
            name = case.name().rsplit(" ", 1)[0]
            cells.append(cell(bench, case, shapes[case.group]) if bench.in_time() else "-")
        print(name.ljust(16) + "".join(text.ljust(39) for text in cells).rstrip(), flush=True)


def cell(bench: Benchmark, case: Case, shapes: Sequence[tuple[int, int, int]]) -> str:
    """Measures one batch."""
    inputs = bench.inputs(case)
    itemsize = inputs.k.element_size()
    times = bench.kernel(case, inputs, candidates(case, shapes, itemsize))
    theirs = "/".join(f"{us:.1f}" for us in bench.fa3(case, inputs).values())
    best = min(times, key=times.__getitem__)
    chosen = times[choose(case.batch_size, case.num_kv_heads, itemsize)]
    share = 100 * inputs.num_bytes / times[best] / 1e3 / bench.peak_gb_s
    return f"{times[best]:.1f} {share:.0f}% {label(best)} [{chosen:.1f}] {theirs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where every measurement goes as well")
    parser.add_argument("--kv-dtype", choices=("bfloat16", "fp8_e4m3"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=80.0, help="batches left by then are not measured")
    parser.add_argument("--peak-gb-s", type=float, default=4270.0)
    args = parser.parse_args()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    bench = Benchmark(args.peak_gb_s, args.seconds, FP8 if args.kv_dtype == "fp8_e4m3" else torch.bfloat16)
    print(f"{machine}, keys and values {args.kv_dtype}, head_dim {HEAD_DIM}, one layer in a CUDA graph")
    table(bench, sweep(bench))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "measurements": bench.records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
