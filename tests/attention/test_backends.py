"""Which backend serves what: the table, what `auto` makes of it, and two backends over one pool."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention import registry
from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch, Int32Array, NewTokenMask
from attention.hybrid import HybridBackend
from attention.kv_pool import FP8, ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer
from attention.registry import create_backend, needs_of
from attention.step_shape import StepShape
from configs.attention import (
    BACKENDS,
    AttentionNeeds,
    Feature,
    LatentShape,
    check_backend,
    choose_backend,
    installed_packages,
)
from configs.attention_times import LATENT, StepTimes, read_times, write_times
from configs.errors import ConfigError
from configs.schema import AttentionConfig
from tests.conftest import ROOT
from tests.helpers.batches import batch_of
from tests.helpers.latent_case import layer_of

HOPPER = AttentionNeeds(
    device="cuda",
    compute_capability=(9, 0),
    dtype="bfloat16",
    page_size=16,
    head_dims=frozenset({128}),
    features=frozenset(),
)
CPU = dataclasses.replace(HOPPER, device="cpu", compute_capability=None, dtype="float32")


def needs(base: AttentionNeeds = HOPPER, **changes: Any) -> AttentionNeeds:
    return dataclasses.replace(base, **changes)


def test_every_backend_of_the_table_is_there_and_can_be_named() -> None:
    assert {name: it.plans_on_host for name, it in registry.IMPLEMENTATIONS.items()} == {
        name: spec.plans_on_host for name, spec in BACKENDS.items()
    }
    for field in ("backend", "prefill_backend", "decode_backend"):
        for name in BACKENDS:
            assert getattr(AttentionConfig(**{field: name}), field) == name


FLASHINFER = ("flashinfer",)


def latent(num_heads: int) -> AttentionNeeds:
    latents = frozenset({LatentShape(num_heads, 512, 64)})
    return needs(features=frozenset({Feature.LATENT}), latents=latents, head_dims=frozenset({192}))


@pytest.mark.parametrize(
    ("asked", "prefill", "decode"),
    [
        (HOPPER, "fa3", "triton"),
        (needs(compute_capability=None), "flashinfer or triton", "triton"),
        (needs(compute_capability=(8, 0)), "flashinfer or triton", "triton"),
        (needs(compute_capability=(7, 5)), "triton", "triton"),
        (needs(compute_capability=(10, 0)), "flashinfer or triton", "triton"),
        (needs(features=frozenset({Feature.WINDOW})), "fa3", "triton"),
        (needs(features=frozenset({Feature.SOFTCAP})), "flashinfer or triton", "triton"),
        (needs(features=frozenset({Feature.SINKS, Feature.CHUNK})), "fa3", "triton"),
        (needs(features=frozenset({Feature.SINKS, Feature.SOFTCAP})), "triton", "triton"),
        (needs(features=frozenset({Feature.MASK})), "flashinfer or triton", "triton"),
        (needs(head_dims=frozenset({64, 512})), "torch_native", "torch_native"),
        (needs(head_dims=frozenset()), "fa3", "triton"),  # no layer has attention
        (latent(8), "triton", "triton"),
        (latent(32), "triton", "triton"),
        (latent(64), "triton", "flashinfer or triton"),
        (latent(128), "triton", "flashinfer or triton"),
        (latent(96), "triton", "flashinfer or triton"),
        (latent(144), "triton", "triton"),
        (needs(features=frozenset({Feature.FP8_KV})), "triton", "triton"),
        (needs(features=frozenset({Feature.FP8_KV}), compute_capability=(8, 6)), "torch_native", "torch_native"),
        (needs(features=frozenset({Feature.FP8_KV}), compute_capability=None), "triton", "triton"),
        (needs(features=frozenset({Feature.EXACT})), "triton", "triton"),
        (needs(dtype="float32"), "triton", "triton"),
        (CPU, "cpu", "cpu"),
        (needs(CPU, features=frozenset({Feature.EXACT})), "cpu", "cpu"),
        (needs(CPU, features=frozenset({Feature.LATENT, Feature.EXACT})), "cpu", "cpu"),
    ],
)
def test_auto_takes_the_fastest_that_can_and_is_there(asked: AttentionNeeds, prefill: str, decode: str) -> None:
    """Where there are two, the first is taken where FlashInfer is installed."""
    for phase, names in (("prefill", prefill.split(" or ")), ("decode", decode.split(" or "))):
        assert choose_backend(phase, asked, FLASHINFER)[0] == names[0]
        assert choose_backend(phase, asked)[0] == names[-1]


@pytest.mark.parametrize(
    ("has_package", "compiler", "found"),
    [(1, 1, {"flashinfer", "sgl_kernel"}), (1, 0, {"sgl_kernel"}), (0, 1, set())],
)
def test_a_package_counts_where_its_kernels_can_be_compiled(
    has_package: bool, compiler: bool, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_package else None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvcc" if compiler else None)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert installed_packages() == found


def test_auto_says_what_it_passed_over_and_why() -> None:
    _, why = choose_backend("prefill", needs(features=frozenset({Feature.MASK})))
    assert why == "sm90, bfloat16; fa3 has no masks over new tokens; flashinfer is not installed, or nvcc is not"
    without = dataclasses.replace(BACKENDS["fa3"], features=frozenset())
    asked = needs(features=frozenset({Feature.SINKS, Feature.CHUNK}))
    assert without.refusal(asked) == "has no chunked local attention and no sinks"
    _, why = choose_backend("prefill", needs(features=frozenset({Feature.SOFTCAP})))
    assert why == "sm90, bfloat16; fa3 has soft cap in some builds only; flashinfer is not installed, or nvcc is not"
    _, why = choose_backend("prefill", needs(compute_capability=(8, 6)), FLASHINFER)
    compared = "triton takes 1.19 times as long in 27 steps measured on sm90"
    assert why == f"sm86, bfloat16; fa3 needs compute capability 9.0, and this is 8.6; {compared}"
    _, why = choose_backend("prefill", needs(features=frozenset({Feature.FP8_KV})))
    assert why == "sm90, bfloat16; fa3 has no FP8 KV cache (it would round queries to FP8 as well)"
    steps = "16 steps measured on sm90 with 128 heads"
    _, why = choose_backend("decode", latent(128), FLASHINFER)
    assert why == f"sm90, bfloat16; triton takes 2.13 times as long in {steps}"
    _, why = choose_backend("decode", latent(128))
    assert why == f"sm90, bfloat16; flashinfer is not installed, or nvcc is not, the fastest in {steps}"
    name, why = choose_backend("decode", latent(128), FLASHINFER, drafts=True)
    assert (name, why) == ("triton", "sm90, bfloat16; flashinfer plans each pass of a draft on the host")
    assert choose_backend("decode", CPU)[1] == "cpu, float32"
    with pytest.raises(ConfigError, match=r"cpu serves .*, and dtype is float64; torch_native serves .*float64"):
        choose_backend("decode", needs(CPU, dtype="float64"))


def test_auto_is_within_5_percent_of_the_fastest_in_all_steps_but_these() -> None:
    missed = {}
    for step in read_times():
        asked = latent(step.num_q_heads) if step.kv_heads == LATENT else HOPPER
        name, _ = choose_backend("decode" if step.new == 1 else "prefill", asked, FLASHINFER)
        if (ratio := step.us[name] / min(step.us.values())) > 1.05:
            rows = f"{step.batch_size} x {step.prefix + 1}" if step.new == 1 else f"{step.new} after {step.prefix}"
            missed[f"{step.num_q_heads}/{step.kv_heads} {rows}"] = round(ratio, 2)
    assert missed == {
        "64/8 16 x 1024": 1.07,
        "8/8 512 after 0": 1.12,
        "32/8 512 after 0": 1.16,
        "16/latent 256 x 32768": 1.09,
        "16/latent 512 after 4096": 1.4,
        "16/latent 512 after 16384": 1.5,
        "128/latent 512 after 4096": 1.33,
        "128/latent 512 after 16384": 1.43,
    }


def test_every_time_that_auto_goes_by_is_in_a_committed_result() -> None:
    texts = [path.read_text() for path in (ROOT / "benchmarks" / "results").glob("attention_*.txt")]
    for step in read_times():
        date, commit, gpu = step.run.split(maxsplit=2)
        of_run = "".join(it for it in texts if it.startswith(f"# {date}, commit {commit}, 1 x {gpu}, "))
        assert all(re.search(rf" {us:,.1f}[* ]", of_run) for us in step.us.values()), step


def test_measured_times_are_written_in_the_place_of_those_of_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    one = StepTimes((9, 0), LATENT, 16, 1, 1, 1023, "first run", {"triton": 2.0, "flashinfer": 1.5})
    other = dataclasses.replace(one, compute_capability=(8, 0), kv_heads="8", us={"fa3": 1.0, "triton": 1.2})
    alone = dataclasses.replace(one, prefix=7, us={"triton": 1.0})
    write_times([one, other, alone], path)
    assert [(it, it.us, it.run) for it in read_times(path)] == [(it, it.us, it.run) for it in (one, other)]
    again = dataclasses.replace(one, run="second run", us={"triton": 1.0, "flashinfer": 1.5})
    write_times([again], path)
    assert [it.run for it in read_times(path)] == ["first run", "second run"]
    assert read_times(path)[1].us == again.us
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("name", "asked", "refusal"),
    [
        ("fa3", CPU, "needs GPUs; choose auto or cpu or torch_native"),
        ("triton", CPU, "needs GPUs; choose auto or cpu or torch_native"),
        ("cpu", HOPPER, "runs on CPUs only; choose auto or fa3 or triton or flashinfer or torch_native"),
        ("torch_native", needs(CPU, features=frozenset({Feature.EXACT})), "no exact numerics .*; choose auto or cpu"),
        (
            "fa3",
            needs(compute_capability=(8, 0)),
            "needs compute capability 9.0, and this is 8.0; .* auto or triton or",
        ),
        ("fa3", needs(dtype="float32"), "serves bfloat16 and float16, and dtype is float32; choose auto or triton or"),
        ("fa3", needs(page_size=512), "pages of at most 256 tokens, and kv_cache.page_size is 512; .* triton or"),
        ("triton", needs(head_dims=frozenset({512})), "heads of at most 256 .* have 512; choose auto or torch_native"),
        ("fa3", needs(features=frozenset({Feature.MASK})), "has no masks over new tokens; choose auto or triton or"),
        (
            "flashinfer",
            needs(compute_capability=(7, 5)),
            "needs compute capability 8.0 or later, and this is 7.5; choose auto or triton or torch_native",
        ),
        ("flashinfer", needs(head_dims=frozenset({64, 96})), "takes heads of 64, 128 or 256 .* have 96; .* or fa3"),
        (
            "flashinfer",
            needs(features=frozenset({Feature.CHUNK}), chunks=frozenset({32, 40})),
            "takes chunks of whole pages, and has 40 tokens where kv_cache.page_size=16; choose auto or fa3 or triton",
        ),
        *(
            ("flashinfer", needs(features=frozenset({Feature.LATENT}), latents=frozenset({LatentShape(*shape)})), why)
            for shape, why in {
                (129, 512, 64): "takes latent layers of at most 128 heads on a rank.* with 129 heads.*; .* auto or fa3",
                (8, 160, 64): "latents of 128, 256 or 512 elements .* with 8 heads, latents of 160",
                (8, 512, 32): "rotated keys of whole 64s, .* rotated keys of 32;",
            }.items()
        ),
        (
            "flashinfer",
            needs(features=frozenset({Feature.LATENT, Feature.MASK})),
            r"has no masks over new tokens for latent attention \(MLA\); choose auto or triton or torch_native",
        ),
        (
            "flashinfer",
            needs(features=frozenset({Feature.LATENT, Feature.FP8_KV})),
            r"has no FP8 KV cache for latent attention \(MLA\); choose auto or triton or torch_native",
        ),
        (
            "triton",
            needs(features=frozenset({Feature.FP8_KV}), compute_capability=(8, 0)),
            "has no FP8 KV cache below compute capability 8.9; choose auto or torch_native",
        ),
        ("fa3", needs(features=frozenset({Feature.EXACT})), "has no exact numerics .*; choose auto or triton"),
        (
            "triton",
            needs(features=frozenset({Feature.EXACT, Feature.MASK})),
            "has no exact numerics for masks over new",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused_with_those_that_can(
    name: str, asked: AttentionNeeds, refusal: str
) -> None:
    with pytest.raises(ConfigError, match=f"attention.backend={name} .*{refusal}"):
        check_backend(name, asked, "attention.backend")


def pool_of(*layers: AttentionLayer) -> TokenToKVPool:
    return TokenToKVPool(layers, num_pages=1, page_size=16, dtype=torch.float32, device=torch.device("cpu"))


LAYER = AttentionLayer(layer_id=0, tp_q_head_num=2, tp_k_head_num=1, head_dim=16, scale=0.25)


def test_a_rank_asks_for_what_its_layers_and_its_device_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"attention\.prefill_backend=fa3 needs GPUs; choose auto or cpu or torch_"):
        create_backend("fa3", "torch_native", pool_of(LAYER))
    with pytest.raises(ConfigError, match=r"attention\.decode_backend=triton needs GPUs"):
        create_backend("torch_native", "triton", pool_of(LAYER))
    latent = LatentLayer(
        layer_id=1, tp_q_head_num=2, tp_k_head_num=1, head_dim=24, scale=0.25, latent_dim=16, nope_dim=8, v_dim=8
    )
    asking = {
        Feature.WINDOW: dataclasses.replace(LAYER, window=4),
        Feature.SOFTCAP: dataclasses.replace(LAYER, softcap=5.0),
        Feature.SINKS: dataclasses.replace(LAYER, sinks=torch.zeros(2)),
        Feature.CHUNK: dataclasses.replace(LAYER, chunk=4),
        Feature.LATENT: latent,
        Feature.SPARSE: dataclasses.replace(latent, top_k=4),
    }
    assert {*asking, Feature.FP8_KV} == set(Feature) - {Feature.MASK, Feature.EXACT}, "which steps and settings ask for"
    in_fp8 = TokenToKVPool(
        [LAYER], num_pages=1, page_size=16, dtype=FP8, compute_dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert needs_of(in_fp8).features == {Feature.FP8_KV}
    assert needs_of(in_fp8).dtype == "bfloat16"
    for feature, layer in asking.items():
        without = dataclasses.replace(BACKENDS["torch_native"], features=frozenset(Feature) - {feature})
        monkeypatch.setattr("configs.attention.BACKENDS", {**BACKENDS, "torch_native": without})
        create_backend("torch_native", "torch_native", pool_of(LAYER))
        with pytest.raises(ConfigError, match=re.escape(f"has no {feature}")):
            create_backend("torch_native", "torch_native", pool_of(LAYER, layer))


def test_exact_numerics_are_asked_of_both_backends_and_said_to_who_has_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"attention\.prefill_backend=torch_native has no exact numerics"):
        create_backend("torch_native", "torch_native", pool_of(LAYER), exact=True)
    able = dataclasses.replace(BACKENDS["torch_native"], features=frozenset(Feature))
    monkeypatch.setattr("configs.attention.BACKENDS", {**BACKENDS, "torch_native": able, "triton": BACKENDS["fa3"]})
    with pytest.raises(ConfigError, match=r"attention\.decode_backend=triton needs GPUs"):
        create_backend("torch_native", "triton", pool_of(LAYER), exact=True)
    said = []

    def with_modes(*_: Any, **options: bool) -> None:
        said.append(options)

    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", with_modes)
    for exact in (False, True):
        create_backend("torch_native", "torch_native", pool_of(LAYER), exact=exact)
    assert said == [{}, {"exact": True}]


MASK = NewTokenMask(visible=torch.ones(4), starts=torch.tensor([0, -1]), positions=torch.zeros(4, dtype=torch.int64))


class Recorder(AttentionBackend):
    """Attends to nothing; says what it is asked."""

    captures_cuda_graphs = True

    def __init__(self, name: str, said: list[str], pool: TokenToKVPool) -> None:
        super().__init__(pool.layers, pool)
        self.name, self.said = name, said

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.said.append(f"{self.name} init")

    def capture_shapes(self, shape: StepShape, max_model_len: int) -> list[StepShape]:
        return [shape] if self.name == "decode" else [shape, shape]

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        self.said.append(f"{self.name} capture")

    def prepare_replay(self, shape: StepShape, prefix_lens: Int32Array, extend_lens: Int32Array) -> None:
        self.said.append(f"{self.name} replay of {extend_lens.tolist()}")

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        self.said.append(f"{self.name} attend")
        return q


def _hybrid(prefill: AttentionBackend, decode: AttentionBackend) -> HybridBackend:
    return HybridBackend(prefill, decode, masked=prefill)


def test_steps_of_single_tokens_go_to_one_backend_and_all_others_to_the_other() -> None:
    pool = pool_of(LAYER)
    said: list[str] = []
    hybrid = _hybrid(Recorder("prefill", said, pool), Recorder("decode", said, pool))
    assert hybrid.captures_cuda_graphs
    table = ReqToTokenPool(2, 1, torch.device("cpu"))
    decodes, mixed = StepShape(2, 2, 2), StepShape(3, 2, 2)
    for rows, shape, name in (
        ([(1, 3, 1), (2, 0, 1)], decodes, "decode"),
        ([(1, 3, 1), (2, 0, 2)], mixed, "prefill"),
        ([(1, 0, 2), (2, 0, 2)], StepShape(4, 2, 2), "prefill"),
    ):
        batch = batch_of(table, rows, 16)
        said.clear()
        hybrid.init_forward_metadata(batch)
        hybrid.attend(torch.zeros(2, 32), LAYER)
        # A graph's batch holds any step of its shape: what its host arrays say is that of no step.
        hybrid.prepare_capture(batch_of(table, [(1, 0, 1)], 16), shape)
        hybrid.attend(torch.zeros(2, 32), LAYER)
        hybrid.prepare_replay(shape, np.array([3, 0], np.int32), np.array([1, 2], np.int32))
        assert said == [f"{name} {what}" for what in ("init", "attend", "capture", "attend", "replay of [1, 2]")]
        assert len(hybrid.capture_shapes(shape, 100)) == (1 if name == "decode" else 2)
    without = Recorder("decode", said, pool)
    without.captures_cuda_graphs = False
    assert not _hybrid(Recorder("prefill", said, pool), without).captures_cuda_graphs
    assert not hybrid.plans_on_host
    planning = Recorder("decode", said, pool)
    planning.plans_on_host = True
    assert _hybrid(Recorder("prefill", said, pool), planning).plans_on_host


def test_a_step_with_a_mask_goes_to_one_that_serves_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, said = pool_of(LAYER), list[str]()
    batch = dataclasses.replace(
        batch_of(ReqToTokenPool(2, 1, torch.device("cpu")), [(1, 0, 2), (2, 0, 2)], 16), mask=MASK
    )
    for name, what in (("fa3", "prefill"), ("triton", "decode")):
        monkeypatch.setitem(registry.IMPLEMENTATIONS, name, lambda *_, what=what, **__: Recorder(what, said, pool))
    for unable, able in (({}, "prefill"), ({"fa3": frozenset({Feature.MASK})}, "decode")):
        specs = {name: dataclasses.replace(BACKENDS["torch_native"], name=name) for name in ("fa3", "triton")}
        for name, features in unable.items():
            specs[name] = dataclasses.replace(specs[name], features=specs[name].features - features)
        for module in ("configs.attention", "attention.registry"):
            monkeypatch.setattr(f"{module}.BACKENDS", {**BACKENDS, **specs})
        create_backend("fa3", "triton", pool).init_forward_metadata(batch)
        assert said.pop() == f"{able} init"
    assert not said


def test_one_name_for_both_kinds_of_steps_is_one_backend() -> None:
    assert type(create_backend("torch_native", "torch_native", pool_of(LAYER))) is not HybridBackend


SERVED = [
    *(dataclasses.replace(LAYER, tp_q_head_num=16, head_dim=head_dim) for head_dim in (64, 96, 256)),
    *(dataclasses.replace(LAYER, head_dim=64, chunk=chunk) for chunk in (24, 32)),
    dataclasses.replace(LAYER, head_dim=64, window=5, softcap=3.0),
    dataclasses.replace(LAYER, head_dim=64, sinks=torch.zeros(2)),
    *(layer_of(heads, latent_dim=128, nope_dim=64, v_dim=64, head_dim=192) for heads in (2, 3)),
    *(layer_of(2, latent_dim=dim, nope_dim=64, v_dim=64, head_dim=dim + rope) for dim, rope in ((160, 64), (128, 32))),
    layer_of(2, latent_dim=512, nope_dim=64, v_dim=64, head_dim=576),
]


@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_constructor_takes_what_the_table_says_and_a_step_what_the_constructor_took(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="a CPU install has no Triton")
    from tests.attention import test_flash_attention, test_flash_mla, test_flashinfer_backend

    request.getfixturevalue("interpreter")
    monkeypatch.setattr("attention.fa3.load_provider", lambda _: test_flash_attention.EMULATED["sgl_kernel"])
    monkeypatch.setattr("attention.flash_mla._load", lambda: test_flash_mla.Emulated)
    test_flashinfer_backend.emulate(monkeypatch)
    spec = dataclasses.replace(BACKENDS[name], device=None)  # the interpreter takes CPU tensors
    for module in ("configs.attention", "attention.registry"):
        monkeypatch.setattr(f"{module}.BACKENDS", {**BACKENDS, name: spec})
    page_size = spec.page_size or 16
    num_served, batch = 0, batch_of(ReqToTokenPool(2, 1, torch.device("cpu")), [(1, 0, 2), (2, 0, 2)], page_size)
    for layer, dtype, exact in itertools.product(SERVED, (torch.float16, torch.float32, FP8), (False, True)):
        kept = {"dtype": dtype, "compute_dtype": torch.float16 if dtype is FP8 else dtype}
        pool = TokenToKVPool([layer], num_pages=1, page_size=page_size, device=torch.device("cpu"), **kept)
        asked = needs_of(pool).with_feature(Feature.EXACT) if exact else needs_of(pool)
        if (refusal := spec.refusal(asked)) is not None:
            with pytest.raises(ConfigError, match=re.escape(refusal)):
                create_backend(name, name, pool, exact=exact)
            continue
        backend, num_served = create_backend(name, name, pool, exact=exact), num_served + 1
        backend.init_forward_metadata(batch)
        if spec.refusal(asked.with_feature(Feature.MASK)) is None:
            backend.init_forward_metadata(dataclasses.replace(batch, mask=MASK))
    assert num_served
