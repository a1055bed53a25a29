"""Every feature of every attention backend by a model that has it: what stands behind docs/reference/attention.md.

Small random models against transformers in fp32, through prompts, chunks, decodes and mixtures of them over pages that
lie in no order. On CPUs in fp32, where Triton's kernels are interpreted; on GPUs in bf16, which may err from fp32 at
most twice as far as torch_native does. Exact numerics have tests/whole/test_exact.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from attention.kv_pool import FP8
from configs.attention import BACKENDS, Feature
from configs.errors import ConfigError
from parallel.collectives.group import TensorParallelGroup
from tests.helpers.families import FAMILIES, GROUPED, Case, random_case
from tests.helpers.family_checks import Rank, random_tokens
from tests.helpers.paged_case import NewTokens, both_ways, tree

PAGE_SIZE = 16
CACHED, NEW = 19, 7
"""Tokens of a row before those that see one another by a mask, and these."""


class Cell(NamedTuple):
    """A model with a feature."""

    model_type: str = "llama"
    config: Mapping[str, Any] = MappingProxyType({})
    page_size: int = PAGE_SIZE
    mask: Any = None
    kv_dtype: torch.dtype | None = None


def _family(model_type: str, **changes: Any) -> Cell:
    return Cell(model_type, {**FAMILIES[model_type].config, **changes})


LATENT = Cell("deepseek_v2", FAMILIES["lite"].config)
LATENTS = (LATENT.model_type, "glm_moe_dsa")
# Windows, chunks and scores' caps that prompts of 37 tokens reach.
CELLS: dict[Feature | None, dict[str, Cell]] = {
    None: {"pages of 1": Cell(page_size=1), "pages of 64": Cell(page_size=64)},
    Feature.WINDOW: {"window": _family("gemma3_text")},
    Feature.SOFTCAP: {"softcap": _family("gemma2")},
    Feature.SINKS: {"sinks": _family("gpt_oss")},
    Feature.CHUNK: {"chunk": _family("llama4_text", attention_chunk_size=PAGE_SIZE)},
    Feature.LATENT: {"latent": LATENT},
    Feature.SPARSE: {"sparse": Cell("glm_moe_dsa", {**FAMILIES["glm_5"].config, "indexer_types": ["full", "shared"]})},
    Feature.MASK: {"tree": Cell(mask=tree), "both ways": Cell(mask=both_ways)},
    Feature.FP8_KV: {"FP8": Cell(kv_dtype=FP8), "latent in FP8": LATENT._replace(kv_dtype=FP8)},
}
ON_GPU = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LATENT_ON_GPU = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Heads that kernels of every GPU's backend are made for."""


def _params() -> Iterator[Any]:
    for name, spec in BACKENDS.items():
        # KeyError: a feature of which no model is here.
        for feature in (None, *sorted(spec.features - {Feature.EXACT})):
            for cell, what in CELLS[feature].items():
                needed = {feature} | ({Feature.LATENT} if what.model_type in LATENTS else set())
                if not needed <= {None, *spec.features} or any({*pair} <= needed for pair in spec.apart):
                    continue
                if spec.only not in (None, *needed):
                    continue
                if spec.device != "cuda" or name == "triton":
                    yield pytest.param(name, feature, cell, "cpu")
                if spec.device == "cuda":
                    yield pytest.param(name, feature, cell, "cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, str], Case]:
    """Models by the device and the name of a family; filled by the tests."""
    return {}


def _case(cell: Cell, device: str, path: Path, cases: dict[tuple[str, str], Case]) -> Case:
    if (key := (device, cell.model_type)) not in cases:
        on_gpu = {"cpu": {}, "cuda": LATENT_ON_GPU if cell.model_type in LATENTS else ON_GPU}[device]
        sizes = {**GROUPED, **cell.config, "num_hidden_layers": 2, **on_gpu}
        cases[key] = random_case(cell.model_type, sizes, path)
    return cases[key]


@torch.inference_mode()
def _logits(case: Case, cell: Cell, backend: str, device: str) -> torch.Tensor:
    """[tokens of all steps, vocab] fp32, on the host."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    group, sizes = TensorParallelGroup.single(device), {"backend": backend, "page_size": cell.page_size}
    rank = Rank.create(case, group, dtype, cell.kv_dtype, **sizes)
    first, second = random_tokens(1), random_tokens(2)
    if cell.mask is not None:
        rank.logits([(1, 0, first[:CACHED]), (2, 0, second[:CACHED])])
        # A decode beside them.
        rows = [(1, CACHED, first[CACHED : CACHED + NEW]), (2, CACHED, second[CACHED : CACHED + 1])]
        return torch.cat(rank.logits(rows, cell.mask(CACHED, NEW))).float().cpu()
    prompt, chunk = rank.logits([(1, 0, first[:34]), (2, 0, second[:9])])
    one, later = rank.logits([(1, 34, first[34:35]), (2, 9, second[9:36])])
    decodes = rank.logits([(1, 35, first[35:36]), (2, 36, second[36:])])
    [alone] = rank.logits([(1, 36, first[36:])])
    return torch.cat([prompt, one, decodes[0], alone, chunk, later, decodes[1]]).float().cpu()


@torch.inference_mode()
def _expected(case: Case, cell: Cell) -> torch.Tensor:
    """The same by transformers."""
    first, second = random_tokens(1), random_tokens(2)
    if cell.mask is None:
        return torch.cat([case.hf(torch.tensor([tokens])).logits[0] for tokens in (first, second)])
    new: NewTokens = cell.mask(CACHED, NEW)
    num_keys = CACHED + NEW
    seen = torch.ones(num_keys, num_keys, dtype=torch.bool).tril()
    seen[CACHED:, CACHED:] = new.visible
    hidden = torch.zeros(1, 1, num_keys, num_keys).masked_fill(~seen, torch.finfo(torch.float32).min)
    positions = torch.cat([torch.arange(CACHED), new.positions])[None]
    masked = case.hf(torch.tensor([first[:num_keys]]), attention_mask=hidden, position_ids=positions).logits[0]
    decode = case.hf(torch.tensor([second[: CACHED + 1]])).logits[0]
    return torch.cat([masked[CACHED:], decode[-1:]])


def _error(difference: torch.Tensor) -> float:
    """The median over tokens of the root mean square: at some, a rounded state chooses other experts."""
    return float(difference.square().mean(1).sqrt().median())


@pytest.mark.parametrize(("name", "feature", "cell", "device"), [*_params()])
def test_a_model_with_the_feature_has_the_logits_of_transformers(
    name: str,
    feature: Feature | None,
    cell: str,
    device: str,
    cases: dict[tuple[str, str], Case],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (name, device) == ("triton", "cpu"):
        request.getfixturevalue("interpreter")
        anywhere = {name: dataclasses.replace(BACKENDS[name], device=None)}
        monkeypatch.setattr("configs.attention.BACKENDS", {**BACKENDS, **anywhere})
        monkeypatch.setattr("attention.kernels.decode._MAX_SPLITS", 2)  # each a turn of the interpreter's loop
    if (package := BACKENDS[name].package) is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    what = CELLS[feature][cell]
    what = what._replace(page_size=BACKENDS[name].page_size or what.page_size)
    case = _case(what, device, tmp_path, cases)
    try:
        ours = _logits(case, what, name, device)
    except ConfigError:
        assert feature in BACKENDS[name].by_build
        pytest.skip(f"this build of {name} has no {feature}")
    expected = _expected(case, what)
    if device == "cuda" or what.kv_dtype is FP8:
        by_torch = _logits(case, what, "torch_native", device)
    if device == "cuda":
        assert _error(ours - expected) <= 2 * _error(by_torch - expected)
    elif what.kv_dtype is FP8:
        # In the same numbers, but for a key that fp32 puts on the other side of a number's border.
        assert _error(ours - by_torch) < 1e-3 * float(expected.std())
        assert 0 < _error(ours - expected) < 0.1 * float(expected.std())
    else:
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
