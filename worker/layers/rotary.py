"""Rotary position embedding: frequencies as transformers computes them, and their application to query and key."""

from __future__ import annotations

import math
from typing import Any

import torch

from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer
from attention.rotation import LatentNorm, QKNorms, Rotation
from configs.errors import ConfigError
from configs.model_config import ModelConfig
from configs.rope import RopeConfig, yarn_mscale
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import Span
from worker.kernels.cpu_pointwise import rms_norm

_POSITIONS_AT_ONCE = 1024  # their intermediate values fit a cache
# pi / 2 as a number of 33 bits, so that products with integers below 2**20 are exact, and the remainder.
_HALF_PI = (1.5707963267341256, 6.077100506506192e-11)


class RotaryEmbedding:
    """Cosines and sines of every position below `max_positions`, for the kernel on CUDA and for torch elsewhere.

    Uses the halves convention: element i of a head is paired with element i + rotary_dim / 2. Elements from rotary_dim
    on are not rotated.
    """

    def __init__(
        self, rope: RopeConfig, rotary_dim: int, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq, attention_factor = inverse_frequencies(rope, rotary_dim)
        inv_freq, every = inv_freq.to(device), torch.arange(max_positions, dtype=torch.float32, device=device)
        blocks = torch.split(every, _POSITIONS_AT_ONCE)
        tables = zip(*(_cos_sin(torch.outer(positions, inv_freq)) for positions in blocks), strict=True)
        cos, sin = (torch.cat(parts).float() * attention_factor for parts in tables)
        self._on_cuda = device.type == "cuda"
        self._query_factors = None if rope.temperature is None else _query_factors(*rope.temperature, every)
        # The kernel reads [max_positions, rotary_dim] fp32: rotary_dim / 2 cosines, then the same number of sines.
        # torch reads [max_positions, 1, 2 * rotary_dim]: cosines for both halves, then sines with a negative first
        # half, so that a rotation is x * cos + swapped(x) * sin. fp32 until cast once to the activations' dtype.
        self._table = (
            torch.cat((cos, sin), dim=1)
            if self._on_cuda
            else torch.cat((cos, cos, -sin, sin), dim=1).to(dtype).unsqueeze(1)
        )

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation at positions [num_tokens] int64. Called once a step."""
        factors = None if self._query_factors is None else self._query_factors.index_select(0, positions)
        if self._on_cuda:
            return KernelRotation(self._table, positions, factors)
        cos, sin = self._table.index_select(0, positions).chunk(2, dim=-1)
        return TorchRotation(cos, sin, factors)


def _query_factors(scale: float, floor: int, positions: torch.Tensor) -> torch.Tensor:
    """[len(positions), 1] fp32, as in RopeConfig.temperature. Each distinct value is computed once, in fp64."""
    steps = (positions.long() + 1) // floor
    factors = [1 + scale * math.log1p(step) for step in range(int(steps[-1]) + 1)]
    return torch.tensor(factors, device=positions.device)[steps].unsqueeze(1)


def _cos_sin(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines in fp64 of angles from 0 to below 2**20, correct to about 1e-16 and equal on all machines.

    Uses only additions and multiplications, which IEEE 754 fixes. torch's own cosines depend on the machine, and on one
    machine on the numbers of threads and elements: logits of two runs differed from position 32 on, where a second
    thread's part of the table began on a host of 16 cores.
    """
    angles = angles.double()
    turns = torch.round(angles * (2 / math.pi))
    rest = angles - turns * _HALF_PI[0] - turns * _HALF_PI[1]  # between -pi / 4 and pi / 4
    square = rest * rest
    # Taylor's series, up to fp64's precision.
    sin, cos = torch.zeros_like(rest), torch.zeros_like(rest)
    for n in range(8, 0, -1):
        sin = (sin + 1) * (square * (-1 / (2 * n * (2 * n + 1))))
        cos = (cos + 1) * (square * (-1 / (2 * n * (2 * n - 1))))
    sin, cos = (sin + 1) * rest, cos + 1
    quadrant = turns.long() & 3
    is_odd = quadrant & 1 == 1
    signs = 1 - 2 * (quadrant >> 1).double()
    cos, sin = torch.where(is_odd, -sin, cos), torch.where(is_odd, cos, sin)
    return cos * signs, sin * signs


class KernelRotation:
    """A step's rotation by one Triton kernel, which looks up positions and writes query heads in place.

    Args:
        cos_sin: [max_positions, rotary_dim] fp32, contiguous.
        positions: [num_tokens] int64.
        query_factors: [num_tokens, 1] fp32: factors of the tokens' queries. If None, queries are not scaled.
    """

    def __init__(
        self, cos_sin: torch.Tensor, positions: torch.Tensor, query_factors: torch.Tensor | None = None
    ) -> None:
        from worker.kernels.rope import latent_norm_rope_store, qk_norm_rope_store

        self._kernel, self._latent_kernel = qk_norm_rope_store, latent_norm_rope_store
        self._cos_sin = cos_sin
        self._positions = positions
        self._query_factors = query_factors
        self._by_torch: TorchRotation | None = None

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        layer: AttentionLayer,
        norms: QKNorms | None,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        k_slots, v_slots = pool.slots(layer.layer_id)
        if self._query_factors is not None:
            qkv[:, : layer.tp_q_head_num * layer.head_dim] *= self._query_factors
        self._kernel(
            qkv,
            q_weight=None if norms is None else norms.q_weight,
            k_weight=None if norms is None else norms.k_weight,
            eps=0.0 if norms is None else norms.eps,
            cos_sin=self._cos_sin,
            positions=self._positions,
            k_slots=k_slots,
            v_slots=v_slots,
            out_cache_loc=out_cache_loc,
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        return qkv[:, : layer.tp_q_head_num * layer.head_dim]

    def norm_rotate_store_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        layer: LatentLayer,
        norm: LatentNorm,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> None:
        slots, *_ = pool.slots(layer.layer_id)
        self._latent_kernel(
            q,
            latents,
            weight=norm.weight,
            eps=norm.eps,
            cos_sin=self._cos_sin,
            positions=self._positions,
            slots=slots,
            out_cache_loc=out_cache_loc,
            scale=layer.k_scale,
        )

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        if self._by_torch is None:
            cos, sin = self._cos_sin[self._positions].to(heads.dtype).unsqueeze(1).chunk(2, dim=-1)
            self._by_torch = TorchRotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
        return self._by_torch.rotate(heads)


class TorchRotation:
    """A step's rotation by torch.

    Args:
        cos: [num_tokens, 1, rotary_dim] of the activations' dtype.
        sin: [num_tokens, 1, rotary_dim] of the activations' dtype, with a negative first half.
        query_factors: [num_tokens, 1] fp32: factors of the tokens' queries. If None, queries are not scaled.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, query_factors: torch.Tensor | None = None) -> None:
        self._cos = cos
        self._sin = sin
        self._query_factors = query_factors

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        rotary_dim = self._cos.shape[-1]
        part = heads[..., :rotary_dim]
        # Each product is rounded separately: addcmul would fuse them in whole vectors but not in the remainder.
        turned = (part * self._cos).add_(part.roll(rotary_dim // 2, -1).mul_(self._sin))
        return turned if rotary_dim == heads.shape[-1] else torch.cat((turned, heads[..., rotary_dim:]), dim=-1)

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        layer: AttentionLayer,
        norms: QKNorms | None,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        num_tokens, num_q_heads, head_dim = len(qkv), layer.tp_q_head_num, layer.head_dim
        q_size, kv_size = num_q_heads * head_dim, layer.tp_k_head_num * head_dim
        if self._query_factors is not None:
            qkv[:, :q_size] *= self._query_factors
        qk = qkv[:, :-kv_size].view(num_tokens, -1, head_dim)
        if norms is not None:
            q = rms_norm(qk[:, :num_q_heads], norms.q_weight, norms.eps)
            k = rms_norm(qk[:, num_q_heads:], norms.k_weight, norms.eps)
            qk = torch.cat((q, k), dim=1)
        turned = self.rotate(qk).view(num_tokens, -1)
        pool.set_kv(layer.layer_id, out_cache_loc, turned[:, q_size:], qkv[:, -kv_size:])
        return turned[:, :q_size]

    def norm_rotate_store_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        layer: LatentLayer,
        norm: LatentNorm,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> None:
        q_rope = q[..., layer.nope_dim :]
        q_rope.copy_(self.rotate(q_rope))
        latent = rms_norm(latents[:, : layer.latent_dim], norm.weight, norm.eps)
        k_rope = self.rotate(latents[:, None, layer.latent_dim :]).squeeze(1)
        pool.set_kv(layer.layer_id, out_cache_loc, torch.cat((latent, k_rope), dim=1))


class RotaryHalves(TensorSource):
    """Wraps a checkpoint and reorders its rotary rows from pairs of neighbours to halves, as RotaryEmbedding expects.

    Args:
        heads: for each tensor with heads, the rows of a head and the first rotary row.
        rotary_dim: number of rotary rows of a head.
    """

    def __init__(self, source: TensorSource, heads: dict[str, tuple[int, int]], rotary_dim: int) -> None:
        self._source = source
        self._heads = heads
        self._rotary_dim = rotary_dim

    def scale_block(self, name: str) -> tuple[int, int] | None:
        """None for reordered tensors: they cannot be read in FP8, because several rows share a scale."""
        return None if name in self._heads else self._source.scale_block(name)

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        self._source.read_fp8(name, out, scales, rows=rows, columns=columns)

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Reads from the source, and reorders the rows of each head."""
        self._source.read(name, out, rows=rows, columns=columns)
        if name in self._heads:
            width, first = self._heads[name]
            rotary = out.view(-1, width, *out.shape[1:])[:, first : first + self._rotary_dim]
            rotary.copy_(torch.cat((rotary[:, ::2], rotary[:, 1::2]), dim=1))


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """[rotary_dim / 2] fp32 frequencies, and the factor of cosine and sine.

    Raises ConfigError for an unknown scaling type.
    """
    scaling = dict(rope.scaling)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.scaling_type in ("default", "dynamic"):
        # dynamic changes the base only past max_position_embeddings, which `check_length` prevents.
        return inv_freq, 1.0
    if rope.scaling_type == "linear":
        return inv_freq / scaling["factor"], 1.0
    if rope.scaling_type == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if rope.scaling_type == "yarn":
        return _yarn(inv_freq, scaling, rope.theta)
    if rope.scaling_type == "longrope":
        factors = torch.tensor(scaling.get("long_factor") or scaling["short_factor"], dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents), _longrope_attention_factor(scaling)
    raise ConfigError(
        f"rope scaling type {rope.scaling_type} is not supported; supported are default, linear, llama3, yarn, "
        "longrope, dynamic"
    )


def check_length(model: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError if `max_model_len` needs frequencies that change with a sequence's length."""
    is_dynamic = any(layer.mixer.rope.scaling_type == "dynamic" for layer in model.layers)
    if is_dynamic and max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds max_position_embeddings={model.max_position_embeddings} of a model "
            "with dynamic rope scaling, which would then need other frequencies for cached keys; choose at most "
            f"{model.max_position_embeddings}"
        )


def _llama3(inv_freq: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Divides the frequencies of long wavelengths by `factor`, leaves those of short ones, and interpolates between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slowed = torch.where(wavelengths > original / low, inv_freq / factor, between)
    return torch.where(wavelengths < original / high, inv_freq, slowed)


def _yarn(inv_freq: torch.Tensor, scaling: dict[str, Any], base: float) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from unchanged to divided frequencies."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    dim = 2 * len(inv_freq)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    slowed_share = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    mixed = inv_freq / factor * slowed_share + inv_freq * (1 - slowed_share)
    return mixed, _yarn_attention_factor(scaling, factor)


def _longrope_attention_factor(scaling: dict[str, Any]) -> float:
    given, factor = scaling.get("attention_factor"), max(scaling["factor"], 1.0)
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(factor) / math.log(scaling["original_max_position_embeddings"]))


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
    return yarn_mscale(factor, 1.0)
