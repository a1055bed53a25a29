"""The FlashAttention-3 backend: its wiring on the CPU over an emulated build, its numbers on a GPU.

Steps of decodes are the Triton kernel's here (its own tests: test_decode_kernel.py), all others FA3's, which is called
for decodes as well by tests of the providers: steps with prompts hold decodes.

A GPU case passes when its largest error against fp32 is at most twice that of the same attention by torch in the
same dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.backend import AttentionBackend
from attention.fa3 import FlashAttentionBackend
from attention.fa3_builds import SGLANG_KERNEL, FA3Provider, FlashAttention3, SglKernel, load_provider, sinks_of
from attention.forward_batch import ForwardBatch
from attention.layer import AttentionLayer
from attention.registry import create_backend
from attention.step_shape import StepShape
from configs.errors import ConfigError
from tests.helpers.latent_case import BATCHES as LATENT_BATCHES
from tests.helpers.latent_case import LITE, LatentCase, layer_of
from tests.helpers.paged_case import PADDING, PagedCase, attention, grouped_layer
from tests.helpers.pairs import pairs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROVIDERS = {"sgl_kernel": "sgl_kernel", "flash_attention_3": "flash_attn_interface"}
MAX_LEN = 1024  # wide enough that FA3 splits the keys of small batches
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (1, 1), (63, 1), (64, 1), (300, 1), (699, 1)],
    "extend": [(0, 5), (0, 130), (0, 333)],
    "extend_with_prefix": [(16, 20), (7, 2), (0, 18), (450, 200)],
    "mixed": [(699, 1), (0, 130), (90, 1), (200, 300), (0, 1)],
}
SMALL_BATCHES = {
    "decode": [(0, 1), (16, 1), (40, 1)],
    "extend": [(0, 5), (0, 17)],
    "mixed": [(20, 1), (0, 17), (33, 9), (0, 1)],
}


_layer = functools.partial(grouped_layer, group=4)


class Case(PagedCase):
    """Rows over a pool of one layer, for the backend and for each build of FA3."""

    def __init__(
        self,
        layer: AttentionLayer,
        page_size: int,
        rows: Sequence[tuple[int, int]],
        *,
        device: torch.device = CUDA,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(layer, page_size, rows, device, dtype)
        narrow, in_use = self.table, self.table[:PADDING][self.table[:PADDING] < 1 << 30].long()
        self.table = torch.full((len(narrow), MAX_LEN // page_size), 1 << 30, dtype=torch.int32)
        self.table[:, : narrow.shape[1]] = narrow
        if page_size >= 128:
            # FA3 may fetch such pages whole: what is unused in them weighs nothing but has to be finite.
            for pages in (self.k, self.v):
                pages[in_use] = pages[in_use].nan_to_num(1000.0)
        self.pool, _ = self.in_pool()
        self.all_rows = range(len(rows))

    def backend(self, provider: str | None = None) -> FlashAttentionBackend:
        return FlashAttentionBackend([self.layer], self.pool, provider=provider)

    def run(self, backend: AttentionBackend, rows: Sequence[int] | None = None) -> torch.Tensor:
        """[num_tokens, Hq, D] of `rows`, None: of all but padding."""
        rows = self.all_rows if rows is None else rows
        backend.init_forward_metadata(self.batch(rows))
        q = self.queries(rows).flatten(1)
        out = backend.attend(q, self.layer)
        assert out.shape == q.shape
        assert out.is_contiguous()
        return out.view(len(q), -1, self.layer.head_dim)

    def run_fa3(self, provider: FA3Provider, *, num_splits: int = 0) -> torch.Tensor:
        """[num_tokens, Hq, D] of all rows but padding by this build of FA3."""
        batch, q = self.batch(self.all_rows), self.queries(self.all_rows)
        out = provider.attend(
            q, *self.pool.pages(0), batch.paged, self.layer, sinks=sinks_of(self.layer), num_splits=num_splits
        )
        assert out.shape == q.shape
        assert out.is_contiguous()
        return out


# On the CPU, over an emulation of either build's function.


def _emulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    left: int,
    softcap: float,
    out: torch.Tensor | None,
    attention_chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
) -> torch.Tensor:
    """FA3's causal, paged forward, with its checks of shapes and dtypes."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if qv is not None:
        q, k = torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
    for tensor in (cache_seqlens, page_table, cu_seqlens_q):
        assert tensor.dtype is torch.int32
    assert len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert sinks is None or (sinks.dtype, sinks.shape) == (torch.bfloat16, q.shape[1:2])
    layer = AttentionLayer(
        layer_id=0,
        tp_q_head_num=q.shape[1],
        tp_k_head_num=k.shape[2],
        head_dim=q.shape[2],
        scale=scale,
        window=None if left < 0 else left + 1,
        softcap=softcap or None,
        chunk=attention_chunk,
        sinks=None if sinks is None else sinks.float(),
    )
    out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype) if out is None else out
    for i, length in enumerate(cache_seqlens.tolist()):
        tokens = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        pages = page_table[i, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        out[tokens] = attention(q[tokens], keys, values, layer, torch.float32)[0].to(q.dtype)
    return out


def _emulated_fwd(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, ...]:
    """`torch.ops.flash_attn_3.fwd`."""
    assert given.pop("is_causal")
    assert given.pop("window_size_right") in (-1, 0)
    assert given.pop("num_splits") == 0
    names = {"seqused_k": "cache_seqlens", "softmax_scale": "scale", "window_size_left": "left"}
    nothing = torch.empty(0)
    return _emulate(q, k, v, **{names.get(name, name): value for name, value in given.items()}), *[nothing] * 3


def _emulated_with_kvcache(q: Any, k: Any, v: Any, **given: Any) -> torch.Tensor:
    """`sgl_kernel.flash_attn.flash_attn_with_kvcache`."""
    assert given.pop("causal")
    assert given.pop("num_splits") == 0
    left, right = given.pop("window_size")
    assert right == (-1 if left < 0 else 0)
    return _emulate(q, k, v, left=left, scale=given.pop("softmax_scale"), **given)


EMULATED: dict[str, FA3Provider] = {
    "sgl_kernel": SglKernel(_emulated_with_kvcache),
    "flash_attention_3": FlashAttention3(_emulated_fwd),
}


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, interpreter: None) -> FA3Provider:
    """Makes every backend of the test use the emulation called by the fixture's parameter; returns that."""
    provider = EMULATED[getattr(request, "param", "flash_attention_3")]
    monkeypatch.setattr("attention.fa3.load_provider", lambda name: provider)
    return provider


def _small(layer: AttentionLayer, batch: str = "mixed", page_size: int = 16) -> Case:
    rows = SMALL_BATCHES[batch]
    return Case(layer, page_size, rows, device=CPU, dtype=torch.float16)


@pytest.mark.parametrize(
    ("emulated", "features", "page_size", "batch"),
    [
        ("sgl_kernel", {}, 16, "mixed"),
        ("flash_attention_3", {"window": 1}, 1, "decode"),
        ("sgl_kernel", {"window": 13, "softcap": 5.0}, 1, "extend"),
        ("flash_attention_3", {"sinks": CPU}, 16, "mixed"),
        ("sgl_kernel", {"chunk": 24}, 16, "decode"),
        ("flash_attention_3", {"chunk": 3, "sinks": CPU}, 1, "extend"),
    ],
    indirect=["emulated"],
)
def test_tells_each_provider_what_the_torch_backend_computes(
    batch: str, page_size: int, features: dict[str, Any], emulated: FA3Provider
) -> None:
    case = _small(_layer(group=3, **features), batch, page_size)
    expected = case.run(create_backend("torch_native", "torch_native", case.pool))
    for ours in (case.run(case.backend()), case.run_fa3(emulated)):
        torch.testing.assert_close(ours, expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("emulated", list(EMULATED), indirect=True)
@pytest.mark.parametrize("batch", list(LATENT_BATCHES))
def test_latent_layers_are_attended_to_in_the_absorbed_form(batch: str, emulated: FA3Provider) -> None:
    case = LatentCase(layer_of(3), 16, LATENT_BATCHES[batch], torch.float32)
    backend = FlashAttentionBackend([case.layer], case.pool)
    backend.init_forward_metadata(case.batch)
    case.check(case.run(backend))


def test_writes_to_the_tensor_that_it_is_given() -> None:
    case = _small(_layer(), "decode")
    paged, q = case.batch(case.all_rows).paged, case.queries(case.all_rows)
    for provider in EMULATED.values():
        out = torch.empty_like(q)
        assert provider.attend(q, *case.pool.pages(0), paged, case.layer, out=out) is out
        assert torch.equal(out, provider.attend(q, *case.pool.pages(0), paged, case.layer))


def test_keys_stay_whole_in_a_captured_step_of_short_rows_and_in_no_other(
    monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    told: list[int] = []

    def fwd(*args: Any, **given: Any) -> tuple[torch.Tensor, ...]:
        told.append(given["num_splits"])
        return _emulated_fwd(*args, **{**given, "num_splits": 0})

    def with_kvcache(*args: Any, **given: Any) -> torch.Tensor:
        told.append(given["num_splits"])
        return _emulated_with_kvcache(*args, **{**given, "num_splits": 0})

    for provider in (FlashAttention3(fwd), SglKernel(with_kvcache)):
        monkeypatch.setattr("attention.fa3.load_provider", lambda *_, provider=provider: provider)
        case = _small(_layer())
        backend, batch, q = case.backend(), case.batch(case.all_rows), case.queries(case.all_rows).flatten(1)
        told.clear()  # of the probe
        short, long = backend.capture_shapes(StepShape(96, 21, 20), 1000)
        assert (short.max_seq_len, long) == (768, StepShape(96, 21, 20))
        for shape in (short, long, short, None):
            if shape is None:
                backend.init_forward_metadata(batch)
            else:
                backend.prepare_capture(batch, shape)
            backend.attend(q, case.layer)
        assert told == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("batch", "wrong"),
    [
        ("int64 lengths", {"cache_seqlens": torch.ones(3, dtype=torch.int64)}),
        ("lengths of another batch", {"cache_seqlens": torch.ones(2, dtype=torch.int32)}),
        ("a transposed table", {"page_table": torch.ones(4, 3, dtype=torch.int32).T}),
    ],
)
def test_refuses_paged_metadata_that_fa3_would_misread(
    batch: str, wrong: dict[str, torch.Tensor], emulated: FA3Provider
) -> None:
    case = _small(_layer(), "decode")
    good = case.batch(case.all_rows)
    paged = dataclasses.replace(good.paged, **wrong)
    with pytest.raises(AssertionError):
        case.backend().init_forward_metadata(dataclasses.replace(good, paged=paged))


def test_refuses_at_the_start_what_the_build_has_no_kernel_for(
    monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    def without_softcap(*args: Any, **given: Any) -> tuple[torch.Tensor, ...]:
        if given["softcap"]:
            raise RuntimeError("this build has no softcap\nException raised from somewhere")
        return _emulated_fwd(*args, **given)

    provider = FlashAttention3(without_softcap)
    monkeypatch.setattr("attention.fa3.load_provider", lambda *_: provider)
    _small(_layer()).backend()
    with pytest.raises(ConfigError, match=r"flash_attention_3 .*softcap=30\.0.*: this build has no softcap\n"):
        _small(_layer(softcap=30.0)).backend()


@pytest.mark.parametrize(
    ("features", "unknown"), [({"sinks": CPU}, "sinks"), ({"chunk": 24}, "attention_chunk"), ({"window": 2}, "left")]
)
def test_refuses_a_build_that_does_not_know_a_feature_or_leaves_it_out(
    features: dict[str, Any], unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_known(q: Any, k: Any, v: Any, **given: Any) -> torch.Tensor:
        if unknown in given:
            raise TypeError(f"unexpected keyword argument '{unknown}'")
        return _emulated_with_kvcache(q, k, v, **given)

    def left_out(q: Any, k: Any, v: Any, **given: Any) -> torch.Tensor:
        whole = {**given, "window_size": (-1, -1)}
        return _emulated_with_kvcache(q, k, v, **{key: value for key, value in whole.items() if key != unknown})

    builds = {"wrong values": left_out} | ({} if unknown == "left" else {f"argument '{unknown}'": not_known})
    for said, build in builds.items():
        monkeypatch.setattr("attention.fa3.load_provider", lambda *_, build=build: SglKernel(build))
        _small(_layer()).backend()
        with pytest.raises(ConfigError, match=said):
            _small(_layer(**features)).backend()


def test_refuses_a_build_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = FlashAttention3(lambda q, *_, **__: (q, None, None, None))
    monkeypatch.setattr("attention.fa3.load_provider", lambda *_: provider)
    with pytest.raises(ConfigError, match="returned wrong values"):
        _small(_layer()).backend()


def test_says_what_to_install_where_there_is_no_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="provider fa9 is not one of sgl_kernel, flash_attention_3"):
        load_provider("fa9")
    for module in ("sgl_kernel", "sgl_kernel.flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r"install `sglang-kernel`(.|\n)*sgl_kernel: (.|\n)*flash_attention_3: "):
        load_provider(None)
    with pytest.raises(ConfigError, match="flash_attention_3: ") as raised:
        load_provider("flash_attention_3")
    assert "sgl_kernel:" not in str(raised.value)


def test_the_cuda_extra_takes_the_kernels_and_the_torch_that_were_run() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert pyproject["project"]["optional-dependencies"]["cuda"] == [
        f"sglang-kernel=={SGLANG_KERNEL}",
        "torch>=2.11,<2.12",
    ]


def test_another_version_of_the_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package, installed = tmp_path / "sgl_kernel", tmp_path / "sglang_kernel-0.4.10.dist-info"
    package.mkdir()
    installed.mkdir()
    (package / "__init__.py").touch()
    (package / "flash_attn.py").write_text("def flash_attn_with_kvcache(): ...")
    (installed / "METADATA").write_text("Name: sglang-kernel\nVersion: 0.4.10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_provider("sgl_kernel")
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "sglang-kernel 0.4.10 is installed" in warning
    assert "only 0.4.3 with torch 2.11 was run" in warning
    for module in ("sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)  # as where an operator that it imports is gone
    with pytest.raises(ConfigError, match=r"sgl_kernel: .*; sglang-kernel 0\.4\.10 is installed"):
        load_provider("sgl_kernel")
    (installed / "METADATA").write_text("Name: sglang-kernel\nVersion: 0.4.3+cu130\n")
    with pytest.raises(ConfigError) as raised:
        load_provider("sgl_kernel")
    assert "is installed" not in str(raised.value)


# On a GPU.


def _provider(name: str) -> str:
    if importlib.util.find_spec(PROVIDERS[name]) is None:
        pytest.skip(f"{PROVIDERS[name]} is not installed")
    return name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "page_size", "group", "head_dim", "window"),
    pairs([*BATCHES], [1, 16, 64, 128], [1, 3, 4, 8], [64, 128], [None, 33]),
)
def test_errs_at_most_twice_as_far_as_torch(
    batch: str, page_size: int, group: int, head_dim: int, window: int | None
) -> None:
    case = Case(_layer(group=group, head_dim=head_dim, window=window), page_size, BATCHES[batch])
    case.check(case.run(case.backend()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch", "page_size", "head_dim", "window"),
    pairs([*PROVIDERS], [*BATCHES], [16, 64], [64, 128], [None, 33]),
)
def test_every_installed_provider_errs_at_most_twice_as_far_as_torch(
    name: str, batch: str, page_size: int, head_dim: int, window: int | None
) -> None:
    case = Case(_layer(head_dim=head_dim, window=window), page_size, BATCHES[batch])
    case.check(case.run_fa3(load_provider(_provider(name))))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("name", list(PROVIDERS))
def test_keys_in_one_piece_err_at_most_twice_as_far_as_torch(name: str, batch: str) -> None:
    case = Case(_layer(), 64, BATCHES[batch])
    case.check(case.run_fa3(load_provider(_provider(name)), num_splits=1))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("name", list(PROVIDERS))
def test_softcap_is_applied_or_refused_at_the_start(name: str, batch: str) -> None:
    case = Case(_layer(softcap=5.0), 16, BATCHES[batch])
    name = _provider(name)
    try:
        backend = case.backend(name)
    except ConfigError as error:
        refusal = str(error)
    else:
        case.check(case.run(backend))
        return
    assert "softcap=5.0" in refusal
    assert "attention.backend=triton" in refusal


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch", "page_size", "head_dim", "features", "num_splits"),
    pairs(
        [*PROVIDERS],
        [*BATCHES],
        [16, 64],
        [64, 128],
        [{"chunk": 64}, {"chunk": 100, "window": 33}, {"sinks": CUDA}, {"sinks": CUDA, "window": 33}],
        [0, 1],
    ),
)
def test_chunks_of_the_row_and_sinks_err_at_most_twice_as_far_as_torch(
    name: str, batch: str, page_size: int, head_dim: int, features: dict[str, Any], num_splits: int
) -> None:
    """Rows begin within chunks and cross them, behind prefixes that are no multiples of theirs."""
    case = Case(_layer(head_dim=head_dim, **features), page_size, BATCHES[batch])
    case.check(case.run_fa3(load_provider(_provider(name)), num_splits=num_splits))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch", "page_size", "num_heads", "dtype"),
    pairs([*PROVIDERS], [*LATENT_BATCHES], [1, 16, 64], [1, 5, 16], [torch.bfloat16, torch.float16]),
)
def test_latent_layers_err_at_most_twice_as_far_as_torch_or_are_refused_at_the_start(
    name: str, batch: str, page_size: int, num_heads: int, dtype: torch.dtype
) -> None:
    case, name = LatentCase(layer_of(num_heads, **LITE), page_size, LATENT_BATCHES[batch], dtype, CUDA), _provider(name)
    if name != "sgl_kernel":
        with pytest.raises(ConfigError, match="latent=True"):
            FlashAttentionBackend([case.layer], case.pool, provider=name)
        return
    backend = FlashAttentionBackend([case.layer], case.pool, provider=name)
    backend.init_forward_metadata(case.batch)
    case.check(case.run(backend))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_float16_errs_at_most_twice_as_far_as_torch(batch: str) -> None:
    case = Case(_layer(), 16, BATCHES[batch], dtype=torch.float16)
    case.check(case.run(case.backend()))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_request_alone_equals_the_same_request_in_a_batch(head_dim: int, batch: str) -> None:
    case = Case(_layer(head_dim=head_dim), 16, BATCHES[batch])
    backend = case.backend()
    in_batch = case.run(backend).split([extend for _, extend in BATCHES[batch]])
    for i, answer in enumerate(in_batch):
        torch.testing.assert_close(case.run(backend, [i]), answer, atol=0.01, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, None), (128, 33)])
def test_a_replayed_graph_equals_the_eager_step_bit_for_bit(head_dim: int, window: int | None) -> None:
    case = Case(_layer(head_dim=head_dim, window=window), 16, BATCHES["decode"])
    backend = case.backend()
    static, q = case.batch([2, 2, 2, PADDING]), torch.cat(case.q[:4]).flatten(1)

    def step(batch: ForwardBatch) -> torch.Tensor:
        backend.init_forward_metadata(batch)
        return backend.attend(q, case.layer)

    step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(static)
    results = []
    for rows in ([0, 1, 2], [5, 3, 4], [1, 5, 0]):
        batch = case.batch([*rows, PADDING])
        static.paged.cache_seqlens.copy_(batch.paged.cache_seqlens)
        static.paged.page_table.copy_(batch.paged.page_table)
        graph.replay()
        # Without the padding row: it reads the padding page, which nobody wrote here.
        results.append(replayed[:3].clone())
        assert bool(torch.isfinite(results[-1]).all())
        assert torch.equal(results[-1], step(batch)[:3])
    assert not torch.equal(results[0], results[1])
