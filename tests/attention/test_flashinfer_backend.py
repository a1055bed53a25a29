"""The FlashInfer backend: its plans and wiring on the CPU over an emulation of the wrappers, its numbers on a GPU.

A GPU case passes when its largest error against fp32 is at most twice that of the same attention by torch in the same
dtype. Kernels are compiled when a case first needs them, which takes minutes: cases are grouped so that the first ones
need the fewest.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention import flashinfer_backend
from attention.backend import AttentionBackend
from attention.flashinfer_backend import FlashInferBackend
from attention.flashinfer_plans import FLASHINFER, Geometry, Library, PlanInputs, load_flashinfer
from attention.forward_batch import PagedMetadata
from attention.kernels.flat_pages import flatten_pages
from attention.kernels.packed_mask import pack_mask
from attention.kv_pool import FP8, ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer
from attention.step_shape import StepShape
from configs.errors import ConfigError, EngineError
from tests.helpers.latent_case import BATCHES as LATENT_BATCHES
from tests.helpers.latent_case import LITE, LatentCase, layer_of
from tests.helpers.paged_case import NewTokens, attention, both_ways, mask_of, tree
from worker.protocol import RowFlag, StepFrame
from worker.step.step import Step
from worker.step.step_inputs import StepInputs

CPU = torch.device("cpu")
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (1, 1), (63, 1), (64, 1), (300, 1), (699, 1)],
    "extend": [(0, 5), (0, 130), (0, 333)],
    "extend_with_prefix": [(16, 20), (7, 2), (0, 18), (450, 200)],
    "mixed": [(699, 1), (0, 130), (90, 1), (200, 300), (0, 1)],
}
SMALL_BATCHES = {
    "decode": [(0, 1), (16, 1), (40, 1)],
    "extend": [(0, 5), (16, 20)],
    "mixed": [(20, 1), (0, 17), (33, 9)],
}


def _layer(layer_id: int = 0, *, kv_heads: int = 2, group: int = 4, head_dim: int = 128, **features: Any) -> Any:
    heads = {"tp_q_head_num": kv_heads * group, "tp_k_head_num": kv_heads}
    return AttentionLayer(layer_id=layer_id, **heads, head_dim=head_dim, scale=0.11, **features)


class Case:
    """Rows of random keys and values in a poisoned pool. Row i is row i + 1 of the table, whose unused entries are far
    outside the pool.

    Args:
        own_pool: whether layers with a window have a pool of their own.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        rows: Sequence[tuple[int, int]],
        page_size: int = 16,
        *,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        own_pool: bool = False,
        padding: tuple[int, int] = (0, 0),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.layers, self.rows, self.dtype = list(layers), list(rows), dtype
        lens = [prefix + extend for prefix, extend in rows]
        # Padding's own rows and tokens, of which a shape has more than a step: its last row may have all of these.
        num_rows, num_tokens = len(rows) + padding[0], sum(extend for _, extend in rows) + padding[1]
        max_pages = -(-max(*lens, num_tokens) // page_size) + 2
        num_pages = max_pages * len(rows)
        own = {"num_placed_pages": num_pages} if own_pool else {}
        self.table = ReqToTokenPool(len(rows), max_pages, device, **own)
        self.table.page_table[1:] = 1 << 30
        generator = torch.Generator().manual_seed(0)
        shuffled = (1 + torch.randperm(num_pages, generator=generator)).int().view(len(rows), -1)
        for i, length in enumerate(lens):
            used = -(-length // page_size)
            self.table.page_table[i + 1, :used] = shuffled[i, :used].to(device)
        if self.table.window_page_of is not None:
            self.table.window_page_of[1:] = (1 + torch.randperm(num_pages, generator=generator)).int()
        self.pool = TokenToKVPool(
            self.layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=kv_dtype or dtype,
            compute_dtype=dtype,
            device=device,
            num_window_pages=num_pages if own_pool else None,
        )
        self.q: list[list[torch.Tensor]] = []
        self.kv: list[list[list[torch.Tensor]]] = []
        for layer in self.layers:
            for pages in self.pool.pages(layer.layer_id):
                pages.copy_(torch.tensor(float("nan")))
            heads_kv = (layer.tp_k_head_num, layer.head_dim)
            self.kv.append([[self._random(generator, length, *heads_kv) for _ in "kv"] for length in lens])
            heads = (layer.tp_q_head_num, layer.head_dim)
            self.q.append([self._random(generator, extend, *heads) for _, extend in rows])
            for i, written in enumerate(self.kv[-1]):
                positions = torch.arange(lens[i], device=device)
                pages_of = self.table.page_table[i + 1, positions // page_size].long()
                if self.table.window_page_of is not None and layer.window is not None:
                    pages_of = self.table.window_page_of[pages_of].long()
                slots = pages_of * page_size + positions % page_size
                self.pool.set_kv(layer.layer_id, slots, *(x.flatten(1) for x in written))
                if kv_dtype is not None:  # what the pool has of them
                    both = zip(self.pool.slots(layer.layer_id), (layer.k_scale, layer.v_scale), strict=True)
                    self.kv[-1][i] = [
                        (x.view(torch.uint8)[slots].view(kv_dtype).float() * scale).view(lens[i], *heads_kv)
                        for x, scale in both
                    ]
        self.inputs = StepInputs(self.table, max_rows=num_rows, max_tokens=num_tokens, page_size=page_size)

    def _random(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(self.table.page_table.device, self.dtype)

    def frame(self, chosen: Sequence[int]) -> StepFrame:
        of_row = np.array([i + 1 for i in chosen], np.int32)
        starts, lens = np.array([self.rows[i] for i in chosen], np.int32).T.copy()
        flags = np.full(len(chosen), RowFlag.HAS_TOKENS | RowFlag.SAMPLE, np.int32)
        ids = np.zeros(lens.sum(), np.int32)
        return StepFrame(generation=1, step=1, rows=of_row, starts=starts, lens=lens, flags=flags, token_ids=ids)

    def queries(self, chosen: Sequence[int], num_tokens: int) -> list[torch.Tensor]:
        """For each layer, [num_tokens, Hq * D]: a slice of wider rows, as of a fused projection; padding is zeros."""
        found = []
        for of_layer in self.q:
            q = torch.cat([of_layer[i] for i in chosen]).flatten(1)
            q = torch.cat([q, q.new_zeros(num_tokens - len(q), q.shape[1])])
            found.append(torch.cat([q, q], dim=1)[:, : q.shape[1]])
        return found

    def run(self, backend: AttentionBackend, parts: Sequence[NewTokens | None] | None = None) -> list[torch.Tensor]:
        """For each layer, the answers of all rows by an eager step, whose mask has `parts`."""
        chosen = range(len(self.rows))
        frame = self.frame(chosen)
        self.inputs.upload(Step.of(frame), Step.of(frame).shape)
        batch = self.inputs.batch(Step.of(frame))
        if parts is not None:
            mask = mask_of(parts, [extend for _, extend in self.rows], batch.positions.device)
            batch = dataclasses.replace(batch, mask=mask)
        backend.init_forward_metadata(batch)
        queries = self.queries(chosen, int(frame.lens.sum()))
        outs = [backend.attend(q, layer) for q, layer in zip(queries, self.layers, strict=True)]
        for out, q in zip(outs, queries, strict=True):
            assert out.shape == q.shape
            assert out.is_contiguous()
        return outs

    def check(
        self,
        outs: Sequence[torch.Tensor],
        chosen: Sequence[int] | None = None,
        parts: Sequence[NewTokens | None] | None = None,
    ) -> None:
        """Asserts of each layer's answers, padding behind them, that they err at most twice as far as torch."""
        chosen = range(len(self.rows)) if chosen is None else chosen
        parts = [None] * len(self.rows) if parts is None else parts
        for layer, out, q, kv in zip(self.layers, outs, self.q, self.kv, strict=True):
            exact, same_dtype = (
                torch.cat([attention(q[i], *kv[i], layer, dtype, parts[i])[0] for i in chosen]).flatten(1)
                for dtype in (torch.float32, self.dtype)
            )
            # torch's max, unlike Python's, never passes over a NaN.
            error, bound = (float((x.float() - exact).abs().max()) for x in (out[: len(exact)], same_dtype))
            assert error <= 2 * bound + 1e-3, f"layer {layer.layer_id}: {error:.5f}, {bound:.5f} by torch"

    def replay(self, backend: AttentionBackend, shape: StepShape, steps: Sequence[Sequence[int]], graph: Any) -> None:
        """Captures a step of `shape`, replays it for the rows of each of `steps`, and checks each."""
        queries = [q.contiguous() for q in self.queries(steps[0], shape.num_tokens)]

        def step() -> list[torch.Tensor]:
            backend.prepare_capture(self.inputs.graph_batch(shape), shape)
            return [backend.attend(q, layer) for q, layer in zip(queries, self.layers, strict=True)]

        self.inputs.upload(Step.of(StepFrame(generation=0, step=0)), shape)
        step()
        replay = graph(step)
        for chosen in steps:
            frame = self.frame(chosen)
            assert shape.holds(Step.of(frame).shape)
            self.inputs.upload(Step.of(frame), shape)
            backend.prepare_replay(shape, frame.starts, frame.lens)
            for static, q in zip(queries, self.queries(chosen, shape.num_tokens), strict=True):
                static.copy_(q)
            self.check(replay(), chosen)


# On the CPU.


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_plans_from_page_counts_and_last_page_lengths_of_the_host(page_size: int) -> None:
    prefix_lens, extend_lens = np.array([[0, 1], [16, 1], [63, 1], [0, 0], [5, 59], [64, 64]], np.int64).T
    inputs = PlanInputs.of(prefix_lens, extend_lens, page_size)
    seq_lens = [1, 17, 64, 0, 64, 128]
    assert all((tensor.dtype, tensor.device) == (torch.int32, CPU) for tensor in dataclasses.astuple(inputs))
    assert inputs.seq_lens.tolist() == seq_lens
    assert inputs.qo_indptr.tolist() == [0, 1, 2, 3, 3, 62, 126]
    counts = inputs.kv_indptr.diff().tolist()
    assert inputs.num_pages == sum(counts)
    for length, count, last in zip(seq_lens, counts, inputs.last_page_len.tolist(), strict=True):
        assert (count, last) == ((0, 0) if length == 0 else (count, length - (count - 1) * page_size))
        assert 0 <= last <= page_size


def test_a_step_is_padded_as_its_captured_shape_says() -> None:
    prefixes, lens = np.array([7, 0], np.int32), np.array([1, 1], np.int32)
    assert [x.tolist() for x in StepShape(4, 4, 4).padded(prefixes, lens)] == [[7, 0, 0, 0], [1, 1, 1, 1]]
    assert [x.tolist() for x in StepShape(9, 4, 3).padded(prefixes, lens + 1)] == [[7, 0, 0, 0], [2, 2, 0, 5]]
    assert [x.tolist() for x in StepShape(4, 3, 2).padded(prefixes, lens + 1)] == [[7, 0, 0], [2, 2, 0]]


def test_the_tokens_of_a_row_in_one_chunk_are_planned_as_a_row() -> None:
    prefix_lens, extend_lens = np.array([[0, 24], [5, 3], [7, 1], [8, 1], [7, 18], [0, 0]], np.int64).T
    inputs = PlanInputs.of(prefix_lens, extend_lens, 4, chunk=8, num_rows=12)
    assert inputs.qo_indptr.diff().tolist() == [8, 8, 8, 3, 1, 1, 1, 8, 8, 1, 0, 0]
    assert inputs.seq_lens.tolist() == [8, 8, 8, 8, 8, 1, 8, 8, 8, 1, 0, 0]
    assert inputs.kv_indptr.diff().tolist() == [2, 2, 2, 2, 2, 1, 2, 2, 2, 1, 0, 0]
    assert inputs.last_page_len.tolist() == [4, 4, 4, 4, 4, 1, 4, 4, 4, 1, 0, 0]


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize(("page_size", "num_rows"), [(1, 3), (16, 300)])
def test_lists_the_pages_of_all_rows_without_gaps(
    page_size: int, num_rows: int, chunk: int | None, device: torch.device
) -> None:
    lens = torch.arange(num_rows, dtype=torch.int32) * 7 % 50
    extends = torch.minimum(lens, torch.tensor(3))
    table = torch.full((num_rows, 600 if num_rows == 3 else 4), 1 << 30, dtype=torch.int32)
    expected = []
    for i, (length, extend) in enumerate(zip(lens.tolist(), extends.tolist(), strict=True)):
        count = -(-length // page_size)
        table[i, :count] = torch.arange(count) + 1000 * i
        first = 0 if chunk is None else (length - extend) // chunk * chunk // page_size
        expected += table[i, first:count].tolist()
    out = torch.full((len(expected) + 5,), -1, dtype=torch.int32, device=device)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    starts[1:] = extends.cumsum(0)
    paged = PagedMetadata(
        cache_seqlens=lens.to(device), cu_seqlens_q=starts.to(device), page_table=table.to(device), max_seqlen_q=3
    )
    flatten_pages(paged, page_size, out, chunk)
    assert out.tolist() == [*expected, *[-1] * 5]


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (6, 8)])
def test_packs_what_new_tokens_see(window: int | None, chunk: int | None, device: torch.device) -> None:
    many = 256 if window is None else 1  # rows, more than a program reads the lengths of at a time
    rows = [(12, 9), (3, 1), (0, 0), (7, 5), (70, 6), *[(1, 1)] * many]
    parts = [tree(12, 9), None, None, both_ways(7, 5), None, *[None] * (many - 1), both_ways(1, 1)]
    prefixes, extends = torch.tensor(rows, dtype=torch.int32).T
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    starts[1:] = extends.cumsum(0)
    paged = PagedMetadata(
        cache_seqlens=(prefixes + extends).to(device),
        cu_seqlens_q=starts.to(device),
        page_table=torch.zeros(len(rows), 1, dtype=torch.int32, device=device),
        max_seqlen_q=9,
    )
    sizes = [(extend * (prefix + extend) + 7) // 8 for prefix, extend in rows]
    packed = torch.full((sum(sizes) + 4,), 0xAA, dtype=torch.uint8, device=device)
    begins = torch.empty(len(rows), dtype=torch.int32, device=device)
    mask = mask_of(parts, extends.tolist(), device)
    pack_mask(paged, mask, window, chunk, most_bytes=max(sizes), packed=packed, begins=begins)
    assert begins.tolist() == np.cumsum([0, *sizes[:-1]]).tolist()
    assert packed[-4:].tolist() == [0xAA] * 4
    for (prefix, extend), begin, part in zip(rows, begins.tolist(), parts, strict=True):
        keys, queries = torch.arange(prefix + extend), prefix + torch.arange(extend)[:, None]
        if part is not None:
            queries = part.positions[:, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        if chunk is not None:
            seen &= keys // chunk == queries // chunk
        if part is not None:
            seen[:, prefix:] = part.visible
        assert torch.equal(_bits(packed[begin:], seen.shape), seen)


def _bits(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first bits of bytes, the lowest of each first, as bool."""
    bits = np.unpackbits(packed.cpu().numpy(), bitorder="little")[: int(np.prod(shape))]
    return torch.from_numpy(bits).bool().view(*shape)


class Emulated:
    """FlashInfer's paged wrappers, with their checks. `planned` says whose plan each int workspace holds."""

    planned: dict[int, Emulated]

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str, use_cuda_graph: bool, **given: Any):
        assert (layout, workspace.dtype) == ("NHD", torch.uint8)
        self.kernels, self.in_graph = backend, use_cuda_graph
        # Names of buffers end in `_buffer` for decodes and in `_buf` for prompts.
        self.static = {name.removesuffix("fer"): given[name] for name in given if name != "use_tensor_cores"}
        self.tensor_cores = given.get("use_tensor_cores")
        self.max_tokens = None

    def plan(
        self,
        *args: Any,
        causal: bool = False,
        seq_lens: torch.Tensor,
        packed_custom_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        is_decode = self.tensor_cores is not None
        qo_indptr = torch.arange(len(args[0]), dtype=torch.int32) if is_decode else args[0]
        kv_indptr, indices, last, num_q, num_k, head_dim, page_size = args if is_decode else args[1:]
        for tensor in (qo_indptr, kv_indptr, last, seq_lens):
            assert (tensor.dtype, tensor.device) == (torch.int32, CPU)
        assert self._pin_memory_int_workspace_buffer.dtype == torch.uint8
        assert causal + is_decode + (packed_custom_mask is not None) == 1
        # Where there is a window, parts of split keys end with those that a causal tile of queries sees.
        assert packed_custom_mask is None or options["window_left"] < 0 or options["disable_split_kv"]
        # It takes the number of a row's bits for that of its bytes.
        self._mask_indptr_buf, self.bits = (qo_indptr.diff() * seq_lens).cumsum(0), packed_custom_mask
        if self.in_graph:
            assert len(self.static["paged_kv_indptr_buf"]) == len(kv_indptr), "rows of a graph"
            assert indices.data_ptr() == self.static["paged_kv_indices_buf"].data_ptr()
            assert self.max_tokens in (None, int(qo_indptr[-1])), "tokens of a graph"
            self.max_tokens = int(qo_indptr[-1])
        assert len(indices) == int(kv_indptr[-1])
        self.args = SimpleNamespace(
            qo=qo_indptr.tolist(), kv=kv_indptr.tolist(), indices=indices, lens=seq_lens.tolist(), **options
        )
        self.heads, self.page_size = (num_q, num_k, head_dim), page_size
        Emulated.planned[self._int_workspace_buffer.data_ptr()] = self

    def run(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor,
    ) -> None:
        assert Emulated.planned[self._int_workspace_buffer.data_ptr()] is self, "another plan lies where its own did"
        args = self.args
        assert q.shape == (args.qo[-1], self.heads[0], self.heads[2])
        assert q.stride(-1) == 1
        window = None if args.window_left < 0 else args.window_left + 1
        assert (q.dtype, kv[0].dtype) == (args.q_data_type, args.kv_data_type)
        assert self.kernels != "fa3" or q.dtype == kv[0].dtype
        options = {"scale": args.sm_scale * k_scale, "head_dim": self.heads[2], "softcap": args.logits_soft_cap or None}
        layer = dataclasses.replace(_layer(), **options)
        out.fill_(float("nan"))
        for i, length in enumerate(args.lens):
            tokens, pages = slice(*args.qo[i : i + 2]), args.indices[slice(*args.kv[i : i + 2])].long()
            if tokens.start == tokens.stop:
                continue
            k, v = (x.float()[pages].flatten(0, 1)[:length] for x in kv)
            num_tokens = tokens.stop - tokens.start
            queries, keys = torch.arange(length - num_tokens, length)[:, None], torch.arange(length)
            seen = keys <= queries
            if self.bits is not None:
                seen = _bits(self.bits[self._mask_indptr_buf[i] :], seen.shape)
            if window is not None:
                seen &= keys > queries - window
            # By a mask over as many queries as keys, of which the last are asked.
            every = torch.ones(length, length, dtype=torch.bool)
            every[length - num_tokens :] = seen
            wide_q = torch.cat([q.new_zeros(length - num_tokens, *q.shape[1:]), q[tokens]])
            answers, _ = attention(wide_q, k, v, layer, torch.float32, NewTokens(every, keys))
            out[tokens] = (v_scale * answers[length - num_tokens :]).to(out.dtype)


class EmulatedMLA:
    """FlashInfer's wrapper for latent layers: for each plan it makes what it runs by, and pinned memory."""

    def __init__(self, workspace: torch.Tensor, *, backend: str, use_cuda_graph: bool, **static: torch.Tensor) -> None:
        assert backend == "fa3"
        assert set(static) == ({"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"} if use_cuda_graph else set())
        self.static, self._planned_backend = static, None

    def plan(self, *, metadata: SimpleNamespace, causal: bool, page_size: int, **options: Any) -> None:
        qo_indptr, kv_indptr, indices, lens = metadata.csr
        for tensor in (qo_indptr, kv_indptr, lens):
            assert (tensor.dtype, tensor.device) == (torch.int32, CPU)
        if self.static:
            assert len(self.static["kv_len_arr"]) == len(lens), "rows of a graph"
            assert indices.data_ptr() == self.static["kv_indices"].data_ptr()
        assert causal or int(qo_indptr.diff().max()) == 1
        workspace = torch.empty(8) if self._planned_backend is None else self._planned_backend._int_workspace_buffer
        self._planned_backend = SimpleNamespace(
            _int_workspace_buffer=workspace if self.static else torch.empty(8),
            _pin_memory_int_workspace_buffer=torch.empty(8),
        )
        Emulated.planned[self._planned_backend._int_workspace_buffer.data_ptr()] = self
        self.csr, self.options = (qo_indptr.tolist(), kv_indptr.tolist(), indices, lens.tolist()), options

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        assert self._planned_backend is not None
        assert Emulated.planned[self._planned_backend._int_workspace_buffer.data_ptr()] is self
        qo, kv, indices, lens = self.csr
        width, rope = self.options["head_dim_ckv"], self.options["head_dim_kpe"]
        num_heads = self.options["num_heads"]
        assert query.shape == (qo[-1], num_heads, width + rope)
        assert num_heads & (num_heads - 1) == 0, "a token may end in the middle of a program's tile"
        out = torch.full_like(query[..., :width], float("nan"))
        for i, length in enumerate(lens):
            tokens, kept = slice(*qo[i : i + 2]), kv_cache[indices[slice(*kv[i : i + 2])].long()].flatten(0, 1)[:length]
            if tokens.start < tokens.stop:
                layer = dataclasses.replace(_layer(kv_heads=1), scale=self.options["sm_scale"])
                keys = kept[:, None]
                out[tokens] = attention(query[tokens], keys, keys, layer, torch.float32)[0][..., :width]
        return out


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes backends use the emulation."""
    Emulated.planned = {}
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Emulated,
        BatchPrefillWithPagedKVCacheWrapper=Emulated,
        # tests/attention/test_flashinfer_ragged.py has one that runs.
        BatchPrefillWithRaggedKVCacheWrapper=lambda *_, **__: SimpleNamespace(),
        __version__="0",
    )
    metadata = SimpleNamespace(csr=lambda *tensors: SimpleNamespace(csr=tensors))
    module.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=EmulatedMLA, MLAPlanMetadata=metadata)
    monkeypatch.setattr(flashinfer_backend, "load_flashinfer", lambda device: Library(module, 4, True))
    monkeypatch.setattr(flashinfer_backend, "_FLOAT_WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(flashinfer_backend, "_INT_WORKSPACE_BYTES", 1024)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Makes backends use the emulation; returns what captures: its replays run the step again, which plans nothing."""
    emulate(monkeypatch)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def capture(step: Callable[[], Any]) -> Callable[[], Any]:
        def replay() -> Any:
            nonlocal capturing
            capturing = True
            outs = step()
            capturing = False
            return outs

        return replay

    return capture


LAYERS = [_layer(0, head_dim=16), _layer(1, head_dim=16, window=13, softcap=5.0), _layer(2, head_dim=16)]
CHUNKED = [*LAYERS, _layer(3, head_dim=16, chunk=16), _layer(4, head_dim=16, chunk=32, window=9)]


@pytest.mark.parametrize(
    ("batch", "page_size", "own_pool"), [("decode", 16, False), ("extend", 1, True), ("mixed", 16, True)]
)
def test_plans_once_for_layers_that_are_alike(batch: str, page_size: int, own_pool: bool, emulated: Any) -> None:
    case = Case(LAYERS, SMALL_BATCHES[batch], page_size, own_pool=own_pool)
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend))
    now = [backend._now[Geometry.of(layer)] for layer in LAYERS]
    assert now[0] is now[2]
    assert now[0] is not now[1]
    assert {wrapper.kernels for wrapper in now} == {"fa3" if batch == "extend" else "fa2"}
    assert {wrapper.tensor_cores for wrapper in now} == {True if batch == "decode" else None}


@pytest.mark.parametrize(("batch", "page_size"), [("decode", 16), ("mixed", 1)])
def test_a_layer_with_chunks_sees_its_own(batch: str, page_size: int, emulated: Any) -> None:
    case = Case(CHUNKED, SMALL_BATCHES[batch], page_size, own_pool=True)
    case.check(case.run(FlashInferBackend(case.layers, case.pool)))


@pytest.mark.parametrize("batch", list(SMALL_BATCHES))
def test_keys_and_values_in_fp8_come_with_their_scales(batch: str, emulated: Any) -> None:
    layers = [_layer(0, head_dim=16, k_scale=0.5, v_scale=0.03), _layer(1, head_dim=16, v_scale=2.0, window=13)]
    case = Case(layers, SMALL_BATCHES[batch], kv_dtype=FP8, own_pool=True)
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend))
    assert {wrapper.kernels for wrapper in backend._now.values()} == {"fa2"}


MASKED = [(40, 9), (20, 1), (0, 17), (33, 14), (3, 1), (18, 12)]
"""(prefix_len, extend_len) of a tree behind a prefix, a causal row, a tree that is all, a block that sees itself both
ways, one of a token, and a causal prompt."""


def _parts(rows: Sequence[tuple[int, int]]) -> list[NewTokens | None]:
    return [tree(*rows[0]), None, tree(*rows[2]), both_ways(*rows[3]), both_ways(*rows[4]), None]


@pytest.mark.parametrize(("page_size", "own_pool"), [(1, False), (16, True)])
def test_a_mask_is_planned_with_windows_and_chunks_in_it(page_size: int, own_pool: bool, emulated: Any) -> None:
    case = Case(CHUNKED, MASKED, page_size, own_pool=own_pool)
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend, _parts(MASKED)), parts=_parts(MASKED))
    case.check(case.run(backend))  # and a step without one after it


def test_a_mask_of_2_gib_is_refused(emulated: Any) -> None:
    case = Case(LAYERS[:1], MASKED)
    backend = FlashInferBackend(case.layers, case.pool)
    frame = case.frame(range(len(MASKED)))
    case.inputs.upload(Step.of(frame), Step.of(frame).shape)
    mask = mask_of(_parts(MASKED), [extend for _, extend in MASKED], CPU)
    batch = dataclasses.replace(case.inputs.batch(Step.of(frame)), mask=mask)
    huge = dataclasses.replace(batch, seq_lens=batch.seq_lens << 30)
    with pytest.raises(EngineError, match="takes masks of less than 2 GiB, and this has"):
        backend.init_forward_metadata(huge)


@pytest.mark.parametrize("own_pool", [False, True])
def test_a_graph_is_planned_for_each_step_that_it_replays(own_pool: bool, emulated: Any) -> None:
    case = Case(CHUNKED, SMALL_BATCHES["decode"], own_pool=own_pool, padding=(2, 2))
    backend = FlashInferBackend(case.layers, case.pool)
    case.replay(backend, StepShape(4, 4, 4), [[0, 1], [2, 1, 0], [2, 0]], emulated)
    case = Case(CHUNKED, SMALL_BATCHES["mixed"], own_pool=own_pool, padding=(1, 5))
    backend = FlashInferBackend(case.layers, case.pool)
    case.replay(backend, StepShape(30, 4, 3), [[0, 1], [2, 1, 0], [1]], emulated)


LATENT = {"latent_dim": 128, "nope_dim": 12, "v_dim": 20, "head_dim": 192}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", list(LATENT_BATCHES))
def test_latent_layers_are_absorbed(batch: str, captured: bool, emulated: Any) -> None:
    _check_latent(LatentCase(layer_of(3, **LATENT), 16, LATENT_BATCHES[batch], torch.float32), captured)


def _check_latent(case: LatentCase, captured: bool) -> None:
    backend, batch = FlashInferBackend([case.layer], case.pool), case.batch
    backend.init_forward_metadata(batch)
    if captured:
        rows = batch.batch_size
        is_decode = batch.num_tokens == rows
        shape = StepShape(*[rows] * 3) if is_decode else StepShape(batch.num_tokens, rows, rows - 1)
        backend.prepare_capture(batch, shape)
        # Else the last row, which has nothing in the cache, is what pads the others.
        num_given = rows if is_decode else rows - 1
        prefix_lens, extend_lens = (it[:num_given].astype(np.int32) for it in (batch.prefix_lens, batch.extend_lens))
        backend.prepare_replay(shape, prefix_lens, extend_lens)
    case.check(case.run(backend))


def test_a_full_grid_splits_no_keys(emulated: Any) -> None:
    case = Case(LAYERS, SMALL_BATCHES["decode"])
    backend, geometry = FlashInferBackend(case.layers, case.pool), Geometry.of(LAYERS[0])
    # Two programs on each of 4 multiprocessors, for two KV heads.
    full = [backend._library.is_filled(shape, geometry) for shape in (StepShape(3, 3, 3), StepShape(4, 4, 4))]
    assert full == [False, True]
    assert [backend._library.is_filled(StepShape(tokens, 2, 1), geometry) for tokens in (32, 64)] == [False, True]


def test_a_build_that_computes_something_else_is_refused(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(LAYERS[:1], SMALL_BATCHES["decode"])
    monkeypatch.setattr(Emulated, "run", lambda self, q, kv, out, **scales: out.fill_(7.0))
    with pytest.raises(ConfigError, match="returned wrong values"):
        FlashInferBackend(case.layers, case.pool)

    def fails(*args: Any, **given: Any) -> None:
        raise RuntimeError("Ninja build failed\nnvcc: not found")

    monkeypatch.setattr(Emulated, "plan", fails)
    with pytest.raises(ConfigError, match=r"head_dim=16, .*: Ninja build failed\n"):
        FlashInferBackend(case.layers, case.pool)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r"Install flashinfer-python \(the `flashinfer` extra\)"):
        load_flashinfer(CPU)
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extra = pyproject["project"]["optional-dependencies"]["flashinfer"]
    assert extra == [f"flashinfer-python=={FLASHINFER}"]


# On a GPU.


def _cuda(
    layers: Sequence[AttentionLayer], batch: str, page_size: int = 16, dtype: torch.dtype = torch.bfloat16, **given: Any
) -> Case:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    return Case(layers, BATCHES[batch], page_size, device=torch.device("cuda"), dtype=dtype, **given)


def _graph(step: Callable[[], Any]) -> Callable[[], Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()

    def replay() -> Any:
        graph.replay()
        return outs

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [4, 6, 8])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_errs_at_most_twice_as_far_as_torch(batch: str, group: int, page_size: int) -> None:
    case = _cuda([_layer(group=group)], batch, page_size)
    for kernels in ("fa2", "fa3") if batch.startswith("extend") else (None,):
        case.check(case.run(FlashInferBackend(case.layers, case.pool, prompt_kernels=kernels)))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_a_replayed_graph_errs_at_most_twice_as_far_as_torch(batch: str, kernels: Any) -> None:
    case = _cuda([_layer()], batch, padding=(4, 100))
    backend = FlashInferBackend(case.layers, case.pool, prompt_kernels=kernels)
    num_rows, num_tokens = len(case.rows), sum(extend for _, extend in case.rows)
    if batch == "decode":
        steps = [[0, 1, 2, 3], [5, 4, 3, 2, 1, 0], [5, 5, 0]]
        for size in (num_rows + 2, num_rows):  # the larger first, as shapes are captured
            case.replay(backend, StepShape(size, size, size), steps, _graph)
    else:
        steps = [[3, 2, 0], list(range(num_rows)), [1], [4, 3, 0]]
        for few in (num_rows, 9):
            shape = StepShape(num_tokens + 50, num_rows + 1, few)
            case.replay(backend, shape, steps, _graph)
    case.check(case.run(backend))  # an eager step after them


@pytest.mark.gpu
@pytest.mark.parametrize("own_pool", [False, True])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_layers_with_a_window_and_without_have_plans_of_their_own(batch: str, own_pool: bool) -> None:
    layers = [_layer(0), _layer(1, window=33), _layer(2), _layer(3, window=1)]
    case = _cuda(layers, batch, own_pool=own_pool, padding=(2, 2))
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend))
    if batch == "decode":
        case.replay(backend, StepShape(8, 8, 8), [[0, 1], [5, 4, 3, 2, 1, 0]], _graph)


@pytest.mark.gpu
@pytest.mark.parametrize("own_pool", [False, True])
@pytest.mark.parametrize("page_size", [1, 64])
def test_masks_and_chunks_err_at_most_twice_as_far_as_torch(page_size: int, own_pool: bool) -> None:
    layers = [_layer(0), _layer(1, chunk=64), _layer(2, window=33), _layer(3, chunk=128, window=33)]
    rows = [(900, 60), (20, 1), (0, 170), (330, 140), (3, 1), (180, 120)]
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    case = Case(layers, rows, page_size, device=torch.device("cuda"), dtype=torch.bfloat16, own_pool=own_pool)
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend, _parts(rows)), parts=_parts(rows))
    case.check(case.run(backend))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_heads", [1, 16, 43])
@pytest.mark.parametrize("batch", list(LATENT_BATCHES))
def test_latent_layers_err_at_most_twice_as_far_as_torch(batch: str, num_heads: int, captured: bool) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    case = LatentCase(layer_of(num_heads, **LITE), 64, LATENT_BATCHES[batch], torch.bfloat16, torch.device("cuda"))
    _check_latent(case, captured)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_fp8_errs_at_most_twice_as_far_as_torch(batch: str, group: int) -> None:
    case = _cuda([_layer(group=group, k_scale=0.02, v_scale=0.03)], batch, kv_dtype=FP8, padding=(2, 2))
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend))
    if batch == "decode":
        case.replay(backend, StepShape(8, 8, 8), [[0, 1], [5, 4, 3, 2, 1, 0]], _graph)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", list(BATCHES))
def test_chunks_err_at_most_twice_as_far_as_torch(batch: str) -> None:
    case = _cuda([_layer(0, chunk=64), _layer(1)], batch, padding=(2, 50))
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend))
    num_rows, num_tokens = len(case.rows), sum(extend for _, extend in case.rows)
    shape = StepShape(8, 8, 8) if batch == "decode" else StepShape(num_tokens + 50, num_rows + 1, num_rows)
    case.replay(backend, shape, [[0, 1], list(range(num_rows))], _graph)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_small_groups_decode_without_tensor_cores(batch: str, group: int) -> None:
    case = _cuda([_layer(group=group)], batch, padding=(2, 2))
    backend = FlashInferBackend(case.layers, case.pool)
    case.check(case.run(backend))
    if batch == "decode":
        case.replay(backend, StepShape(8, 8, 8), [[0, 1], [5, 4, 3, 2, 1, 0]], _graph)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (_layer(head_dim=64), torch.bfloat16),
        (_layer(head_dim=256), torch.bfloat16),
        (_layer(), torch.float16),
        (_layer(softcap=5.0), torch.bfloat16),
        (_layer(head_dim=256, window=33, softcap=5.0), torch.bfloat16),
    ],
    ids=["64", "256", "fp16", "softcap", "256-window-softcap"],
)
@pytest.mark.parametrize("batch", list(BATCHES))
def test_other_heads_and_dtypes_and_a_soft_cap(batch: str, layer: AttentionLayer, dtype: torch.dtype) -> None:
    case = _cuda([layer], batch, dtype=dtype)
    case.check(case.run(FlashInferBackend(case.layers, case.pool)))
