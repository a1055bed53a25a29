"""Computes from config.json alone, for numbers of ranks, whether a model fits and how large its KV pool is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from configs.cards import CARDS, Card
from configs.errors import ConfigError
from configs.kv_pages import PoolRule, dtype_bytes, pages_within, pool_bytes
from configs.model_config import ModelConfig
from configs.schema import EngineConfig, resolved
from parallel.plan import ShardPlan

_GIB = 1 << 30
_UNITS = {"gb": 10**9, "gib": _GIB, "mib": 1 << 20, "g": _GIB, "m": 1 << 20}

# Memory of a rank besides weights and KV: CUDA's context, kernels, libraries' workspaces, the captured graphs, and the
# tensors of the largest step. Fitted to Qwen3-0.6B, 8B and 32B on H200s at 1, 2 and 4 ranks (2.8 to 3.9 GB).
_FIXED_BYTES = 2_600_000_000
_ACTIVATIONS_PER_TOKEN = 12  # elements, as a multiple of a token's hidden state


@dataclass(frozen=True)
class Fit:
    """Whether and how the model fits on one number of ranks."""

    tp_size: int
    weight_bytes: int
    """Bytes of weights on the fullest rank."""
    kv_tokens: int
    """Number of tokens that fit in the KV pool. 0 if the model does not fit."""


def parse_gpu(text: str) -> tuple[int, Card | None]:
    """Bytes of memory of `80GB`, `94GiB` or a GPU's name, e.g. `h200`, and the GPU if it is named. Raises ConfigError
    for any other text."""
    known = CARDS.get(text.lower())
    if known is not None:
        return known.memory_bytes, known
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is no amount of memory; give e.g. 80GiB, or one of {', '.join(CARDS)}")
    return int(float(match[1]) * _UNITS[match[2].lower()]), None


def sizes_to_show(model: ModelConfig, configured: int) -> list[int]:
    """The numbers of ranks 1 to 8, 16, and `configured`, up to the model's number of query heads."""
    return sorted({size for size in (*range(1, 9), 16, configured) if size <= model.num_attention_heads})


def fits(model: ModelConfig, config: EngineConfig, sizes: Iterable[int], memory_bytes: int) -> list[Fit]:
    """The fit for each of `sizes`, numbers of GPUs with `memory_bytes` each. `config` must be resolved for CUDA."""
    scheduler = config.scheduler
    activations = _ACTIVATIONS_PER_TOKEN * model.hidden_size + _routed_outputs(model)
    used = _FIXED_BYTES + activations * resolved(scheduler.max_num_batched_tokens) * dtype_bytes(config.dtype)
    found = []
    for size in sizes:
        plan = ShardPlan.create(model, size)
        weights = max(plan.weight_bytes(rank, config) for rank in range(size))
        states = max(plan.state_bytes(rank, config) for rank in range(size))
        found.append(Fit(size, weights, _kv_tokens(plan, config, memory_bytes - used - weights - states)))
    return found


def _routed_outputs(model: ModelConfig) -> int:
    """Number of elements that a layer's experts compute for one token, before they are summed."""
    layers = dict.fromkeys(model.layers)
    return max(
        int(sum(it.share * (it.elements // it.shape[1]) for it in layer.tensors if it.share != 1)) for layer in layers
    )


def _kv_tokens(plan: ShardPlan, config: EngineConfig, free_bytes: int) -> int:
    kv, rule = config.kv_cache, PoolRule.of(config, plan.model)
    pages = [plan.kv_page_bytes(rank, config) for rank in range(plan.tp_size)]
    if kv.num_tokens is not None:
        num_pages = -(-kv.num_tokens // kv.page_size)
        fits_all = all(pool_bytes(num_pages, page, rule) <= free_bytes for page in pages)
        return kv.num_tokens if fits_all else 0
    budget = free_bytes * resolved(kv.memory_fraction) if kv.memory_bytes is None else min(kv.memory_bytes, free_bytes)
    # One page is padding. The page after it must be enough for a prompt and its answer.
    return max(min(pages_within(budget, page, rule) for page in pages), 0) * kv.page_size
