"""Decides every `auto` setting once, into a new `EngineConfig`, with a reason for each decision.

This module owns the rules between settings, model and machine. The caller passes facts about the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from configs.attention import BACKENDS, AttentionNeeds, Feature, LatentShape, Phase, check_backend, choose_backend
from configs.cards import FP8_FROM, LEAST, Card, shown
from configs.checkpoint import model_name
from configs.errors import ConfigError
from configs.kv_pages import cut_max_model_len, num_kv_pages
from configs.latent_attention import LatentAttention
from configs.model_config import ModelConfig, check_tensor_parallel_size
from configs.numerics import check_exact
from configs.recurrent import STATE_CHUNK
from configs.schema import EngineConfig

_SectionT = TypeVar("_SectionT", bound=BaseModel)

ONE_NODE_STRATEGY: dict[str, Literal["shared_memory", "symmetric_memory"]] = {
    "cpu": "shared_memory",
    "cuda": "symmetric_memory",
}
"""Default of `parallel.all_reduce` by device, if all ranks are on one node."""
ANY_NODES_STRATEGY: dict[str, Literal["gloo", "nccl"]] = {"cpu": "gloo", "cuda": "nccl"}
"""Default of `parallel.all_reduce` by device, if the ranks may be on several nodes."""
_STEP_TOKENS_ON_CPU = 512
_STEP_TOKENS_ON_GPU = range(2048, 8192 + 1, 512)
# Tokens per step for which one rank's matrix products take 45 ms on an H200. Requests wait for the end of a step, and
# longer steps compute prompts no faster.
_STEP_FLOPS = 30e12


@dataclass(frozen=True)
class HostFacts:
    """Facts about one of the nodes that will hold the ranks."""

    num_cores: int
    num_gpus: int
    card: Card | None = None
    """What holds for all GPUs that may hold ranks. None if they were not asked."""
    packages: frozenset[str] = frozenset()
    """Installed packages of attention backends. See `BackendSpec.package`."""


@dataclass(frozen=True)
class Decision:
    """One setting that was decided, because the configuration left it open."""

    key: str
    """Dotted name of the setting."""
    value: Any
    why: str
    given: Any = "auto"
    """The value before the decision."""

    def __str__(self) -> str:
        return f"{self.key}: {self.given} -> {self.value} ({self.why})"


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings that run. In `config`, only settings that the KV pool decides later (`kv_cache.num_tokens`,
    `max_model_len`) are still open."""

    config: EngineConfig
    decisions: tuple[Decision, ...]


class _Resolver:
    """Collects decisions by dotted setting name."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def decide(self, key: str, given: Any, value: Any, why: str) -> Any:
        """Returns `given`, or records and returns `value` if `given` is auto."""
        if given not in (None, "auto"):
            return given
        self.decisions.append(Decision(key, value, why))
        return value

    def apply(self, config: EngineConfig) -> EngineConfig:
        """Returns `config` with all decisions applied."""
        for decision in self.decisions:
            config = _replaced(config, decision.key.split("."), decision.value)
        return config


def resolve(config: EngineConfig, model: ModelConfig, host: HostFacts) -> ResolvedConfig:
    """Checks `config` against itself, `model` and `host`, and decides its open settings.

    Raises:
        ConfigError: settings contradict each other, or do not fit the model or the machine.
    """
    check_settings(config)
    check_tensor_parallel_size(model, config.tensor_parallel_size)
    if config.server.max_logprobs > model.vocab_size:
        raise ConfigError(
            f"server.max_logprobs={config.server.max_logprobs} exceeds the model's vocab_size={model.vocab_size}; "
            "choose at most the latter"
        )
    resolver = _Resolver()
    decide = resolver.decide
    on_gpu = host.num_gpus > 0
    device = decide("device", config.device, "cuda" if on_gpu else "cpu", "GPUs found" if on_gpu else "no GPU found")
    if device == "cuda" and not on_gpu:
        raise ConfigError("device=cuda, but no GPU was found; set device=cpu or start Ray on a node with GPUs")
    if device == "cuda":
        dtype = decide("dtype", config.dtype, model.dtype, "the checkpoint's own")
    else:
        dtype = decide("dtype", config.dtype, "float32", "cpu")
    if model.has_states:
        _check_recurrent(config)
    decided = config.model_copy(update={"device": device, "dtype": dtype})
    card = host.card if device == "cuda" else None
    if card is not None:
        _check_card(resolver, config, model, card)
    needs = attention_needs(decided, model, None if card is None else card.compute_capability)
    _decide_attention(resolver, config, model, needs, host.packages)
    names = config.model_names
    if config.served_model_name == [] or "*" in "".join(names[:1]) or any(name.count("*") > 1 for name in names):
        raise ConfigError(
            f"served_model_name={config.served_model_name!r}: must be a name, or a list that begins with one; only "
            "later names may have a `*`, one each"
        )
    decide("served_model_name", config.served_model_name, model_name(config.model), "from model")
    _decide_parallel(resolver, config, device, host)
    # Ranks on CPUs reserve few Ray CPUs: sharing cores makes them slower, not wrong.
    cpus, fraction = (1.0, 0.9) if device == "cuda" else (0.1, 0.3)
    decide("placement.cpus_per_rank", config.placement.cpus_per_rank, cpus, device)
    decide("placement.cpus_for_engine", config.placement.cpus_for_engine, cpus, device)
    decide("recovery.warm_spares", config.recovery.warm_spares, int(device == "cuda"), device)
    if config.kv_cache.num_tokens is None and config.kv_cache.memory_bytes is None:
        decide("kv_cache.memory_fraction", config.kv_cache.memory_fraction, fraction, device)
    _decide_step_size(resolver, config, model, device)
    _decide_length(resolver, config, model)
    return ResolvedConfig(resolver.apply(config), tuple(resolver.decisions))


def check_settings(config: EngineConfig) -> None:
    """Raises ConfigError if settings contradict each other, independent of model and machine."""
    if config.autoscaling_config is not None and config.num_replicas != 1:
        raise ConfigError(f"num_replicas={config.num_replicas} and autoscaling_config are both set; keep one of them")
    page_size = config.kv_cache.page_size
    if page_size & (page_size - 1):
        lower = 1 << (page_size.bit_length() - 1)
        raise ConfigError(f"kv_cache.page_size={page_size} is not a power of two; choose {lower} or {2 * lower}")
    max_num_seqs, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if max_num_seqs is not None and budget is not None and budget < max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={budget} is less than scheduler.max_num_seqs={max_num_seqs}, and every "
            f"running request takes one token a step; choose at least {max_num_seqs} for the former, or fewer requests"
        )
    speculation = config.speculation
    if (speculation.method == "eagle3") != (speculation.model is not None):
        raise ConfigError(
            f"speculation.method={speculation.method} and speculation.model={speculation.model}: eagle3 needs the "
            "directory or repository of a head, and nothing else takes one"
        )
    if budget is not None and budget <= speculation.num_drafts:
        raise ConfigError(
            f"speculation.num_speculative_tokens={speculation.num_drafts} and the token before them do not fit into "
            f"scheduler.max_num_batched_tokens={budget}; choose fewer of the former, or more of the latter"
        )
    all_reduce = config.parallel.all_reduce
    if config.device == "cpu" and all_reduce in _strategies("cuda"):
        raise ConfigError(f"parallel.all_reduce={all_reduce} needs GPUs, but device=cpu; choose auto")
    if all_reduce in ONE_NODE_STRATEGY.values() and config.placement.strategy != "STRICT_PACK":
        raise ConfigError(
            f"parallel.all_reduce={all_reduce} needs all ranks on one node, but placement.strategy="
            f"{config.placement.strategy} may spread them; choose STRICT_PACK, or auto"
        )


def _strategies(device: str) -> tuple[str, str]:
    """The values of `parallel.all_reduce` that work on this device."""
    return ONE_NODE_STRATEGY[device], ANY_NODES_STRATEGY[device]


def asks_for_gpus(config: EngineConfig) -> bool:
    """Whether the settings require GPUs: `device` is cuda, or it is auto and another setting works only on GPUs."""
    attention = config.attention
    names = attention.backend, attention.prefill_backend, attention.decode_backend
    only = any(spec.device == "cuda" for name, spec in BACKENDS.items() if name in names)
    only |= config.parallel.all_reduce in _strategies("cuda")
    return config.device == "cuda" or (config.device == "auto" and only)


def default_max_num_seqs(*, on_gpu: bool) -> int:
    """The value of `scheduler.max_num_seqs` if the setting is None."""
    return 256 if on_gpu else 64


def _step_tokens(model: ModelConfig, tensor_parallel_size: int) -> int:
    """Default number of tokens per step on GPUs."""
    matrices = (it for layer in model.layers for it in layer.tensors if len(it.shape) > 1)
    flops = sum(2 * float(it.share) * math.prod(it.shape) for it in matrices)
    sizes = _STEP_TOKENS_ON_GPU
    return max((size for size in sizes if size * flops <= _STEP_FLOPS * tensor_parallel_size), default=sizes[0])


def _check_recurrent(config: EngineConfig) -> None:
    """Raises ConfigError if settings do not work with recurrent layers."""
    if config.kv_cache.page_size > STATE_CHUNK:
        raise ConfigError(
            f"kv_cache.page_size={config.kv_cache.page_size} exceeds the {STATE_CHUNK} tokens after which states of "
            f"recurrent layers are stored; choose at most {STATE_CHUNK}"
        )


def _decide_step_size(resolver: _Resolver, config: EngineConfig, model: ModelConfig, device: str) -> None:
    scheduler, on_gpu = config.scheduler, device == "cuda"
    budget, max_rows = scheduler.max_num_batched_tokens, default_max_num_seqs(on_gpu=on_gpu)
    rows = resolver.decide("scheduler.max_num_seqs", scheduler.max_num_seqs, min(max_rows, budget or max_rows), device)
    max_tokens = _step_tokens(model, config.tensor_parallel_size) if on_gpu else _STEP_TOKENS_ON_CPU
    budget = resolver.decide("scheduler.max_num_batched_tokens", budget, max(max_tokens, 2 * rows), device)
    chunk = resolver.decide("scheduler.prefill_chunk_size", scheduler.prefill_chunk_size, budget, "the step's tokens")
    if chunk > budget:
        resolver.decisions.append(
            Decision("scheduler.prefill_chunk_size", budget, "scheduler.max_num_batched_tokens", chunk)
        )


def attention_needs(
    config: EngineConfig, model: ModelConfig, compute_capability: tuple[int, int] | None = None
) -> AttentionNeeds:
    """What `model` needs from the attention backends of `config`. Device and dtype must be decided already.

    Args:
        compute_capability: the smallest one of the GPUs. None if it is not known.
    """
    mixers = [layer.mixer for layer in model.all_layers if layer.mixer.token_elements]
    of_settings = {Feature.FP8_KV: config.kv_cache.dtype != "auto", Feature.EXACT: config.is_exact}
    asked = {feature for feature, is_asked in of_settings.items() if is_asked}
    latents = (mixer.shapes(config.tensor_parallel_size) for mixer in mixers if isinstance(mixer, LatentAttention))
    return AttentionNeeds(
        device="cuda" if config.device == "cuda" else "cpu",
        compute_capability=compute_capability,
        dtype=config.dtype,
        page_size=config.kv_cache.page_size,
        head_dims=frozenset(mixer.head_dim for mixer in mixers),
        features=frozenset(asked.union(*(mixer.features for mixer in mixers))),
        chunks=frozenset(mixer.chunk for mixer in mixers if mixer.chunk is not None),
        latents=frozenset[LatentShape]().union(*latents),
    )


def _check_card(resolver: _Resolver, config: EngineConfig, model: ModelConfig, card: Card) -> None:
    """Refuses GPUs without bf16, and FP8 on GPUs that have none. There, FP8 checkpoints are read as `dtype`."""
    if card.compute_capability < LEAST:
        least = shown(LEAST)
        raise ConfigError(f"device=cuda needs compute capability {least} or later, and {card}; choose device=cpu")
    if card.compute_capability[0] == 10 and config.numerics == "exact" and config.quantization == "fp8":
        raise ConfigError(f"quantization=fp8 with numerics=exact does not compile where {card}; choose auto")
    if card.compute_capability >= FP8_FROM:
        return
    why = f"FP8 needs compute capability {shown(FP8_FROM)} or later, and {card}"
    for key, value in (("kv_cache.dtype", config.kv_cache.dtype), ("quantization", config.quantization)):
        if "fp8" in value:
            raise ConfigError(f"{key}={value}: {why}; choose auto")
    if model.weight_scales is not None:
        resolver.decide("quantization", config.quantization, "none", why)


def _decide_attention(
    resolver: _Resolver, config: EngineConfig, model: ModelConfig, needs: AttentionNeeds, packages: frozenset[str]
) -> None:
    """Decides numerics and backends together: numerics can be exact only if both model and backends can."""
    device = needs.device
    value: str
    exactly = needs.with_feature(Feature.EXACT)
    try:
        check_exact(model, device, config.tensor_parallel_size)
        _choose_backends(config, exactly, packages)
        value, why = ("exact" if device == "cpu" else "fast"), str(device)
    except ConfigError as error:
        if config.numerics == "exact":
            raise ConfigError(f"numerics=exact is impossible; choose auto: {error}") from None
        value, why = "fast", str(error)
    is_exact = resolver.decide("numerics", config.numerics, value, why) == "exact"
    resolver.decisions += _choose_backends(config, exactly if is_exact else needs, packages)


def _choose_backends(config: EngineConfig, needs: AttentionNeeds, packages: frozenset[str]) -> list[Decision]:
    attention = config.attention
    given: dict[Phase, str | None] = {"prefill": attention.prefill_backend, "decode": attention.decode_backend}
    decisions = []
    for phase, own in given.items():
        key = f"attention.{phase}_backend"
        name = own or attention.backend
        if name == "auto":
            chosen = choose_backend(phase, needs, packages, drafts=config.speculation.is_by_ranks)
            decisions.append(Decision(key, *chosen))
            continue
        check_backend(name, needs, key if own else "attention.backend")
        if own is None:
            decisions.append(Decision(key, name, "attention.backend", None))
    return decisions


def _decide_parallel(resolver: _Resolver, config: EngineConfig, device: str, host: HostFacts) -> None:
    parallel, tp_size = config.parallel, config.tensor_parallel_size
    one_node = config.placement.strategy == "STRICT_PACK"
    strategy = (ONE_NODE_STRATEGY if one_node else ANY_NODES_STRATEGY)[device]
    why = f"{device}, {'ranks of one node' if one_node else f'placement.strategy={config.placement.strategy}'}"
    if device == "cuda" and host.card is not None and not host.card.has_peers:
        strategy, apart = "nccl", f"the node's {host.card.name} do not reach each other's memory"
        why = f"{device}, {apart}"
        if parallel.all_reduce == "symmetric_memory" and tp_size > 1:
            raise ConfigError(f"parallel.all_reduce=symmetric_memory is impossible: {apart}; choose auto or nccl")
    chosen = resolver.decide("parallel.all_reduce", parallel.all_reduce, strategy, why)
    if chosen not in _strategies(device):
        raise ConfigError(f"parallel.all_reduce={chosen} does not work on device={device}; choose auto or {strategy}")
    ranks = tp_size * config.num_replicas
    threads = max(1, host.num_cores // ranks)
    cores = f"{host.num_cores} cores, {ranks} ranks a node"
    resolver.decide("parallel.threads_per_rank", parallel.threads_per_rank, threads, cores)
    resolver.decide("parallel.spin_us", parallel.spin_us, 1000 if host.num_cores >= ranks else 0, cores)


def _decide_length(resolver: _Resolver, config: EngineConfig, model: ModelConfig) -> None:
    asked, longest = config.max_model_len, model.max_context
    if asked is not None and asked > longest:
        raise ConfigError(
            f"max_model_len={asked} exceeds the model's context of {longest} tokens; choose at most {longest}"
        )
    if config.kv_cache.num_tokens is None:
        return  # known once the weights are loaded
    num_pages = num_kv_pages(config.kv_cache, (), ())
    length = cut_max_model_len(config, model, num_pages)
    why = "the model's own" if length == longest else "what kv_cache.num_tokens holds"
    resolver.decide("max_model_len", asked, length, why)


def _replaced(section: _SectionT, path: Sequence[str], value: Any) -> _SectionT:
    name, *rest = path
    if rest:
        value = _replaced(getattr(section, name), rest, value)
    return section.model_copy(update={name: value})
