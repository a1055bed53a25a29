"""Every Triton kernel, compiled for an H200 on a machine that has none: the compiler takes less than the interpreter.
Where three things specialise a kernel, any two values of theirs come together. For each other compute capability of
configs/cards.py, one specialisation of every kernel, and those that take the most shared memory.

pytest's own process may interpret kernels, so this file is also a script that compiles them. It calls the project's
functions on CPU tensors, with a driver that only names the GPU to compile for, and launches nothing: signatures,
constants and options are those that production has.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.forward_batch import NewTokenMask, PagedMetadata
from attention.kernels import decode, exact
from attention.kernels.extend import paged_extend
from attention.kernels.flat_pages import flatten_pages
from attention.kernels.index_scores import choose_keys
from attention.kernels.latent_heads import head_products
from attention.kernels.merge import merge_states
from attention.kernels.packed_mask import pack_mask
from attention.kernels.step_metadata import apply_page_deltas, fill_step_metadata
from attention.kv_pool import FP8
from attention.layer import AttentionLayer
from attention.sparse import IndexInputs, SparseStep
from attention.state_pool import RowStates, StatePool
from attention.step_metadata import StepTensors
from configs.cards import COMPILED, FP8_FROM, Capability
from parallel.collectives.group import TensorParallelGroup
from parallel.kernels.all_reduce_norm import STATE_WORDS, Peers, all_reduce_add_norm, gather, look_up
from parallel.kernels.tree_sum import sum_add_norm, sum_subtrees
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.kernels.chain_gemm import chain_gemm
from parallel.numerics.kernels.fp8_gemm import fp8_gemm
from parallel.numerics.kernels.fp8_groups import Groups
from parallel.numerics.kernels.fp8_tile import plain
from parallel.numerics.kernels.node_gemm import node_gemm
from parallel.numerics.kernels.skinny_gemm import skinny_gemm
from parallel.numerics.mxfp4 import Mxfp4Matrix
from parallel.plan import Span
from tests.helpers.pairs import pairs
from worker.kernels import delta, grouped_experts, kimi_delta, moe, routing
from worker.kernels.activation import act_and_mul, act_and_mul_in_fp8, mul_sigmoid_
from worker.kernels.conv import causal_conv
from worker.kernels.cpu_delta import DeltaArgs
from worker.kernels.cpu_mamba import MambaArgs
from worker.kernels.mamba import grouped_norm, mamba
from worker.kernels.norm import add_rms_norm, add_rms_norm_in_fp8, rms_norm
from worker.kernels.rope import latent_norm_rope_store, qk_norm_rope_store
from worker.protocol import RECORD_WORDS
from worker.sampling.adjustments import RowAdjustments
from worker.sampling.kernels import sampling
from worker.sampling.kernels.adjustments import adjust_logits
from worker.step.preparing import mark_compilations
from worker.weights.uniform_kernel import fill

ROOT = Path(__file__).resolve().parents[2]
EPS = 1e-6
H200 = (9, 0)
OTHERS = [it for it in COMPILED if it != H200]
NORMS = ("sum_add_norm_kernel", "all_reduce_add_norm_kernel", "reduce_norm_share_kernel", "_add_rms_norm_kernel")
"""Kernels that add to the residual stream and norm."""
ATTENTION_FEATURES: list[dict[str, Any]] = [
    {"window": 4096},
    {"softcap": 50.0},
    {"chunk": 8192},
    {"window": 128, "sinks": True},
]

pytestmark = [
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="compiles kernels on Linux x86-64 only"
    ),
    pytest.mark.timeout(1800),  # it takes minutes of a processor
]


@dataclass(frozen=True)
class Report:
    kernels: list[str]
    """All that the project has."""
    errors: dict[str, list[str]]
    """By kernel that was compiled: what the compiler said of each specialisation that it did not take."""
    reductions: dict[str, dict[str, list[str]]]
    """By the block of a row, of the kernels that norm a sum: how the squares lie over the threads, and in which."""
    fp8_widths: list[str]
    """Inputs that a thread brings to an MMA from one place, of all exact products with weights in FP8."""
    fp8_dots: list[str]
    """The instructions and types that fast products with weights in FP8 are multiplied by."""
    mxfp4_in_place: dict[str, bool]
    """By kernel that makes bf16 of four bits for `mma.sync`: whether that is always where the instruction wants it."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return _report(tmp_path_factory.mktemp("kernels"), H200)


def _report(path: Path, capability: Capability) -> Report:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, path / "report.json", *map(str, capability)]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    sys.stderr.write(script.stderr)  # the passes after the first say here what they do not take
    assert script.returncode == 0, script.stderr
    return Report(**json.loads((path / "report.json").read_text()))


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200(report: Report) -> None:
    _check_all_compile(report)


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHERS, ids=str)
def test_every_kernel_compiles_for_every_gpu_and_fits_its_shared_memory(capability: Capability, tmp_path: Path) -> None:
    report = _report(tmp_path, capability)
    _check_all_compile(report)
    in_fp8 = {
        f"parallel.numerics.kernels.fp8_{it}_kernel" for it in ("gemm._fp8_gemm", "groups._quantise", "tile._plain")
    }
    assert set(report.kernels) - set(report.errors) == (in_fp8 if capability < FP8_FROM else set())


def _check_all_compile(report: Report) -> None:
    failed = {kernel: errors for kernel, errors in report.errors.items() if errors}
    assert not failed, "\n".join(f"{kernel}, {len(said)} times:\n{said[0]}" for kernel, said in failed.items())


@pytest.mark.slow
def test_no_kernel_is_left_out(report: Report) -> None:
    assert report.kernels
    missing = set(report.kernels) - set(report.errors)
    assert not missing, f"compile them too: let `_call_everything` launch {sorted(missing)}"


@pytest.mark.slow
def test_products_with_weights_in_fp8_add_in_the_order_of_plain_ones(report: Report) -> None:
    assert report.fp8_widths == ["2"]


@pytest.mark.slow
def test_fast_products_with_weights_in_fp8_are_those_of_tensor_cores(report: Report) -> None:
    """Blocks of 64 rows are multiplied in FP8 itself, fewer rows in fp16, which has all numbers of FP8."""
    assert report.fp8_dots == ["mma.sync f16", "wgmma.mma_async e4m3"]


@pytest.mark.slow
def test_four_bits_become_bf16_in_the_registers_that_are_multiplied(report: Report) -> None:
    """Otherwise they would go through shared memory once more, in four times the bytes."""
    kernels = ("pair_experts._pair_", "grouped_experts._grouped_")
    meant = {f"worker.kernels.{kernel}{product}_kernel" for kernel in kernels for product in ("gate_up", "down")}
    assert report.mxfp4_in_place == dict.fromkeys(meant, True)


@pytest.mark.slow
def test_norms_of_one_sum_reduce_in_one_order(report: Report) -> None:
    """So one rank, a gathered tree and one in other ranks' memory give a row the same bits."""
    assert {"1024", "4096"} <= set(report.reductions)
    for block, layouts in report.reductions.items():
        assert len(layouts) == 1, f"rows of {block}: {layouts}"
        [kernels] = layouts.values()
        assert len(kernels) == len(NORMS) or block == "8192", kernels


# The script.


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _spans(*ends: tuple[int, int]) -> tuple[Span, ...]:
    return tuple(Span(*each) for each in ends)


def _int64(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _call_step_metadata(page_size: int) -> None:
    num_rows, num_tokens, max_pages = 8, 96, 512
    table = _int32(257, max_pages)
    tensors = StepTensors(
        input_ids=_int64(num_tokens),
        positions=_int64(num_tokens),
        out_cache_loc=_int64(num_tokens),
        cache_seqlens=_int32(num_rows),
        page_table=_int32(num_rows, max_pages),
    )
    inputs: dict[str, Any] = {
        "rows": _int32(num_rows),
        "starts": _int32(num_rows),
        "cu_seqlens_q": _int32(num_rows + 1),
        "token_ids": _int32(num_tokens),
        "page_table": table,
        "last_tokens": _int64(257, 1),
        "page_size": page_size,
        "max_seqlen_q": 64,
    }
    fill_step_metadata(**inputs, out=tensors)
    windowed = replace(tensors, window_out_cache_loc=_int64(num_tokens), window_page_table=_int32(num_rows, max_pages))
    fill_step_metadata(**inputs, out=windowed, window_page_of=_int32(1000))
    fill_step_metadata(**inputs | {"last_tokens": _int64(257, 8)}, out=tensors, next_starts=_int32(257))
    apply_page_deltas(table, _int32(3, 3))
    paged = PagedMetadata(
        cache_seqlens=tensors.cache_seqlens,
        cu_seqlens_q=inputs["cu_seqlens_q"],
        page_table=tensors.page_table,
        max_seqlen_q=64,
    )
    for chunk in (None, 8192):
        flatten_pages(paged, page_size, _int32(num_rows * max_pages), chunk)


def _layer(head_dim: int, *, group: int = 4, sinks: bool = False, **features: Any) -> AttentionLayer:
    return AttentionLayer(
        layer_id=0,
        tp_q_head_num=8 * group,
        tp_k_head_num=8,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sinks=torch.empty(8 * group) if sinks else None,
        **features,
    )


def _attention_inputs(
    layer: AttentionLayer,
    num_tokens: int,
    num_rows: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedMetadata]:
    """Queries, keys, values and where they are."""
    qkv = torch.empty(num_tokens, (layer.tp_q_head_num + 2 * layer.tp_k_head_num) * layer.head_dim, dtype=dtype)
    pages = torch.empty(3, page_size, layer.tp_k_head_num, layer.head_dim, dtype=kv_dtype or dtype)
    paged = PagedMetadata(
        cache_seqlens=_int32(num_rows),
        cu_seqlens_q=_int32(num_rows + 1),
        page_table=_int32(num_rows, 512),
        max_seqlen_q=num_tokens - num_rows + 1,
    )
    heads = qkv[:, : layer.tp_q_head_num * layer.head_dim].view(num_tokens, layer.tp_q_head_num, layer.head_dim)
    return heads, pages, pages, paged


def _call_decode(
    batch_size: int,
    page_size: int,
    layer: AttentionLayer,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    q, k, v, paged = _attention_inputs(layer, batch_size, batch_size, page_size, dtype, kv_dtype)
    decode.paged_decode(q, k, v, paged, layer, out=torch.empty(q.shape, dtype=dtype))


def _call_extend(
    page_size: int,
    layer: AttentionLayer,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    *,
    is_part: bool = False,
) -> None:
    """`is_part`: with a mask, which is also packed, and what it takes to merge the answer with another."""
    num_tokens, num_rows = 512, 4
    q, k, v, paged = _attention_inputs(layer, num_tokens, num_rows, page_size, dtype, kv_dtype)
    if not is_part:
        paged_extend(q, k, v, paged, layer, out=torch.empty(q.shape, dtype=dtype))
        return
    mask = NewTokenMask(
        visible=torch.empty(num_tokens**2, dtype=torch.bool), starts=_int32(num_rows), positions=_int64(num_tokens)
    )
    part, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    paged_extend(q, k, v, paged, layer, out=part, lse=lse, mask=mask)
    packed, begins = torch.empty(1 << 20, dtype=torch.uint8), _int32(num_rows)
    for window, chunk in ((None, None), (1024, None), (1024, 8192)):
        pack_mask(paged, mask, window, chunk, most_bytes=1 << 18, packed=packed, begins=begins)
    merge_states(part, lse, part, lse, out=torch.empty(q.shape, dtype=dtype), lse=lse)


def _call_exact(
    num_tokens: int,
    page_size: int,
    layer: AttentionLayer,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """A step with so many decodes, and one with prompts."""
    for num_rows in (num_tokens, 3):
        q, k, v, paged = _attention_inputs(layer, num_tokens, num_rows, page_size, dtype, kv_dtype)
        exact.paged_exact(q, k, v, paged, layer, out=torch.empty(q.shape, dtype=dtype))


def _call_choice_of_keys(num_heads: int, dtype: torch.dtype) -> None:
    """Calls what chooses the keys of DeepSeek-V3.2 (64 index heads) and GLM-5 (32)."""
    index = IndexInputs(
        torch.empty(8, num_heads, 128, dtype=dtype), torch.empty(8, 128, dtype=dtype), torch.empty(8, num_heads)
    )
    rows, positions = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    step = SparseStep(rows, positions, _int32(8, 100), 6400)
    choose_keys(index, torch.empty(800, 64, 128, dtype=dtype), step, 2048)


def _call_latent(
    num_heads: int, page_size: int, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> None:
    """Calls latent attention of DeepSeek-V2, fast and exact: prompts, decodes of 200 rows, and decodes of few rows,
    which split the keys."""
    layer = replace(_layer(576), tp_q_head_num=num_heads, tp_k_head_num=1)
    for num_rows in (16, 200):
        q, pages, _, paged = _attention_inputs(layer, num_rows, num_rows, page_size, dtype, kv_dtype)
        latents = torch.empty(num_rows, num_heads, 512, dtype=dtype)
        decode.paged_decode(q, pages, None, paged, layer, out=latents)
    for num_rows in (4, 200, 3):
        heads, _, _, rows = _attention_inputs(layer, 200 if num_rows == 3 else num_rows, num_rows, page_size, dtype)
        exact.paged_exact(heads, pages, None, rows, layer, out=torch.empty(len(heads), num_heads, 512, dtype=dtype))
    lse, part = torch.empty(200, num_heads), torch.empty(200, num_heads, 128)
    paged_extend(q, pages, None, paged, layer, out=latents, lse=lse, prefix_only=True)
    q, k, v = (torch.empty(200, num_heads, width, dtype=dtype) for width in (192, 192, 128))
    paged_extend(q, k, v, paged, layer, out=torch.empty_like(v))
    paged_extend(q, k, v, paged, layer, out=part, lse=lse)
    paged_extend(q, k, v, paged, layer, out=part, lse=lse, prefix_only=True)
    for other in (part, v):
        merge_states(part, lse, other, lse, out=part, lse=lse)
    weights = torch.empty(q.shape[1], 128, 512, dtype=dtype)
    head_products(q[..., : 128 + 64], weights, torch.empty(len(q), q.shape[1], 512 + 64, dtype=dtype))
    values = torch.empty(len(q), q.shape[1], 128, dtype=dtype)
    for is_exact in (False, True):
        head_products(latents, weights.transpose(1, 2), values, exact=is_exact)
    latent_norm_rope_store(
        q,
        torch.empty(200, 576, dtype=dtype),
        weight=torch.empty(512, dtype=dtype),
        eps=EPS,
        cos_sin=torch.empty(64, 64),
        positions=_int64(200),
        slots=torch.empty(192, 576, dtype=kv_dtype or dtype),
        out_cache_loc=_int64(200),
    )


def _call_qk_norm_rope_store(
    head_dim: int, rotary_dim: int, weight: torch.Tensor | None, kv_dtype: torch.dtype = torch.bfloat16
) -> None:
    num_tokens, num_q_heads, num_kv_heads = 4, 32, 8
    slots = _bf16(192, num_kv_heads * head_dim).to(kv_dtype)
    qk_norm_rope_store(
        _bf16(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim),
        q_weight=weight,
        k_weight=weight,
        eps=EPS,
        cos_sin=torch.empty(64, rotary_dim),
        positions=_int64(num_tokens),
        k_slots=slots,
        v_slots=slots,
        out_cache_loc=_int64(num_tokens),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _call_sampler(first_id: int, num_ids: int) -> None:
    """One rank's share of the vocabulary, and then, as if it were whole, filters and log probabilities."""
    num_rows = 3
    logits = torch.empty(num_rows, num_ids)
    rows, positions, records = _int32(num_rows), _int32(num_rows), _int32(257, RECORD_WORDS)
    sampling.plain_tokens(logits, rows, positions, records, first_id, TensorParallelGroup.single())
    thresholds = sampling.filter_thresholds(logits, rows, records)
    sampling.reduce_tokens(sampling.best_candidates(logits, rows, positions, records, 0, thresholds))
    sampling.rank_logprobs(logits, _int64(num_rows))
    adjust_logits(logits, rows, positions, records, RowAdjustments(257, num_ids, torch.device("cpu")))


def _peers(num_ranks: int) -> Peers:
    base = 0x7F00_0000_0000
    bases = tuple(base + (rank << 22) for rank in range(num_ranks))
    return Peers(bases, num_ranks - 1, _int32(STATE_WORDS), base - 4096, int(600e9), 132)


def _call_all_reduce_add_norm(num_ranks: int, weight: torch.Tensor, **nodes: Any) -> None:
    for scales_offset in (None, 8192):
        all_reduce_add_norm(
            _bf16(4, len(weight)),
            weight,
            EPS,
            _peers(num_ranks),
            data_offset=4096,
            scales_offset=scales_offset,
            **nodes,
        )


def _call_shares(num_ranks: int, size: int) -> None:
    peers, areas = _peers(num_ranks), {"area_offset": 4096, "half_bytes": 8 << 20}
    gather(_int32(num_ranks, 600), _int32(600), peers, **areas)
    look_up(_int64(5), _int32(1000), _bf16(501, size), peers, **areas)


def _call_exact_products() -> None:
    """Of Qwen3-8B over one rank and four, and a rank of three, whose cover of the tree is two nodes."""
    for num_rows in (1, 64, 8192):
        for k, leaf, nodes in ((4096, 128, ((0, 32),)), (12288, 512, ((0, 24),)), (3072, 512, ((6, 12),))):
            out = torch.empty(len(nodes), num_rows, 4096)
            node_gemm(_bf16(num_rows, k), _bf16(4096, k), leaf=leaf, nodes=_spans(*nodes), out=out)
        out = torch.empty(2, num_rows, 4096)
        node_gemm(_bf16(num_rows, 4096), _bf16(4096, 4096), leaf=512, nodes=_spans((8, 9), (9, 16)), out=out)
        for k, leaf in ((600, 96), (1100, 512)):
            nodes = ((0, -(-k // leaf)),)
            node_gemm(
                _bf16(num_rows, k), _bf16(576, k), leaf=leaf, nodes=_spans(*nodes), out=torch.empty(1, num_rows, 576)
            )
        for bias, dtype in ((None, torch.bfloat16), (_bf16(1536), torch.bfloat16), (None, torch.float32)):
            chain_gemm(_bf16(num_rows, 4096), _bf16(1536, 4096), bias, out=torch.empty(num_rows, 1536, dtype=dtype))
    _call_fp8_products()
    adds = ((1, 2), (0, 4), (5, 3))
    for size, weight_of in ((576, _bf16), (4096, _bf16), (2304, torch.empty)):
        for of_nodes in (adds, ()):
            sum_add_norm(torch.empty(4 if of_nodes else 1, 4, size), of_nodes, _bf16(4, size), weight_of(size), EPS)
        _call_all_reduce_add_norm(3, weight_of(size), counts=(1, 2, 1), adds=adds)
    sum_subtrees(torch.empty(6, 4, 4096), adds, (6,), out=_bf16(1, 4, 4096), places=(0, 1, 3, 5))


def _call_fp8_products() -> None:
    """Of a rank of one and of three, whose blocks are cut, with scales of blocks, of rows, and of blocks that no step
    is made for."""
    k, weights = 4096, []
    for block, first in (((128, 128), 0), ((128, 128), 64), ((1, 4096), 0), ((24, 40), 8)):
        weights.append(Fp8Matrix.empty([block], [Span(0, 1536)], Span(first, first + k), torch.device("cpu")))
        plain(weights[-1], torch.bfloat16)
        for num_rows in (1, 4, 16, 64, 128, 256):
            fp8_gemm(_bf16(num_rows, k), weights[-1], None, out=_bf16(num_rows, 1536))
    for weight, num_rows, leaf in pairs(weights, (1, 64, 128), (None, 512, 128)):
        if leaf is None:
            chain_gemm(_bf16(num_rows, k), weight, None, out=_bf16(num_rows, 1536))
        else:
            nodes, out = ((0, k // leaf),), torch.empty(1, num_rows, 1536)
            node_gemm(_bf16(num_rows, k), weight, leaf=leaf, nodes=_spans(*nodes), out=out)
    wide = Fp8Matrix.empty([(128, 128)], [Span(0, 16384)], Span(0, k), torch.device("cpu"))
    for num_rows in (1, 4, 16, 64, 128):
        fp8_gemm(_bf16(num_rows, k), wide, _bf16(16384), out=_bf16(num_rows, 16384))


def _fp8_experts(num_experts: int, num_rows: int, num_columns: int) -> Fp8Matrix:
    """Of a rank whose first column is in the middle of a block."""
    columns = Span(64, 64 + num_columns)
    return Fp8Matrix.empty([(128, 128)], [Span(0, num_rows)], columns, torch.device("cpu"), num_experts)


def _mxfp4_experts(*shape: int) -> Mxfp4Matrix:
    return Mxfp4Matrix.empty(*shape, torch.device("cpu"))


def _call_mixture(
    num_tokens: int,
    columns: int,
    *,
    num_experts: int,
    top_k: int,
    shared: bool,
    gated: bool = True,
    scoring: routing.Scoring = routing.SOFTMAX,
    biases: grouped_experts.Biases | None = None,
    fp8: bool = False,
    mxfp4: bool = False,
    has_gate: bool = True,
) -> None:
    hidden, experts = 2048, _mxfp4_experts if mxfp4 else _fp8_experts if fp8 else _bf16
    moe.mixture(
        _bf16(num_tokens, hidden),
        _bf16(num_experts + (shared and gated), hidden),
        experts(num_experts, (1 + has_gate) * columns, hidden),
        experts(num_experts, hidden, columns),
        top_k=top_k,
        normalise=not shared,
        round_to=torch.bfloat16,
        weight_scale=1.0 if gated else 16.0,
        scoring=scoring,
        biases=biases,
        out=_bf16(num_tokens, hidden),
        slots=_int64(num_tokens),
        first_slot=64,
        shared=_bf16(num_tokens, hidden) if shared else None,
    )


def _call_exact_mixture(
    num_tokens: int,
    leaf: int,
    nodes: tuple[tuple[int, int], ...],
    *,
    num_experts: int,
    top_k: int,
    biases: grouped_experts.Biases | None = None,
    fp8: bool = False,
    has_gate: bool = True,
) -> None:
    hidden, columns, experts = 2048, leaf * nodes[-1][1], _fp8_experts if fp8 else _bf16
    logits = moe.mixture(
        _bf16(num_tokens, hidden),
        _bf16(num_experts + 1, hidden),
        experts(num_experts, (1 + has_gate) * columns, hidden),
        experts(num_experts, hidden, columns),
        leaf=leaf,
        nodes=_spans(*nodes),
        top_k=top_k,
        normalise=True,
        round_to=torch.bfloat16,
        biases=biases,
        out=torch.empty(len(nodes), num_tokens, hidden),
        slots=_int64(num_tokens),
        first_slot=64,
    )
    x = _bf16(num_tokens, (1 + has_gate) * columns)
    moe.activate_shared(x, logits, num_experts, _int64(num_tokens), 64, has_gate=has_gate)


def _row_states(num_tokens: int) -> RowStates:
    """Returns the states of four rows. With four tokens the step is a decode."""
    pool, num_rows = StatePool([], 8, 8, torch.device("cpu")), 4
    return RowStates(pool, num_tokens, num_tokens == num_rows, *(_int32(num_rows + (i == 1)) for i in range(5)))


def _call_mamba(dtype: torch.dtype, heads: int, groups: int, head_dim: int, state_size: int) -> None:
    num_tokens, columns, of_groups = 512, heads * head_dim, groups * state_size
    of_heads, slots = torch.empty(heads), torch.empty(17, columns * state_size)
    layer = MambaArgs(heads, groups, head_dim, state_size, of_heads, of_heads, of_heads, (1.0, 1.0, 0.0, math.inf))
    z, dt = torch.split(torch.empty(num_tokens, columns + heads, dtype=dtype), [columns, heads], dim=1)
    recent = torch.empty(9, 128, columns + of_groups, dtype=dtype), torch.empty(9, 128, heads)
    xbc = torch.empty(num_tokens, columns + 2 * of_groups, dtype=dtype)
    y, squares = mamba(xbc, (z, dt), layer, _row_states(num_tokens), slots, recent)
    grouped_norm(y, squares, torch.empty(columns), groups, columns // groups, EPS, dtype)


def _call_conv(dtype: torch.dtype, channels: int) -> None:
    """With and without a bias, and in a decode."""
    for num_tokens, width, bias in ((512, 4, None), (512, 3, torch.empty(channels)), (4, 4, None)):
        slots, recent = torch.empty(17, (width - 1) * channels, dtype=dtype), torch.empty(9, 32, channels, dtype=dtype)
        x = torch.empty(num_tokens, channels + 64, dtype=dtype)[:, :channels]
        states = _row_states(num_tokens)
        causal_conv(x, torch.empty(width, channels), bias, states, slots, recent, silu=bias is None)


def _call_delta(
    dtype: torch.dtype, key_heads: int, value_heads: int, dim: int, decays: int, *, is_decode: bool = False
) -> None:
    keys, values = key_heads * dim, value_heads * dim
    num_tokens, of_kind = (4, delta) if is_decode else (512, delta if decays == 1 else kimi_delta)
    widths = [values, value_heads, value_heads * decays]
    z, b, a = torch.split(torch.empty(num_tokens, sum(widths), dtype=dtype), widths, dim=1)
    parameters = torch.empty(value_heads), torch.empty(value_heads * decays), torch.empty(dim)
    layer = DeltaArgs(key_heads, value_heads, dim, dim, decays, decays > 1, EPS, *parameters)
    recent_keys, recent_values = (torch.empty(9, 128, it, dtype=dtype) for it in (keys, values))
    recent = recent_keys, recent_values, torch.empty(9, 128, value_heads * decays)
    slots, qkv = torch.empty(17, values * dim), torch.empty(num_tokens, 2 * keys + values, dtype=dtype)
    of_kind.delta_net(qkv, (z, b, a), layer, _row_states(num_tokens), slots, recent)


def _call_everything() -> None:
    """As production does, in bf16: what `configs` names has heads of 64 and 128, and these row lengths; of Gemma, heads
    of 256 and norms' weights in fp32."""
    for page_size in (16, 64):
        _call_step_metadata(page_size)
    for size in (576, 4096, 8192):
        rms_norm(_bf16(4, size), _bf16(size), EPS)
        add_rms_norm(_bf16(4, size), _bf16(4, size), _bf16(size), EPS)
    rms_norm(_bf16(4, 2304), torch.empty(2304), EPS)
    add_rms_norm(_bf16(4, 2304), _bf16(4, 2304), torch.empty(2304), EPS)
    fill(_bf16(4, 1536), (1, -2), 0.1, 0.0, Span(0, 4), Span(0, 1536), torch.bfloat16)
    mul_sigmoid_(_bf16(4, 4096), _bf16(4, 4096))
    for dtype in (torch.bfloat16, torch.float32):
        _call_conv(dtype, 8192)
        # Qwen3.5-9B, and Kimi-Linear.
        for is_decode in (False, True):
            _call_delta(dtype, 16, 32, 128, 1, is_decode=is_decode)
        _call_delta(dtype, 32, 32, 128, 128)
        # Nemotron 3 Nano, Nemotron Nano 2, and Falcon-H1 34B.
        for sizes in ((64, 8, 64, 128), (128, 8, 80, 128), (32, 2, 128, 256)):
            _call_mamba(dtype, *sizes)
    for activation in ("silu", "gelu", "gelu_tanh"):
        act_and_mul(_bf16(4, 2 * 1536), activation)
    for num_rows in (16, 256):
        act_and_mul_in_fp8(_bf16(num_rows, 2 * 1536), "silu", Groups(0, 128, 0, 1))
        add_rms_norm_in_fp8(_bf16(num_rows, 4096), _bf16(num_rows, 4096), _bf16(4096), EPS, Groups(0, 128, 0, 1))
    for head_dim in (64, 128):
        _call_qk_norm_rope_store(head_dim, head_dim, None)
        _call_qk_norm_rope_store(head_dim, head_dim, _bf16(head_dim))
    _call_qk_norm_rope_store(256, 256, torch.empty(256))
    _call_qk_norm_rope_store(256, 64, torch.empty(256))
    # Batches for which keys are split and not, in blocks of 64 and of 32: see decode.choose.
    for batch_size, head_dim, page_size in pairs((4, 16, 32, 64), (64, 128), (16, 64)):
        _call_decode(batch_size, page_size, _layer(head_dim))
    for batch_size, features in itertools.product((4, 64), ATTENTION_FEATURES):
        _call_decode(batch_size, 64, _layer(128, **features))
    for head_dim, group, dtype in ((128, 48, torch.bfloat16), (256, 20, torch.bfloat16), (256, 4, torch.float32)):
        _call_decode(4, 16, _layer(head_dim, group=group), dtype)
    for head_dim, page_size in itertools.product((64, 96, 128, 256), (16, 64)):
        _call_extend(page_size, _layer(head_dim))
    for features in ATTENTION_FEATURES:
        _call_extend(64, _layer(128, **features))
    for head_dim in (128, 256):
        _call_extend(16, _layer(head_dim), is_part=True)
        _call_extend(16, _layer(head_dim), torch.float32)
    for head_dim in (64, 96, 256):
        _call_exact(4, 64, _layer(head_dim))
    for num_tokens, page_size in ((4, 16), (64, 64)):  # decodes that are cut into runs, and that are not
        _call_exact(num_tokens, page_size, _layer(128))
    for features in ATTENTION_FEATURES:
        _call_exact(4, 64, _layer(128, **features))
    _call_exact(4, 64, _layer(128, group=20), torch.bfloat16, FP8)
    _call_exact(4, 64, _layer(256), torch.float32)
    for num_heads, page_size, dtype in (
        (16, 16, torch.bfloat16),
        (16, 64, torch.bfloat16),
        (5, 64, torch.bfloat16),
        (32, 64, torch.bfloat16),
        (128, 64, torch.bfloat16),
        (16, 64, torch.float32),
    ):
        _call_latent(num_heads, page_size, dtype)
    for num_heads in (16, 128):
        _call_latent(num_heads, 64, kv_dtype=FP8)
    for num_heads in (16, 128):  # the chosen keys of sparse attention are pages of one slot
        _call_latent(num_heads, 1)
    for num_heads, dtype in ((64, torch.bfloat16), (32, torch.bfloat16), (64, torch.float32)):
        _call_choice_of_keys(num_heads, dtype)
    _call_qk_norm_rope_store(128, 128, None, FP8)
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 96, 128, 256)):
        _call_extend(64, _layer(head_dim, window=4096), dtype, FP8)
    # The widest heads take the most shared memory.
    dtypes, batch_sizes = (torch.bfloat16, torch.float16, torch.float32), (4, 16, 64)
    for dtype, head_dim, batch_size in (
        *pairs(dtypes, (64, 96, 128), batch_sizes),
        *itertools.product(dtypes, (256,), batch_sizes),
    ):
        _call_decode(batch_size, 16, _layer(head_dim, softcap=50.0, sinks=True), dtype, FP8)
    _call_decode(4, 64, _layer(128, group=48), kv_dtype=FP8)
    for first_id, num_ids in ((0, 49152), (75968, 75968), (101290, 50646)):
        _call_sampler(first_id, num_ids)
    for num_rows, in_features, dtype in pairs((1, 2, 16), (4096, 6400), (torch.bfloat16, torch.float32)):
        out = torch.empty(num_rows, 1536, dtype=dtype)
        skinny_gemm(_bf16(num_rows, in_features), _bf16(1536, in_features), None, out=out)
    skinny_gemm(_bf16(2, 4096), _bf16(1536, 4096), _bf16(1536), out=_bf16(2, 1536))
    # As many tokens for the experts as take each of the tiles.
    for num_tokens in (1, 16, 256, 1024, 8192):
        _call_mixture(num_tokens, 768, num_experts=128, top_k=8, shared=False)
        _call_mixture(num_tokens, 768, num_experts=128, top_k=8, shared=False, fp8=True)
    for num_tokens in (1, 64):
        _call_mixture(num_tokens, 480, num_experts=60, top_k=4, shared=True)
        _call_mixture(num_tokens, 704, num_experts=64, top_k=6, shared=True, gated=False)
        # DeepSeek-V3 on eight ranks, GLM-4.5-Air, and Llama 4 Scout.
        v3 = routing.Scoring(True, torch.empty(256), 8, 4)
        _call_mixture(num_tokens, 256, num_experts=256, top_k=8, shared=True, gated=False, scoring=v3)
        air, llama4 = routing.Scoring(True, torch.empty(128)), routing.Scoring(True, scales_input=True)
        _call_mixture(num_tokens, 352, num_experts=128, top_k=8, shared=True, gated=False, scoring=air)
        _call_mixture(num_tokens, 1024, num_experts=16, top_k=1, shared=True, gated=False, scoring=llama4)
    # Nemotron 3 Nano, without gates.
    for num_tokens, fp8 in itertools.product((1, 64, 8192), (False, True)):
        nano = {"num_experts": 128, "top_k": 6, "fp8": fp8, "has_gate": False}
        _call_mixture(num_tokens, 1856, shared=True, gated=False, scoring=air, **nano)
        _call_exact_mixture(num_tokens, 64, ((0, 29),), **nano)
    # Qwen3-30B-A3B with all of the tiles, and Mixtral's leaves.
    for num_tokens in (1, 16, 256, 1024, 8192):
        _call_exact_mixture(num_tokens, 64, ((0, 12),), num_experts=128, top_k=8)
        _call_exact_mixture(num_tokens, 64, ((0, 12),), num_experts=128, top_k=8, fp8=True)
    # gpt-oss-20b on one rank and on two; the router's biases are one more here, as the gate is.
    of_two = [
        grouped_experts.Biases(torch.empty(33), _bf16(32, 2880), it, 7.0, 1.702) for it in (_bf16(32, 2048), None)
    ]
    for num_tokens, biases in itertools.product((1, 64), of_two):
        _call_mixture(num_tokens, 1440, num_experts=32, top_k=4, shared=False, biases=biases)
        _call_exact_mixture(num_tokens, 64, ((0, 22),), num_experts=32, top_k=4, biases=biases)
    for num_tokens in (1, 16, 128, 1024, 8192):  # each of the tiles, on four ranks
        _call_mixture(num_tokens, 736, num_experts=32, top_k=4, shared=False, biases=of_two[0], mxfp4=True)
    for num_tokens in (1, 8192):
        _call_exact_mixture(num_tokens, 512, ((0, 1), (1, 28)), num_experts=8, top_k=2)
    for num_ranks, size in itertools.product((2, 3, 4), (576, 4096)):
        _call_all_reduce_add_norm(num_ranks, _bf16(size))
        _call_shares(num_ranks, size)
    _call_all_reduce_add_norm(2, torch.empty(2304))
    _call_exact_products()


def _call_widest() -> None:
    """What takes the most shared memory of each kernel that chooses tiles, on some of the GPUs."""
    for dtype, batch_size, kv_dtype in pairs((torch.bfloat16, torch.float32), (4, 16, 64), (None, FP8)):
        _call_decode(batch_size, 64, _layer(256), dtype, kv_dtype)
    _call_decode(4, 64, _layer(256, group=20))
    for num_heads, dtype in ((128, torch.bfloat16), (16, torch.float32)):
        _call_latent(num_heads, 64, dtype)
    for kv_dtype in (None, FP8):
        _call_extend(64, _layer(256), kv_dtype=kv_dtype)
        _call_exact(64, 64, _layer(256), torch.bfloat16, kv_dtype)
    for head_dim in (128, 256):
        _call_extend(16, _layer(head_dim), is_part=True)
    for dtype in (torch.bfloat16, torch.float32):
        _call_mamba(dtype, 32, 2, 128, 256)
        _call_delta(dtype, 32, 32, 128, 128)
    for fp8 in (False, True):
        _call_mixture(8192, 768, num_experts=128, top_k=8, shared=False, fp8=fp8)
        _call_exact_mixture(8192, 64, ((0, 12),), num_experts=128, top_k=8, fp8=fp8)
    _call_mixture(8192, 736, num_experts=32, top_k=4, shared=False, mxfp4=True)
    weight = Fp8Matrix.empty([(128, 128)], [Span(0, 1536)], Span(0, 4096), torch.device("cpu"))
    for num_rows, of in itertools.product((128, 8192), (weight, _bf16(1536, 4096))):
        out = torch.empty(1, num_rows, 1536)
        node_gemm(_bf16(num_rows, 4096), of, leaf=512, nodes=_spans((0, 8)), out=out)
    for num_rows in (64, 256):
        fp8_gemm(_bf16(num_rows, 4096), weight, None, out=_bf16(num_rows, 1536))


class _Gpu:
    """The driver of no device. Triton asks it nothing else before a launch."""

    def __init__(self, capability: Capability) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _name(kernel: Any) -> str:
    return f"{kernel.__module__}.{kernel.__name__}"


def _all_kernels() -> set[str]:
    """What Triton may compile and no other such function calls: only the host can launch it."""
    functions, called = set(), set()
    for path in [*ROOT.glob("*/kernels/*.py"), *ROOT.glob("*/*/kernels/*.py")]:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                functions.add(_name(function))
                names = (node.id for node in ast.walk(function.parse()) if isinstance(node, ast.Name))
                called |= {_name(it) for it in map(function.__globals__.get, names) if isinstance(it, JITFunction)}
    return functions - called


def _layouts_of_sums(ir: str) -> list[tuple[str, str]]:
    """Length and layout of what a kernel in Triton's GPU dialect reduces."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ir, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<(\d+)xf32, (#\w+)>\)', ir, re.DOTALL)
    return [(length, layouts[layout]) for length, layout in reduced]


def _is_refused(args: Sequence[Any], options: Mapping[str, Any], capability: Capability) -> bool:
    """Whether `configs.resolve` refuses what launches this kernel: FP8 on old GPUs, and exact numerics over FP8."""
    tensors = (it.base if isinstance(it, TensorDescriptor) else it for it in args)
    is_fp8 = any(isinstance(it, torch.Tensor) and it.dtype is FP8 for it in tensors)
    is_exact = options.get("FORMAT") is not None and "num_stages" in options
    return (is_fp8 and capability < FP8_FROM) or (is_exact and capability[0] == 10)


def _compile_everything(capability: Capability) -> Report:
    compiling: list[tuple[str, Any]] = []
    shared_bytes, calls_all = COMPILED[capability], [capability == H200]

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            name = _name(kernel)
            is_wanted = calls_all[0] or name not in (it for it, _ in compiling)
            if is_wanted and not _is_refused(args, kwargs, capability):
                compiling.append((name, kernel.run(*args, grid=grid, warmup=True, **kwargs)))

        return launch

    triton.runtime.driver.set_active(_Gpu(capability))
    mark_compilations()  # has Triton describe every one of them
    KernelInterface.__getitem__ = compile_only
    for module in list(sys.modules.values()):
        # They ask about CUDA tensors, which there are none of here.
        for name in ("has_dependent_launch", "is_dependent"):
            if hasattr(module, name):
                setattr(module, name, lambda *of: capability >= H200)
        if hasattr(module, "shared_bytes"):
            module.shared_bytes = lambda *of: shared_bytes
        if hasattr(module, "is_b200"):
            module.is_b200 = lambda *of: capability[0] == 10
    errors: dict[str, list[str]] = {}
    reductions: dict[str, dict[str, set[str]]] = {}
    fp8_widths: set[str] = set()
    fp8_dots: set[str] = set()
    mxfp4_in_place: dict[str, bool] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        _call_everything()
        if capability != H200:
            calls_all[0] = True
            _call_widest()
        for kernel, compilation in dict.fromkeys(compiling):
            said = errors.setdefault(kernel, [])
            try:
                compiled = compilation.result()
                if compiled.metadata.shared > shared_bytes:
                    said.append(f"takes {compiled.metadata.shared} bytes of shared memory")
                if "mov.b32 $0, $1;" in compiled.asm["ttgir"]:  # of `plain_tile`
                    fp8_widths.update(re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"]))
                if kernel.endswith("._fp8_gemm_kernel"):
                    dots = re.findall(r"(mma\.sync|wgmma\.mma_async)\.\S*f32\.(\w+)\.", compiled.asm["ptx"])
                    fp8_dots.update(" ".join(it) for it in dots)
                unpacked = re.findall(r"fma\.rn\.bf16x2.*-> (tensor.*)", compiled.asm["ttgir"])
                if unpacked and "warp_group_dot" not in compiled.asm["ttgir"]:
                    is_in_place = all("#blocked" not in tile for tile in unpacked)
                    mxfp4_in_place[kernel] = mxfp4_in_place.get(kernel, True) and is_in_place
                for length, layout in _layouts_of_sums(compiled.asm["ttgir"]) if kernel.endswith(NORMS) else ():
                    reductions.setdefault(length, {}).setdefault(layout, set()).add(kernel)
            except Exception as error:  # noqa: BLE001 -- the report of all kernels names it
                said.append("".join(traceback.format_exception(error, limit=-1)))
    ordered = {length: {layout: sorted(it) for layout, it in by.items()} for length, by in reductions.items()}
    return Report(sorted(_all_kernels()), errors, ordered, sorted(fp8_widths), sorted(fp8_dots), mxfp4_in_place)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asdict(_compile_everything((int(sys.argv[2]), int(sys.argv[3]))))))
