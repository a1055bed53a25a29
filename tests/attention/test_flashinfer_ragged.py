"""FlashInfer's attention in two parts: on the CPU over an emulation of its wrappers, on a GPU by FlashInfer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention import flashinfer_ragged
from attention.flashinfer_backend import FlashInferBackend
from attention.flashinfer_plans import Library
from attention.hybrid import HybridBackend
from attention.layer import AttentionLayer
from attention.triton_backend import TritonBackend
from tests.attention.test_flashinfer_backend import Case, Emulated, _layer, emulate
from worker.step.step import Step

# (prefix_len, extend_len) of each row, and whether layers without a window, and with one, are served in two parts.
BATCHES = {
    "prompt": ([(0, 1100)], True, True),
    "prompt after cached tokens": ([(450, 1100)], True, False),
    "prompts": ([(0, 1100), (0, 33)], False, False),
    "few new tokens": ([(0, 800)], False, False),
    "many cached tokens": ([(2600, 1100)], False, False),
}
SMALLER = 25
"""Divisor of the rows' tokens on a CPU."""


class Part:
    """FlashInfer's wrapper for one part: the new tokens (causal), or the cached ones on pages."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str) -> None:
        assert (workspace.dtype, layout, backend) == (torch.uint8, "NHD", "fa3")

    def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *given: Any, causal: bool, **options: Any) -> None:
        assert self._pin_memory_int_workspace_buffer.dtype == torch.uint8
        assert qo_indptr.device == kv_indptr.device == torch.device("cpu")
        self.qo, self.kv, self.causal, self.options = qo_indptr.tolist(), kv_indptr.tolist(), causal, options
        assert causal or options["window_left"] == -1, "the window would end at the last cached token"
        self.indices, self.last = (torch.empty(0), torch.empty(0)) if causal else given[:2]
        Emulated.planned[self._int_workspace_buffer.data_ptr()] = self  # type: ignore[assignment]

    def run(
        self,
        q: torch.Tensor,
        *kv: Any,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
    ) -> Any:
        assert Emulated.planned[self._int_workspace_buffer.data_ptr()] is self, "another plan is in its memory"
        out, lse = torch.zeros(q.shape) if out is None else out, torch.full(q.shape[:2], -torch.inf)
        for row, (first, end) in enumerate(zip(self.qo, self.qo[1:], strict=False)):
            tokens, keys = slice(first, end), slice(*self.kv[row : row + 2])
            if self.causal:
                k, v = (it[keys] for it in kv)
            else:
                pages = self.indices[keys].long()
                length = max(len(pages) - 1, 0) * kv[0][0].shape[1] + int(self.last[row])
                k, v = (it[pages].flatten(0, 1)[:length] for it in kv[0])
            if len(k):
                out[tokens], lse[tokens] = self._attended(q[tokens], k, v)
        return (out, lse if lse_base == "ln" else lse / torch.log(torch.tensor(2.0))) if return_lse else None

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (it.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for it in (k, v))
        scores = torch.einsum("nhd,lhd->nhl", q, k) * self.options["sm_scale"]
        if cap := self.options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        behind = torch.arange(len(q))[:, None, None] - torch.arange(len(k))
        if self.causal:
            left = self.options["window_left"]
            scores = scores.masked_fill((behind < 0) | ((left >= 0) & (behind > left)), -torch.inf)
        return torch.einsum("nhl,lhd->nhd", scores.softmax(-1), v), scores.logsumexp(-1)


class Paged(Emulated):
    """FlashInfer's paged wrapper, which may be planned for the cached tokens alone."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str, **given: Any) -> None:
        super().__init__(workspace, layout, backend=backend, **given)
        self._of_cached: Part | None = None

    def plan(self, *args: Any, **options: Any) -> None:
        self._of_cached = None
        if options.get("causal") is False:
            self._of_cached = Part(torch.empty(0, dtype=torch.uint8), "NHD", backend="fa3")
            for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
                setattr(self._of_cached, name, getattr(self, name))
            self._of_cached.plan(*args, **options)
        else:
            super().plan(*args, **options)

    def run(self, *args: Any, **options: Any) -> Any:
        if self._of_cached is None:
            return super().run(*args, **options)
        return self._of_cached.run(*args, **options)


@pytest.fixture
def small(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> int:
    """The divisor of the rows' tokens. On a CPU, the wrappers are emulated."""
    divisor = 1 if device.type == "cuda" else SMALLER
    monkeypatch.setattr(flashinfer_ragged, "_LEAST_NEW", 1024 // divisor)
    if device.type == "cuda":
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
        return divisor
    emulate(monkeypatch)
    from attention import flashinfer_backend

    module: Any = flashinfer_backend.load_flashinfer(device).module
    changed = {"BatchPrefillWithPagedKVCacheWrapper": Paged, "BatchPrefillWithRaggedKVCacheWrapper": Part}
    module = SimpleNamespace(**{**vars(module), **changed})
    monkeypatch.setattr(flashinfer_backend, "load_flashinfer", lambda device: Library(module, 4, True))
    return divisor


class Stored:
    """A rotation after its work: the pool already holds the keys and values of the new tokens."""

    def norm_rotate_store(self, qkv: torch.Tensor, layer: AttentionLayer, *_: Any) -> torch.Tensor:
        return qkv[:, : layer.tp_q_head_num * layer.head_dim]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another backend for decodes"])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_a_long_prompt_is_attended_to_in_two_parts(
    batch: str, beside: bool, page_size: int, device: torch.device, small: int
) -> None:
    rows, *in_parts = BATCHES[batch]
    rows = [(-(-prefix // small), -(-extend // small)) for prefix, extend in rows]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head_dim = 128 if device.type == "cuda" else 16
    layers = [_layer(0, head_dim=head_dim), _layer(1, head_dim=head_dim, window=13, softcap=5.0)]
    case = Case(layers, rows, page_size, device=device, dtype=dtype)
    prompts = FlashInferBackend(case.layers, case.pool)
    backend = HybridBackend(prompts, TritonBackend(case.layers, case.pool), masked=prompts) if beside else prompts
    frame = case.frame(range(len(rows)))
    case.inputs.upload(Step.of(frame), Step.of(frame).shape)
    backend.init_forward_metadata(case.inputs.batch(Step.of(frame)))
    assert [prompts.is_long_prompt(layer) for layer in layers] == in_parts
    outs = []
    for layer, q, kv in zip(layers, case.q, case.kv, strict=True):
        v = torch.cat([of_row[1][prefix:] for of_row, (prefix, _) in zip(kv, rows, strict=True)]).flatten(1)
        # Keys before norm and rotation are of no use to attention.
        qkv = torch.cat([torch.cat(q).flatten(1), torch.full_like(v, torch.nan), v], dim=1)
        outs.append(backend.forward(qkv, layer, Stored(), None))  # type: ignore[arg-type]
    case.check(outs)
