"""Keys and values in FP8: how they are stored, what backends read of them, and what a model's logits make of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.kernels.decode import DecodeTuning, paged_decode
from attention.kernels.extend import ExtendTuning, paged_extend
from attention.kv_pool import FP8, ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer
from attention.torch_native import TorchNativeBackend
from attention.triton_backend import TritonBackend
from configs.errors import CheckpointError
from configs.kv_pages import dtype_bytes
from configs.schema import EngineConfig, KVCacheConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.helpers.batches import batch_of
from tests.helpers.families import FAMILIES, Case, random_case
from tests.helpers.family_checks import Rank, random_tokens
from tests.helpers.paged_case import PagedCase
from tests.helpers.rank_threads import on_ranks
from tests.worker.test_kernels import NUM_SLOTS, Heads
from worker.kernels.rope import latent_norm_rope_store
from worker.models.decoder import Decoder
from worker.weights.checkpoint import Checkpoint

CPU, DTYPE = torch.device("cpu"), torch.float32
SCALES = {"k_scale": 0.03, "v_scale": 0.7}
ROWS = [(0, 1), (15, 1), (0, 17), (33, 9), (150, 1)]
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "no scales": {"k_scale": 1.0, "v_scale": 1.0},
    "all": {"window": 20, "chunk": 32, "softcap": 2.0, "sinks": True},
}


def _layer(device: torch.device, *, head_dim: int = 64, sinks: bool = False, **features: Any) -> AttentionLayer:
    given = {"layer_id": 0, "tp_q_head_num": 6, "tp_k_head_num": 2, "head_dim": head_dim, "scale": 0.11, **SCALES}
    values = torch.linspace(-1.0, 3.0, 6, device=device) if sinks else None
    return AttentionLayer(**{**given, **features}, sinks=values)


def _case(layer: AttentionLayer, device: torch.device, rows: list[tuple[int, int]], **changes: Any) -> PagedCase:
    return PagedCase(layer, 16, rows, device, kv_dtype=FP8, **changes)


def _awkward() -> torch.Tensor:
    """Every number of FP8, what is halfway between two of them and next to that, and what is no number of it."""
    of_fp8 = torch.arange(256, dtype=torch.uint8).view(FP8).float().nan_to_num(448.0).unique()
    halfway = (of_fp8[1:] + of_fp8[:-1]) / 2
    others = torch.tensor([-0.0, 1e-9, 2.0**-10, 3 * 2.0**-11, 449.0, 480.0, 1e30, math.inf, math.nan])
    beside = [torch.nextafter(halfway, torch.full_like(halfway, end)) for end in (-math.inf, math.inf)]
    values = torch.cat([of_fp8, halfway, *beside, others, -others])
    return torch.nn.functional.pad(values, (0, -len(values) % 64))


def _expected_bytes(values: torch.Tensor, scale: float) -> torch.Tensor:
    """By plain arithmetic: the nearest number, of two the even one."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    exact = (values.float() / scale).double()
    distances = (exact.abs().clamp(max=448.0)[..., None] - numbers).abs()
    best = distances == distances.min(-1, keepdim=True).values
    even = best & (torch.arange(127) % 2 == 0)
    code = torch.where(even.any(-1), even.int().argmax(-1), best.int().argmax(-1))
    code = torch.where(exact.isnan(), 0x7F, code)
    return (code + 128 * exact.signbit()).to(torch.uint8)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.037])
def test_both_stores_round_to_the_nearest_and_stop_at_the_largest(scale: float, device: torch.device) -> None:
    """Keys are turned by nothing, at position 0."""
    v = _awkward().view(-1, 64) * scale
    k, num_tokens = v.roll(1, 0).nan_to_num(3.0, 1e30, -1e30), len(v)
    heads = Heads(1, 1, 64, list(range(num_tokens)), norm=False, device=device.type, dtype=torch.float32)
    heads.positions.zero_()
    heads.cos_sin[0] = torch.tensor([1.0, 0.0]).repeat_interleave(32)
    heads.k_slots, heads.v_slots = (torch.zeros(num_tokens, 64, dtype=FP8, device=device) for _ in range(2))
    heads.run(torch.cat([k, k, v], dim=1).to(device), k_scale=2 * scale, v_scale=scale)
    layer = _layer(device, tp_q_head_num=1, tp_k_head_num=1, k_scale=2 * scale, v_scale=scale)
    # By torch on the CPU: on a GPU it multiplies by the rounded inverse, and does not store there.
    sizes = {"num_pages": num_tokens - 1, "page_size": 1}
    pool = TokenToKVPool([layer], dtype=FP8, compute_dtype=torch.float32, device=CPU, **sizes)
    pool.set_kv(0, heads.out_cache_loc.cpu(), k, v)
    stores = zip((heads.k_slots, heads.v_slots), pool.slots(0), (k, v), (2 * scale, scale), strict=True)
    for by_kernel, by_torch, values, factor in stores:
        expected = _expected_bytes(values, factor)
        told = ~values.isnan() if values is v else values != 0  # a rotation does not keep the sign of zero
        for stored in (by_kernel, by_torch):
            assert torch.equal(stored.view(torch.uint8).cpu()[told], expected[told])
            assert bool((stored.float().cpu().isnan() == values.isnan()).all())


def test_norms_and_rotation_come_before_the_store_and_no_other_slot_is_written(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    heads = Heads(9, 3, 128, [5, 12, 1, -1], norm=True, device=device.type, dtype=dtype, rotary_dim=64)
    heads.k_slots, heads.v_slots = (torch.full((NUM_SLOTS, 384), 7.0, device=device).to(FP8) for _ in range(2))
    _, k, v = heads.expected()
    heads.run(qkv := heads.qkv.clone(), **SCALES)
    plain = Heads(9, 3, 128, [5, 12, 1, -1], norm=True, device=device.type, dtype=dtype, rotary_dim=64)
    plain.run(other := plain.qkv.clone())
    assert torch.equal(qkv, other)
    for slots, expected, scale in ((heads.k_slots, k, SCALES["k_scale"]), (heads.v_slots, v, SCALES["v_scale"])):
        # Half a step of three bits, and of the smallest numbers.
        torch.testing.assert_close(slots[[5, 12, 1]].float() * scale, expected[:3], rtol=1 / 16, atol=scale * 2.0**-10)
        others = [slot for slot in range(NUM_SLOTS) if slot not in (5, 12, 1)]
        assert bool((slots[others].float() == 7.0).all())


def test_latents_are_stored_as_both_stores_round_them(device: torch.device) -> None:
    """The kernel's numbers of fp32, which it stores as they are in fp32."""
    heads = Heads(1, 1, 8, [5, 12, 1, -1], norm=False, device=device.type, dtype=torch.float32)  # for its angles
    kept, weight = 40 * torch.randn(4, 40, device=device), torch.randn(32, device=device)
    plain, in_fp8 = (torch.full((NUM_SLOTS, 40), 7.0, device=device).to(dtype) for dtype in (torch.float32, FP8))
    for slots in (plain, in_fp8):
        latent_norm_rope_store(
            torch.randn(4, 3, 20, device=device),
            kept,
            weight=weight,
            eps=1e-6,
            cos_sin=heads.cos_sin,
            positions=heads.positions,
            slots=slots,
            out_cache_loc=heads.out_cache_loc,
            scale=0.037,
        )
    written = [5, 12, 1]
    expected = _expected_bytes(plain[written].cpu(), 0.037)
    assert torch.equal(in_fp8[written].view(torch.uint8).cpu(), expected)
    others = [slot for slot in range(NUM_SLOTS) if slot not in written]
    assert bool((in_fp8[others].float() == 7.0).all())


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("features", list(FEATURES))
def test_the_decode_kernel_attends_over_what_the_pool_holds(
    features: str, num_splits: int, device: torch.device
) -> None:
    lens = [1, 130, 16, 65, 64, 33]
    case = _case(_layer(device, **FEATURES[features]), device, [(length - 1, 1) for length in lens])
    q, paged = case.queries(range(len(lens))), case.paged(range(len(lens)))
    out = torch.full(q.shape, math.nan, dtype=case.dtype, device=device)
    tuning = DecodeTuning(block_n=32, num_warps=2, num_stages=3, num_splits=num_splits)
    paged_decode(q, case.k, case.v, paged, case.layer, out=out, tuning=tuning)
    case.check(out)


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("features", list(FEATURES))
def test_the_extend_kernel_attends_over_what_the_pool_holds(
    features: str, dtype: torch.dtype | None, device: torch.device
) -> None:
    case = _case(_layer(device, **FEATURES[features]), device, ROWS, dtype=dtype)
    q, paged = case.queries(range(len(ROWS))), case.paged(range(len(ROWS)))
    out = torch.full(q.shape, math.nan, dtype=case.dtype, device=device)
    tuning = ExtendTuning(block_m=64, block_n=32, num_warps=4, num_stages=2)
    paged_extend(q, case.k, case.v, paged, case.layer, out=out, tuning=tuning)
    case.check(out)


@pytest.mark.parametrize("backend", [TorchNativeBackend, TritonBackend])
@pytest.mark.parametrize("features", list(FEATURES))
@pytest.mark.parametrize(
    "rows",
    [pytest.param(ROWS[:2], marks=pytest.mark.slow), pytest.param(ROWS[2:4], marks=pytest.mark.slow), ROWS],
    ids=["decode", "extend", "mixed"],
)
def test_backends_attend_over_what_the_pool_holds(
    rows: list[tuple[int, int]],
    features: str,
    backend: type[TorchNativeBackend] | type[TritonBackend],
    device: torch.device,
) -> None:
    case = _case(_layer(device, **FEATURES[features]), device, rows)
    sizes = {"num_pages": len(case.k) - 1, "page_size": 16}
    pool = TokenToKVPool([case.layer], dtype=FP8, compute_dtype=case.dtype, device=device, **sizes)
    for pages, written in zip(pool.pages(0), (case.k, case.v), strict=True):
        pages.copy_(written)
    table = ReqToTokenPool(len(rows), case.table.shape[1], device)
    table.page_table[1:] = case.table[:-1].clamp(max=sizes["num_pages"])
    attention = backend([case.layer], pool)
    attention.init_forward_metadata(batch_of(table, [(i + 1, *lens) for i, lens in enumerate(rows)], 16))
    q = case.queries(range(len(rows))).flatten(1)
    case.check(attention.attend(q, case.layer).view(-1, 6, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("batch_size", [1, 4, 16, 60])
def test_as_they_tune_themselves_both_kernels_fit(batch_size: int, head_dim: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    layer = _layer(device, head_dim=head_dim)
    lens = torch.randint(0, 700, (batch_size,), generator=torch.Generator().manual_seed(2)).tolist()
    for extend, kernel in ((1, paged_decode), (9, paged_extend)):
        case = _case(layer, device, [(length, extend) for length in lens], dtype=dtype)
        q = case.queries(range(batch_size))
        out = torch.full(q.shape, math.nan, dtype=dtype, device=device)
        kernel(q, case.k, case.v, case.paged(range(batch_size)), layer, out=out)
        case.check(out)


@pytest.mark.gpu
def test_queries_that_fp16_does_not_hold_give_finite_answers() -> None:
    """They, and weights, are of fp16 in products with FP8."""
    device = torch.device("cuda")
    case = _case(_layer(device, scale=1e-6, k_scale=1.0), device, [(40, 1), (0, 9)])
    q = 1e5 * case.queries(range(2))
    assert q.dtype is torch.bfloat16
    for rows, kernel in ((1, paged_decode), (2, paged_extend)):
        some = q[: 1 if rows == 1 else None]
        out = kernel(some, case.k, case.v, case.paged(range(rows)), case.layer, out=torch.full_like(some, math.nan))
        assert bool(out.isfinite().all())


# A model.


@pytest.fixture(scope="module", params=["llama", "mistral_window"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    return random_case(family.model_type, family.config, tmp_path_factory.mktemp(request.param), factor=1.0)


def _with(path: Path, name: str, value: torch.Tensor, tmp_path: Path) -> Path:
    """A copy of the checkpoint with a factor `name` of keys and of values in every layer; `name` has a k for both."""
    tensors = load_file(path / "model.safetensors")
    scales = {
        f"model.layers.{i}.self_attn.{name.replace('k_', f'{it}_')}": value.clone() for i in range(3) for it in "kv"
    }
    save_file(tensors | scales, tmp_path / "model.safetensors")
    return tmp_path


def _logits(case: Case, kv_dtype: torch.dtype | None, tp_size: int = 1) -> list[torch.Tensor]:
    """Of a prompt; of the same prompt in chunks and token by token."""
    ids = random_tokens(1)

    def body(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group, kv_dtype=kv_dtype)
        cuts = [(0, 11), (11, 30), *((i, i + 1) for i in range(30, len(ids)))]
        pieces = [rank.logits([(2, start, ids[start:stop])])[0] for start, stop in cuts]
        return [rank.logits([(1, 0, ids)])[0], torch.cat(pieces)]

    results = on_ranks(tp_size, body)
    assert all(torch.equal(ours, first) for result in results for ours, first in zip(result, results[0], strict=True))
    return results[0]


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


def test_logits_err_by_a_few_percent_and_alike_for_every_number_of_ranks(case: Case) -> None:
    """Of their standard deviation: by 1.8 and 2.1 %, where bf16 throughout errs by 0.7 %."""
    exact, _ = _logits(case, None)
    whole, pieces = _logits(case, FP8)
    spread = float(exact.std())
    assert 0.005 * spread < _rms(whole - exact) < 0.04 * spread
    for others in (pieces, *_logits(case, FP8, 2), *_logits(case, FP8, 3)):
        # But for a key that fp32 puts on the other side of a number's border.
        assert _rms(others - whole) < 1e-3 * spread


@pytest.mark.parametrize("name", ["k_scale", "k_proj.k_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_factors_come_from_the_checkpoint_under_either_name(
    name: str, shape: tuple[int, ...], case: Case, tmp_path: Path
) -> None:
    """Of a power of two nothing is rounded otherwise, but what leaves the range of FP8."""
    path = _with(case.path, name, torch.full(shape, 0.25, dtype=torch.bfloat16), tmp_path)
    with_factors = Case(case.hf, path, case.model)
    with Checkpoint.open(path, case.model) as checkpoint:
        assert checkpoint.kv_scales() == [(0.25, 0.25)] * 3
    exact, plain, scaled = (_logits(*it)[0] for it in ((case, None), (case, FP8), (with_factors, FP8)))
    assert not torch.equal(scaled, plain), "small numbers have more bits by a quarter"
    assert _rms(scaled - exact) < 1.1 * _rms(plain - exact)
    assert torch.equal(_logits(with_factors, None)[0], exact), "in fp32 they have no effect"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"k_scale has shape \[2\]; kv_cache.dtype=fp8_e4m3 takes one factor .* Choose .*dtype=auto"),
        (torch.tensor(-1.0), "k_scale is -1.0, not a valid factor"),
        (torch.tensor(math.nan), "k_scale is nan, not a valid factor"),
    ],
)
def test_refuses_factors_that_differ_by_head_or_are_none(
    value: torch.Tensor, message: str, case: Case, tmp_path: Path
) -> None:
    path = _with(case.path, "k_scale", value, tmp_path)
    with Checkpoint.open(path, case.model) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.kv_scales()


def test_the_pool_takes_one_byte_an_element_as_the_plan_and_the_steps_cost_say(case: Case) -> None:
    plan = ShardPlan.create(case.model, 2)
    layers = Decoder(
        case.model, plan, TensorParallelGroup(rank=0, size=2, device=CPU, collectives=None), dtype=DTYPE, device=CPU
    ).attention_layers
    pool = TokenToKVPool(layers, num_pages=7, page_size=4, dtype=FP8, compute_dtype=DTYPE, device=CPU)
    assert sum(it.nbytes for layer in layers for it in pool.pages(layer.layer_id)) == 8 * sum(
        plan.kv_page_bytes(
            0, EngineConfig(model="a/b", kv_cache=KVCacheConfig(dtype="fp8_e4m3", page_size=4), dtype="bfloat16")
        )
    )
    of_bf16, of_fp8 = (StepCost.of(plan, 2, kv_element_bytes=dtype_bytes(it)) for it in ("bfloat16", "fp8_e4m3"))
    assert of_bf16 == StepCost.of(plan, 2)
    assert [it.bytes_per_token for it in of_bf16.attention] == [2 * it.bytes_per_token for it in of_fp8.attention]
    assert dataclasses.replace(of_fp8, attention=of_bf16.attention) == of_bf16
