"""Time of one layer's attention by every backend that can serve it, on the same steps; what `auto` takes is marked.

    python -m benchmarks.attention [--device cuda] [--kv-dtype auto,fp8_e4m3] [--only decode,extend,latent]
                                   [--heads 32/8,8/2] [--exact 512,256] [--seconds 200] [--json FILE] [--times]

Decodes are 1 to 256 rows of 1k to 32k tokens; extends one row of 512 to 8k new tokens behind 0 to 8k cached ones. Keys
and values are on pages of random order. On a GPU a CUDA graph holds the attention of several layers, each with a pool
of its own, so that no layer finds its keys in the L2 cache; on a CPU, where sizes are divided by 32, the layers run one
after the other. Next to the microseconds of a layer: of decodes the GB/s of keys and values read, and the share that
this is of `--peak-gb-s`; of extends the TFLOP/s, as if all keys and values were there. `auto / fastest` says how far
`auto` is behind the fastest: 1.00 where it is the fastest. Of several types of keys and values each step is measured in
all of them before the next.

`latent` are both kinds of steps of latent attention (MLA), with the heads of DeepSeek-V2-Lite and of DeepSeek-V2. They
include what the heads do between latents and keys and values of their own.

`--exact` adds the Triton backend with exact numerics, whose keys are cut into spans of so many positions, and how many
times as long it takes as the fastest of all backends without.

`--times` writes what was measured in 16 bits into configs/attention_times.csv, by which `auto` chooses.

Where FlashInfer is installed, its own wrappers are timed as its benchmark does, planned for the very step and without
this engine's backend, but for latents: paged, and of a prompt in 16 bits without a cached prefix also ragged, which
reads keys and values that lie side by side. Both stand beside the backend's time over theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from attention.backend import IMPLEMENTATIONS, AttentionBackend
from attention.flashinfer_backend import FlashInferBackend
from attention.flashinfer_plans import PlanInputs
from attention.forward_batch import ForwardBatch, ForwardMode, PagedMetadata
from attention.kv_pool import FP8, TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.registry import needs_of
from attention.step_shape import StepShape
from attention.triton_backend import TritonBackend
from benchmarks.graph_timing import graph_us
from benchmarks.report import Report, circumstances, describe_circumstances, table
from configs.attention import BACKENDS, choose_backend, installed_packages
from configs.attention_times import LATENT, StepTimes, write_times
from configs.errors import ConfigError

HEADS = ((8, 8), (32, 8), (64, 8))  # query heads, KV heads
HEAD_DIM, PAGE_SIZE = 128, 64
LATENT_HEADS = (16, 64, 128)
LATENT_DIM, NOPE_DIM, ROPE_DIM, V_DIM = 512, 128, 64, 128
BATCHES, CONTEXTS = (1, 16, 64, 256), (1024, 4096, 8192, 32_768)
NEW, PREFIXES = (512, 1024, 2048, 8192), (0, 1024, 8192)
MOST_BYTES = 24 << 30  # for all layers' keys and values; larger steps are left out
TARGET_BYTES = 1 << 30  # bytes that a graph reads
MAX_LAYERS = 32
PEAK_GB_S = 4270.0  # copies of large tensors on an H200
_SMALLER_ON_CPU = 32


@dataclass(frozen=True)
class Step:
    """Rows that are alike."""

    num_q_heads: int
    num_kv_heads: int
    batch_size: int
    new: int
    """Input tokens of each row."""
    prefix: int
    """Tokens of each row that are in the cache."""
    is_latent: bool = False
    kv_dtype: str = "auto"
    """See `kv_cache.dtype`."""

    @property
    def name(self) -> str:
        """Heads, rows and tokens."""
        rows = f"{self.batch_size} x {self.prefix + 1:,}" if self.new == 1 else f"{self.new:,} after {self.prefix:,}"
        kv_dtype = "" if self.kv_dtype == "auto" else f"  {self.kv_dtype}"
        return f"{self.num_q_heads}/{'latent' if self.is_latent else self.num_kv_heads}  {rows}{kv_dtype}"

    @property
    def is_decode(self) -> bool:
        return self.new == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a layer reads, an element of one byte in FP8 and else two."""
        elements = LATENT_DIM + ROPE_DIM if self.is_latent else 2 * self.num_kv_heads * HEAD_DIM
        return (2 if self.kv_dtype == "auto" else 1) * self.batch_size * (self.prefix + self.new) * elements

    @property
    def flops(self) -> int:
        """Operations of two products for each pair of a query and a key that it sees."""
        pairs = self.new * self.prefix + self.new * (self.new + 1) // 2
        return 2 * self.batch_size * pairs * self.num_q_heads * sum(self.widths)

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a key and of a value of a query head."""
        return (NOPE_DIM + ROPE_DIM, V_DIM) if self.is_latent else (HEAD_DIM, HEAD_DIM)

    def layer(self, layer_id: int) -> AttentionLayer:
        shape = {"layer_id": layer_id, "tp_q_head_num": self.num_q_heads, "tp_k_head_num": self.num_kv_heads}
        scale = self.widths[0] ** -0.5
        if not self.is_latent:
            return AttentionLayer(**shape, head_dim=HEAD_DIM, scale=scale)
        dims = {"head_dim": LATENT_DIM + ROPE_DIM, "latent_dim": LATENT_DIM, "nope_dim": NOPE_DIM, "v_dim": V_DIM}
        return LatentLayer(**shape, **dims, scale=scale)


def steps(
    only: set[str], divisor: int, kv_dtypes: Sequence[str] = ("auto",), of_heads: Sequence[tuple[int, int]] = HEADS
) -> Iterator[Step]:
    """Steps that fit, decodes first; latent layers, which are of one type, last."""
    for *heads, is_latent in [(*heads, False) for heads in of_heads] + [(heads, 1, True) for heads in LATENT_HEADS]:
        found = [Step(*heads, batch, 1, context // divisor - 1, is_latent) for batch in BATCHES for context in CONTEXTS]
        found += [Step(*heads, 1, new // divisor, prefix // divisor, is_latent) for new in NEW for prefix in PREFIXES]
        for step in found:
            part = "latent" if is_latent else "decode" if step.is_decode else "extend"
            if part in only and step.kv_bytes <= MOST_BYTES:
                yield from (replace(step, kv_dtype=it) for it in (("auto",) if is_latent else kv_dtypes))


class Inputs:
    """Pool, batch and queries of a step, for as many layers as keep their keys out of the L2 cache."""

    def __init__(self, step: Step, device: torch.device, dtype: torch.dtype) -> None:
        self.step = step
        num_layers = min(max(TARGET_BYTES // step.kv_bytes, 1), MAX_LAYERS) if device.type == "cuda" else 2
        self.layers = [step.layer(i) for i in range(num_layers)]
        seq_len = step.prefix + step.new
        pages_per_row = -(-seq_len // PAGE_SIZE)
        num_pages = step.batch_size * pages_per_row
        self.pool = TokenToKVPool(
            self.layers,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            dtype=dtype if step.kv_dtype == "auto" else FP8,
            compute_dtype=dtype,
            device=device,
        )
        for layer in self.layers:
            for pages in self.pool.pages(layer.layer_id):
                pages.copy_(torch.empty_like(pages, dtype=dtype).normal_())
        page_table = (1 + torch.randperm(num_pages, dtype=torch.int32)).view(step.batch_size, -1).to(device)
        num_tokens = step.batch_size * step.new
        self.q = torch.randn(num_tokens, step.num_q_heads * step.widths[0], dtype=dtype, device=device)
        shape = (step.num_q_heads, NOPE_DIM + V_DIM, LATENT_DIM)
        self.heads = {
            layer.layer_id: LatentHeads(layer, torch.randn(shape, dtype=dtype, device=device) / LATENT_DIM**0.5)
            for layer in self.layers
            if isinstance(layer, LatentLayer)
        }
        lens = np.full(step.batch_size, step.new, np.int64)
        prefixes = np.full(step.batch_size, step.prefix, np.int64)
        bounds = step.new * np.arange(step.batch_size + 1, dtype=np.int64)
        nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.v = torch.randn(num_tokens, step.num_kv_heads * step.widths[1], dtype=dtype, device=device)
        at = torch.arange(step.prefix, seq_len, device=device)
        slots = page_table.long()[:, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        self.batch = ForwardBatch(
            mode=ForwardMode.of(lens),
            prefix_lens=prefixes,
            extend_lens=lens,
            seq_lens=prefixes + lens,
            cu_seqlens_q=bounds,
            input_ids=nothing,
            positions=nothing,
            out_cache_loc=slots.flatten(),
            sample_indices=nothing[: step.batch_size],
            paged=PagedMetadata(
                cache_seqlens=torch.full((step.batch_size,), seq_len, dtype=torch.int32, device=device),
                cu_seqlens_q=torch.from_numpy(bounds).to(device, torch.int32),
                page_table=page_table,
                max_seqlen_q=step.new,
            ),
        )

    def us(self, backend: AttentionBackend) -> float:
        """Microseconds of one layer, of decodes as a captured step has them."""
        if self.step.is_decode and self.q.is_cuda:
            backend.prepare_capture(self.batch, StepShape(*[self.step.batch_size] * 3))
        else:
            backend.init_forward_metadata(self.batch)

        def run() -> None:
            for layer in self.layers:
                if isinstance(layer, LatentLayer):
                    q = self.q.view(-1, layer.tp_q_head_num, layer.qk_dim)
                    backend.attend_latent(q, layer, self.heads[layer.layer_id])
                elif isinstance(backend, FlashInferBackend) and backend.is_long_prompt(layer):
                    backend.attend_to_prompt(self.q, self.v, layer)
                else:
                    backend.attend(self.q, layer)

        if self.q.is_cuda and backend.captures_cuda_graphs:
            return graph_us(run, len(self.layers))
        return _eager_us(run, len(self.layers), on_gpu=self.q.is_cuda)

    def exact_us(self, span: int) -> float:
        """Microseconds of one layer by the Triton backend with exact numerics over spans of that length."""
        from attention.kernels import exact

        with unittest.mock.patch.object(exact, "SPAN", span):
            return self.us(TritonBackend(self.layers, self.pool, exact=True))

    def flashinfer_us(self) -> dict[str, float]:
        """Microseconds of one layer by FlashInfer's own wrappers."""
        import flashinfer  # optional

        step, batch = self.step, self.batch
        inputs = PlanInputs.of(batch.prefix_lens, batch.extend_lens, PAGE_SIZE)
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=self.q.device)
        heads = (step.num_q_heads, step.num_kv_heads, HEAD_DIM)
        types = {"q_data_type": self.q.dtype, "kv_data_type": self.pool.dtype}
        indices = batch.paged.page_table.flatten()  # rows are alike, and every entry is used
        pages, q = (inputs.kv_indptr, indices, inputs.last_page_len), self.q.view(-1, step.num_q_heads, HEAD_DIM)
        out = torch.empty_like(q)
        if step.is_decode:
            tensor_cores = step.num_q_heads >= 4 * step.num_kv_heads
            paged = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=tensor_cores)
            paged.plan(*pages, *heads, PAGE_SIZE, **types)
        else:
            paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
            paged.plan(inputs.qo_indptr, *pages, *heads, PAGE_SIZE, causal=True, **types)
        kv = [self.pool.pages(layer.layer_id) for layer in self.layers]
        times = {"paged": graph_us(lambda: [paged.run(q, it, out=out) for it in kv], len(kv))}
        if step.new > 1 and step.prefix == 0 and step.kv_dtype == "auto":
            ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
            ragged.plan(inputs.qo_indptr, inputs.qo_indptr, *heads, causal=True, **types)
            flat = [[x.flatten(0, 1)[: len(q)] for x in pages] for pages in kv]
            times["ragged"] = graph_us(lambda: [ragged.run(q, k, v, out=out) for k, v in flat], len(flat))
        return times


def _eager_us(run: Callable[[], None], count: int, *, on_gpu: bool) -> float:
    """Microseconds over `count`, the launches included: the median of 3."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / count)
    return statistics.median(times[1:])


def measure(
    step: Step, device: torch.device, dtype: torch.dtype, spans: Sequence[int] = ()
) -> tuple[dict[str, float], str, dict[str, float]]:
    """Microseconds of a layer by backend, the backend that `auto` takes, and microseconds by FlashInfer's wrappers.

    With `spans`, which latents have not, also of exact numerics with each, as `exact 512`.
    """
    inputs = Inputs(step, device, dtype)
    needs = needs_of(inputs.pool)
    packages = installed_packages()
    able = [name for name, it in BACKENDS.items() if it.refusal(needs) is None and it.package in (None, *packages)]
    if device.type == "cuda":
        able.remove("torch_native")  # the reference copies all keys and is no contender
    times = {}
    for name in able:
        with contextlib.suppress(ConfigError):  # some builds of it cannot
            times[name] = inputs.us(IMPLEMENTATIONS[name](inputs.layers, inputs.pool))
    times |= {f"exact {span}": inputs.exact_us(span) for span in spans if not step.is_latent}
    theirs = inputs.flashinfer_us() if "flashinfer" in able and not step.is_latent else {}
    return times, choose_backend("decode" if step.is_decode else "prefill", needs, packages)[0], theirs


def step_times(step: Step, capability: tuple[int, int], us: dict[str, float], run: str) -> StepTimes:
    """The line of configs/attention_times.csv for a step."""
    of_backends = {name: it for name, it in us.items() if name in BACKENDS}
    kv_heads = LATENT if step.is_latent else str(step.num_kv_heads)
    sizes = (step.num_q_heads, step.batch_size, step.new, step.prefix)
    return StepTimes(capability, kv_heads, *sizes, run, of_backends)


def row_of(
    step: Step,
    times: dict[str, float],
    auto: str,
    theirs: dict[str, float],
    peak_gb_s: float = PEAK_GB_S,
    spans: Sequence[int] = (),
) -> list[str]:
    """The cells of one step's row."""

    def rate(us: float) -> str:
        if not step.is_decode:
            return f"{step.flops / us / 1e6:,.0f} TFLOP/s"
        gb_s = step.kv_bytes / us / 1e3
        return f"{gb_s:,.0f} GB/s, {100 * gb_s / peak_gb_s:.0f} %"

    cells = [
        "-" if name not in times else f"{times[name]:,.1f}{'*' * (name == auto)} ({rate(times[name])})"
        for name in BACKENDS
    ]
    own = [f"{name} {us:,.1f} ({times['flashinfer'] / us:.2f})" for name, us in theirs.items()]
    fastest = min(us for name, us in times.items() if name in BACKENDS)
    exact = [times.get(f"exact {span}") for span in spans]
    cells += ["-" if us is None else f"{us:,.1f} ({us / fastest:.2f})" for us in exact]
    return [step.name, *cells, f"{times[auto] / fastest:.2f}", "; ".join(own) or "-"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kv-dtype", default="auto", help="auto, fp8_e4m3 or both, with a comma between")
    parser.add_argument("--only", default="decode,extend,latent", help="parts, with commas between")
    parser.add_argument("--heads", help="query heads/KV heads, with commas between; without: 8/8,32/8,64/8")
    parser.add_argument("--exact", help="spans of exact numerics, with commas between")
    parser.add_argument("--peak-gb-s", type=float, default=PEAK_GB_S, help="what the device's memory can do")
    parser.add_argument("--seconds", type=float, default=200.0, help="steps left by then are not measured")
    parser.add_argument("--commit", help="of this code, where git is not there to tell")
    parser.add_argument("--json", type=Path, help="where every measurement goes as well")
    parser.add_argument("--times", action="store_true", help="let `auto` choose by what is measured in 16 bits")
    args = parser.parse_args()
    device, on_gpu = torch.device(args.device), args.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    about = circumstances(args.commit)
    report = Report(args.json, benchmark="attention", dtype=str(dtype), **about)
    print(f"# {describe_circumstances(about)}; {dtype}, head_dim {HEAD_DIM}, pages of {PAGE_SIZE} tokens")
    began, rows, measured, timed = time.perf_counter(), [], [], []
    run = f"{about['date']} {about['commit']} {torch.cuda.get_device_name()}" if on_gpu else ""
    spans = [int(span) for span in args.exact.split(",")] if args.exact else []
    heads = [(int(q), int(kv)) for q, kv in (it.split("/") for it in args.heads.split(","))] if args.heads else HEADS
    for step in steps(set(args.only.split(",")), 1 if on_gpu else _SMALLER_ON_CPU, args.kv_dtype.split(","), heads):
        if time.perf_counter() - began > args.seconds:
            print(f"# not measured after {args.seconds:g} s: {step.name} and what follows")
            break
        times, auto, theirs = measure(step, device, dtype, spans)
        rows.append(row_of(step, times, auto, theirs, args.peak_gb_s, spans))
        measured.append({"step": step.name, "us": times, "auto": auto, "flashinfer alone": theirs})
        report.add(measured=measured)
        if on_gpu and step.kv_dtype == "auto":
            timed.append(step_times(step, torch.cuda.get_device_capability(), times, run))
    if args.times:
        write_times(timed)
    header = ["heads  rows x tokens, or new after cached", *BACKENDS, *(f"exact {it} (/ fastest)" for it in spans)]
    header += ["auto / fastest", "FlashInfer alone (ours / it)"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
