"""Every backend by every variant of attention: a check against plain attention in fp32, or a refusal with its reason.

The bound: at most twice the error of torch in the same dtype. What a backend is made of has tests of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.kernels import decode
from attention.kv_pool import FP8, TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer
from attention.registry import IMPLEMENTATIONS, needs_of
from attention.step_shape import StepShape
from configs.attention import BACKENDS, Feature, check_backend
from configs.errors import ConfigError
from tests.helpers.latent_case import LITE, LatentCase, layer_of
from tests.helpers.paged_case import NewTokens, PagedCase, both_ways, mask_of, tree

BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (15, 1), (40, 1)],
    "extend": [(0, 5), (0, 20)],
    "extend with prefix": [(16, 20), (7, 2)],
    "mixed": [(20, 1), (0, 17), (33, 9)],
    "a decode alone": [(70, 1)],
    "a chunk alone": [(30, 25)],
}
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
PAGE_SIZES = (1, 16, 64)
MASKS: dict[str, Callable[[int, int], NewTokens]] = {"tree": tree, "both ways": both_ways}
"""How the new tokens of each row but the first of several see one another."""
ALL = {"window": 18, "chunk": 32, "softcap": 2.0, "sinks": torch.linspace(-1.0, 3.0, 8)}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a KV head each": {"tp_q_head_num": 2},
    "8 heads share": {"tp_q_head_num": 16},
    "heads of 96": {"head_dim": 96},
    "heads of 128": {"head_dim": 128},
    "heads of 256": {"head_dim": 256},
    **{name: {name: value} for name, value in ALL.items()},
    "all of these": ALL,
    **{name: {} for name in MASKS},
    "FP8": {"k_scale": 0.5, "v_scale": 2.0},
}
REFUSED: dict[str, dict[str, str]] = {
    "fa3": {
        **dict.fromkeys(MASKS, "has no masks over new tokens"),
        "FP8": r"has no FP8 KV cache \(it would round queries to FP8 as well\); choose auto or triton or flashinfer or",
    },
    "flashinfer": {
        "heads of 96": "takes heads of 64, 128 or 256 elements, and the model's have 96; choose auto or fa3 or",
        "sinks": "has no sinks; choose auto or fa3 or triton or torch_native",
        "all of these": "has no sinks; choose|takes chunks of whole pages",
        "chunk": "takes chunks of whole pages, and has 32 tokens where kv_cache.page_size=64",
    },
    "triton": {},
    "flash_mla": {
        **dict.fromkeys(VARIANTS, r"serves only models with latent attention \(MLA\); choose auto or"),
        "latent": "takes pages of 64 tokens, and kv_cache.page_size is",
    },
    "cpu": {},
    "torch_native": {},
}
"""What they refuse of the above and of latent attention."""
LACKING = {"softcap": "does not support tanh softcapping", "all of these": "softcapping", "latent": "latent=True"}
"""What FA3 refuses as a rank loads it, because its build lacks that."""


class Case(Protocol):
    """Rows of random tokens over a pool whose unused parts are poisoned."""

    pool: TokenToKVPool
    batch: ForwardBatch

    def attend(self, backend: AttentionBackend) -> torch.Tensor: ...

    def check(self, out: torch.Tensor) -> None: ...


class _Heads:
    """Heads that share KV heads."""

    def __init__(self, variant: str, batch: str, page_size: int, device: torch.device) -> None:
        shape = {"layer_id": 0, "tp_q_head_num": 8, "tp_k_head_num": 2, "head_dim": 64, "scale": 0.11}
        moved = {key: it.to(device) if key == "sinks" else it for key, it in VARIANTS[variant].items()}
        layer, kv_dtype = AttentionLayer(**{**shape, **moved}), FP8 if variant == "FP8" else None
        self._case = PagedCase(layer, page_size, BATCHES[batch], device, kv_dtype=kv_dtype)
        self.pool, self.batch = self._case.in_pool()
        self._masks: list[NewTokens | None] | None = None
        if (new_tokens := MASKS.get(variant)) is not None:
            lens = [extend for _, extend in BATCHES[batch]]
            parts = [new_tokens(*row) for row in BATCHES[batch]]
            self._masks = [None, *parts[1:]] if len(parts) > 1 else [*parts]
            self.batch = dataclasses.replace(self.batch, mask=mask_of(self._masks, lens, device))

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        q = self._case.queries(range(len(self._case.rows) - 1)).flatten(1)
        return backend.attend(q, self._case.layer)

    def check(self, out: torch.Tensor) -> None:
        self._case.check(out.view(len(out), -1, self._case.layer.head_dim), self._masks)


class _Latents:
    """Heads that make their keys and values of one latent."""

    def __init__(self, batch: str, page_size: int, device: torch.device) -> None:
        layer = layer_of(4, **LITE) if device.type == "cuda" else layer_of(3)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._case = LatentCase(layer, page_size, BATCHES[batch], dtype, device)
        self.pool, self.batch = self._case.pool, self._case.batch
        new = [kept[prefix:] for kept, (prefix, _) in zip(self._case.kept, BATCHES[batch], strict=True)]
        self.pool.set_kv(0, self.batch.out_cache_loc, torch.cat(new))

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        heads = LatentHeads(self._case.layer, self._case.weight)
        return backend.attend_latent(torch.cat(self._case.q), self._case.layer, heads)

    def check(self, out: torch.Tensor) -> None:
        self._case.check([out.view(len(out), -1, self._case.layer.v_dim)])


def _made(name: str, variant: str, case: Case) -> AttentionBackend | None:
    """The backend called `name`, or None where it refuses, as it has to."""
    pool, asked = case.pool, needs_of(case.pool)
    if variant in MASKS:
        asked = asked.with_feature(Feature.MASK)
    reason = REFUSED[name].get(variant)
    if (name, variant) == ("flashinfer", "chunk") and pool.page_size <= ALL["chunk"]:
        reason = None
    if (name, variant, pool.page_size) == ("flash_mla", "latent", 64):
        reason = None
    if BACKENDS[name].device not in (None, pool.device.type):
        # The interpreter takes CPU tensors, which is nothing to be served with.
        others = "runs on CPUs only; choose auto or" if name == "cpu" else "needs GPUs; choose auto or (cpu or )?torch"
        with pytest.raises(ConfigError, match=f"test={name} {others}"):
            check_backend(name, asked, "test")
        if name != "triton":
            return None
    elif reason is not None:
        with pytest.raises(ConfigError, match=f"test={name} ({reason})"):
            check_backend(name, asked, "test")
        return None
    else:
        check_backend(name, asked, "test")
    if (package := BACKENDS[name].package) is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    try:
        return IMPLEMENTATIONS[name](pool.layers, pool)
    except ConfigError as error:
        assert (name, LACKING[variant] in str(error)) == ("fa3", True)  # noqa: PT017 - serving it would be as right
        return None


def _by_graph(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """What a captured step of decodes answers."""
    rows = case.batch.batch_size
    shape = StepShape(rows, rows, rows)
    for capturing in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph) if capturing else torch.cuda.stream(torch.cuda.Stream()):
            backend.prepare_capture(case.batch, shape)
            out = case.attend(backend)
        torch.cuda.synchronize()
    backend.prepare_replay(shape, case.batch.prefix_lens.astype(np.int32), case.batch.extend_lens.astype(np.int32))
    out.fill_(float("nan"))
    graph.replay()
    return out


@pytest.fixture
def device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if device.type == "cpu":
        monkeypatch.setattr(decode, "_MAX_SPLITS", 4)  # each a turn of the interpreter's loop, empty or not
    return device


def _cells() -> Iterator[Any]:
    """By default one of variant, batch and page size is unusual. The slow ones have every pair of them, the exhaustive
    ones all three. What needs a GPU is refused everywhere else with the same words: one cell shows them."""
    for (i, variant), (j, batch), page_size in itertools.product(
        enumerate([*VARIANTS, "latent"]), enumerate(BATCHES), PAGE_SIZES
    ):
        unusual = (variant != "plain") + (batch not in ("decode", "mixed")) + (page_size != 16)
        is_pair = page_size == PAGE_SIZES[(i + j) % len(PAGE_SIZES)]
        marks = [] if unusual < 2 else [pytest.mark.slow] if is_pair else [*EXHAUSTIVE]
        for name, spec in BACKENDS.items():
            on_gpus = spec.device == "cuda" and name != "triton" and (unusual or batch != "decode")
            yield pytest.param(name, variant, batch, page_size, marks=[*marks, *[pytest.mark.gpu] * on_gpus])


@pytest.mark.parametrize(("name", "variant", "batch", "page_size"), [*_cells()])
def test_every_backend_serves_or_refuses(
    name: str, variant: str, batch: str, page_size: int, device: torch.device
) -> None:
    case = _Latents(batch, page_size, device) if variant == "latent" else _Heads(variant, batch, page_size, device)
    backend = _made(name, variant, case)
    if backend is None:
        return
    backend.init_forward_metadata(case.batch)
    case.check(case.attend(backend))
    if case.batch.mode is ForwardMode.DECODE and device.type == "cuda" and backend.captures_cuda_graphs:
        case.check(_by_graph(backend, case))
