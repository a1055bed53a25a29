"""What each attention backend can do. The start-up checks, the docs and the tests read this table.

This module is plain data, except that measurements decide the order of the backends. attention/registry.py imports
the modules, which register the classes of the backends.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from configs.attention_times import Ranking, rank
from configs.cards import FP8_FROM, LEAST
from configs.errors import ConfigError

Phase = Literal["prefill", "decode"]
"""prefill: a step in which some row has more than one token. decode: a step in which every row has one token."""


class Feature(StrEnum):
    """Features that a backend may have beyond causal grouped-query attention over pages."""

    WINDOW = "sliding window"
    SOFTCAP = "soft cap"
    SINKS = "sinks"
    CHUNK = "chunked local attention"
    LATENT = "latent attention (MLA)"
    SPARSE = "sparse attention (DSA)"
    MASK = "masks over new tokens"
    """Requested by a step (`ForwardBatch.mask`), not by a layer: trees of drafts, images, scored items."""
    FP8_KV = "FP8 KV cache"
    EXACT = "exact numerics"
    """Requested by a setting, not by a layer: bits that do not depend on the batch, chunks or the number of ranks."""


class LatentShape(NamedTuple):
    """Sizes of a latent layer on one rank."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    """Number of elements of the rotated key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """The latent layers for which a backend has kernels."""

    most_heads: int
    """Largest number of query heads on one rank."""
    latent_dims: frozenset[int]
    rope_unit: int
    """The size of a rotated key must be a multiple of this."""

    def hold(self, shape: LatentShape) -> bool:
        """Whether the backend has kernels for `shape`."""
        is_wide = shape.latent_dim in self.latent_dims and shape.rope_dim % self.rope_unit == 0
        return is_wide and shape.num_heads <= self.most_heads

    def __str__(self) -> str:
        heads, dims, unit = self.most_heads, listed(self.latent_dims), self.rope_unit
        return f"at most {heads} heads on a rank, latents of {dims} elements and rotated keys of whole {unit}s"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What a model on a device needs from a backend."""

    device: Literal["cpu", "cuda"]
    compute_capability: tuple[int, int] | None = None
    """Compute capability of the GPUs. None if it is not known yet; then the ranks check it."""
    dtype: str
    """Dtype of activations: float32, bfloat16 or float16. KV has the same dtype unless `Feature.FP8_KV` is needed."""
    page_size: int
    head_dims: frozenset[int]
    features: frozenset[Feature]
    chunks: frozenset[int] = frozenset()
    """Chunk sizes of `Feature.CHUNK`, in tokens."""
    latents: frozenset[LatentShape] = frozenset()
    """Shapes of the latent layers on the ranks."""

    def with_feature(self, feature: Feature) -> AttentionNeeds:
        """Returns a copy with one more feature."""
        return replace(self, features=self.features | {feature})


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """What one backend can do."""

    name: str
    module: str
    """The module that registers the backend's class."""
    what: str
    """A short description for messages and docs."""
    package: str | None = None
    """The optional package that the backend needs. `auto` considers the backend only if the package is installed."""
    needs_nvcc: bool = False
    """Whether the package compiles its kernels at their first use."""
    plans_on_host: bool = False
    """Whether the host plans each decode from the rows' lengths. Then ranks cannot draft several tokens by
    themselves."""
    device: Literal["cpu", "cuda"] | None = None
    """The kind of device that the backend runs on. If None, it runs on both kinds."""
    compute_capabilities: tuple[tuple[int, int], ...] | None = None
    """Compute capabilities of the GPUs that it runs on. If None, all from `min_compute_capability` on."""
    min_compute_capability: tuple[int, int] = (0, 0)
    """The smallest compute capability that the backend runs on."""
    dtypes: frozenset[str]
    max_page_size: int | None = None
    page_size: int | None = None
    """The only page size that the backend supports. If None, any up to `max_page_size`."""
    max_head_dim: int | None = None
    head_dims: frozenset[int] | None = None
    """Head sizes that the backend supports. If None, any size up to `max_head_dim`. Latent layers have other limits."""
    features: frozenset[Feature]
    only: Feature | None = None
    """The backend serves only models that need this feature. If None, others too."""
    by_build: frozenset[Feature] = frozenset()
    """The part of `features` that only some builds of the package have. A rank finds out when it loads the package."""
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    """Reasons for missing features, shown in messages."""
    apart: tuple[tuple[Feature, Feature], ...] = ()
    """Pairs of `features` that the backend cannot combine."""
    whole_chunks: bool = False
    """Whether chunks of `Feature.CHUNK` must consist of whole pages."""
    latent_sizes: LatentSizes | None = None
    """Sizes of latent layers that the backend supports. If None, all."""
    first_capability: Mapping[Feature, tuple[int, int]] = field(default_factory=dict)
    """The first compute capability with a feature, for features that not all supported GPUs have."""

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """The reason why the backend cannot serve `needs`, or None if it can."""
        if self.device not in (None, needs.device):
            return "needs GPUs" if self.device == "cuda" else "runs on CPUs only"
        known, served = needs.compute_capability, self.compute_capabilities
        if known is not None and served is not None and known not in served:
            return f"needs compute capability {_shown(served)}, and this is {_shown([known])}"
        least = self.min_compute_capability
        if known is not None and known < least:
            return f"needs compute capability {_shown([least])} or later, and this is {_shown([known])}"
        if needs.dtype not in self.dtypes:
            return f"serves {' and '.join(sorted(self.dtypes))}, and dtype is {needs.dtype}"
        if self.max_page_size is not None and needs.page_size > self.max_page_size:
            return f"takes pages of at most {self.max_page_size} tokens, and kv_cache.page_size is {needs.page_size}"
        if self.only is not None and self.only not in needs.features:
            return f"serves only models with {self.only}"
        if self.page_size not in (None, needs.page_size):
            return f"takes pages of {self.page_size} tokens, and kv_cache.page_size is {needs.page_size}"
        widest = max(needs.head_dims, default=0)
        if self.max_head_dim is not None and widest > self.max_head_dim:
            return f"takes heads of at most {self.max_head_dim} elements, and the model's have {widest}"
        # The kernels of latent layers have size limits of their own.
        of_heads = None if Feature.LATENT in needs.features else self.head_dims
        if of_heads is not None and not needs.head_dims <= of_heads:
            return f"takes heads of {listed(of_heads)} elements, and the model's have {max(needs.head_dims - of_heads)}"
        for shape in sorted(needs.latents):
            if self.latent_sizes is not None and not self.latent_sizes.hold(shape):
                return (
                    f"takes latent layers of {self.latent_sizes}, and there are ranks with {shape.num_heads} heads, "
                    f"latents of {shape.latent_dim} and rotated keys of {shape.rope_dim}"
                )
        for chunk in sorted(needs.chunks) if self.whole_chunks else ():
            if chunk % needs.page_size:
                return f"takes chunks of whole pages, and has {chunk} tokens where kv_cache.page_size={needs.page_size}"
        asked = sorted(needs.features)
        missing = [f"{it} ({self.lacks[it]})" if it in self.lacks else it for it in asked if it not in self.features]
        for feature, first in self.first_capability.items():
            if feature in needs.features and known is not None and known < first:
                missing.append(f"{feature} below compute capability {_shown([first])}")
        missing += [f"{one} for {other}" for one, other in self.apart if {one, other} <= needs.features]
        return f"has no {' and no '.join(missing)}" if missing else None


_HALVES = frozenset({"bfloat16", "float16"})
_BY_BATCH = "its splits follow the batch"
_NOT_WITH_SPARSE = ((Feature.SPARSE, Feature.FP8_KV), (Feature.SPARSE, Feature.MASK))
_SPECS = (
    BackendSpec(
        name="fa3",
        module="attention.fa3",
        what="FlashAttention-3",
        device="cuda",
        compute_capabilities=((9, 0),),
        dtypes=_HALVES,
        max_page_size=256,
        max_head_dim=256,
        features=frozenset(Feature) - {Feature.MASK, Feature.FP8_KV, Feature.EXACT, Feature.SPARSE},
        by_build=frozenset({Feature.SOFTCAP, Feature.LATENT}),
        lacks={Feature.FP8_KV: "it would round queries to FP8 as well", Feature.EXACT: _BY_BATCH},
    ),
    BackendSpec(
        name="triton",
        module="attention.triton_backend",
        what="kernels of our own in Triton",
        device="cuda",
        dtypes=_HALVES | {"float32"},
        max_head_dim=256,
        features=frozenset(Feature),
        apart=((Feature.EXACT, Feature.MASK), *_NOT_WITH_SPARSE),
        first_capability={Feature.FP8_KV: FP8_FROM},
    ),
    BackendSpec(
        name="flashinfer",
        module="attention.flashinfer_backend",
        what="FlashInfer, an extra",
        package="flashinfer",
        needs_nvcc=True,
        plans_on_host=True,
        device="cuda",
        min_compute_capability=LEAST,
        dtypes=_HALVES,
        head_dims=frozenset({64, 128, 256}),
        features=frozenset(Feature) - {Feature.SINKS, Feature.EXACT, Feature.SPARSE},
        lacks={Feature.EXACT: _BY_BATCH},
        apart=((Feature.FP8_KV, Feature.LATENT), (Feature.MASK, Feature.LATENT)),
        whole_chunks=True,
        latent_sizes=LatentSizes(most_heads=128, latent_dims=frozenset({128, 256, 512}), rope_unit=64),
        first_capability={Feature.FP8_KV: FP8_FROM},
    ),
    BackendSpec(
        name="flash_mla",
        module="attention.flash_mla",
        what="FlashMLA of sglang-kernel, and our Triton kernels for prompts",
        package="sgl_kernel",
        device="cuda",
        compute_capabilities=((9, 0),),
        dtypes=_HALVES,
        page_size=64,
        features=frozenset({Feature.LATENT, Feature.SPARSE, Feature.MASK}),
        only=Feature.LATENT,
        lacks={Feature.FP8_KV: "it would round queries to FP8 as well", Feature.EXACT: _BY_BATCH},
        apart=((Feature.SPARSE, Feature.MASK),),
        latent_sizes=LatentSizes(most_heads=128, latent_dims=frozenset({512}), rope_unit=64),
    ),
    BackendSpec(
        name="cpu",
        module="attention.cpu_backend",
        what="kernels of our own in C",
        device="cpu",
        dtypes=_HALVES | {"float32"},
        features=frozenset(Feature),
        apart=_NOT_WITH_SPARSE,
    ),
    BackendSpec(
        name="torch_native",
        module="attention.torch_native",
        what="plain torch, the reference",
        dtypes=_HALVES | {"float32"},
        features=frozenset(Feature) - {Feature.EXACT},
        lacks={Feature.EXACT: "its products' order follows their sizes"},
        apart=_NOT_WITH_SPARSE,
    ),
)
BACKENDS: Mapping[str, BackendSpec] = {spec.name: spec for spec in _SPECS}
"""The backends by their names in `attention.backend`."""
UNMEASURED = tuple(name for name, spec in BACKENDS.items() if spec.package is None)
"""The order in which `auto` tries backends if there is no measurement."""


def ranking(phase: Phase, needs: AttentionNeeds) -> Ranking:
    """The backends in measured order for steps of `phase`. Empty if there is no measurement for these needs."""
    if needs.device == "cpu" or needs.dtype not in _HALVES or needs.features & {Feature.FP8_KV, Feature.EXACT}:
        return Ranking({}, "")
    latent_heads = max((shape.num_heads for shape in needs.latents), default=None)
    return rank(is_decode=phase == "decode", capability=needs.compute_capability, latent_heads=latent_heads)


def choose_backend(
    phase: Phase, needs: AttentionNeeds, packages: Iterable[str] = (), *, drafts: bool = False
) -> tuple[str, str]:
    """Chooses the backend that `auto` uses for steps of `phase`.

    Args:
        packages: installed packages among those that `BackendSpec.package` names.
        drafts: whether ranks draft tokens between steps.

    Returns:
        The backend's name, and the reason: which faster backends cannot serve `needs`, and how much slower the next one
        is.

    Raises:
        ConfigError: no backend can serve `needs`.
    """
    measured = ranking(phase, needs)
    order, passed = tuple(dict.fromkeys((*measured.us, *UNMEASURED))), list[str]()
    for i, name in enumerate(order):
        spec = BACKENDS[name]
        refusal = spec.refusal(needs)
        if refusal is None and (unsure := sorted(needs.features & spec.by_build)):
            refusal = f"has {' and '.join(unsure)} in some builds only"
        if refusal is None and spec.compute_capabilities is not None and needs.compute_capability is None:
            refusal = f"needs compute capability {_shown(spec.compute_capabilities)}, and the GPUs' is not known"
        if refusal is None and spec.package is not None and spec.package not in packages:
            refusal = "is not installed" + ", or nvcc is not" * spec.needs_nvcc
            refusal += f", the fastest in {measured.what}" if i == 0 else ""
        if refusal is None and spec.plans_on_host and drafts and phase == "decode":
            refusal = "plans each pass of a draft on the host"
        if refusal is None:
            where = needs.device if needs.compute_capability is None else f"sm{_shown([needs.compute_capability], '')}"
            if name in measured.us and (following := order[i + 1]) in measured.us:
                ratio = measured.us[following] / measured.us[name]
                passed.append(f"{following} takes {ratio:.2f} times as long in {measured.what}")
            return name, "; ".join([f"{where}, {needs.dtype}", *passed])
        if spec.device in (None, needs.device):  # Backends for GPUs are not mentioned on CPUs.
            passed.append(f"{name} {refusal}")
    raise ConfigError(f"no attention backend serves this model: {'; '.join(passed)}")


def installed_packages() -> frozenset[str]:
    """The installed packages that `BackendSpec.package` names. Without nvcc, those that need it do not count."""
    compiles = bool(shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.path.exists("/usr/local/cuda/bin/nvcc"))
    named = (spec.package for spec in _SPECS if spec.package is not None and (compiles or not spec.needs_nvcc))
    return frozenset(name for name in named if importlib.util.find_spec(name) is not None)


def check_backend(name: str, needs: AttentionNeeds, setting: str) -> None:
    """Raises ConfigError, which lists other backends, if backend `name`, given by `setting`, cannot serve `needs`."""
    refusal = BACKENDS[name].refusal(needs)
    if refusal is not None:
        able = [spec.name for spec in _SPECS if spec.refusal(needs) is None]
        advice = f"choose auto or {' or '.join(able)}" if able else "no other backend can either"
        raise ConfigError(f"{setting}={name} {refusal}; {advice}")


def listed(values: Iterable[int]) -> str:
    """The values in ascending order, in words: 1, 2 or 4."""
    *others, last = map(str, sorted(values))
    return f"{', '.join(others)} or {last}" if others else last


def _shown(capabilities: Iterable[tuple[int, int]], dot: str = ".") -> str:
    return " or ".join(f"{major}{dot}{minor}" for major, minor in capabilities)
