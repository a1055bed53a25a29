"""Creates attention backends by their names in the settings `attention.*`."""

from __future__ import annotations

import importlib

import torch

from attention.backend import IMPLEMENTATIONS, AttentionBackend
from attention.hybrid import HybridBackend
from attention.kv_pool import FP8, TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer
from configs.attention import BACKENDS, AttentionNeeds, Feature, LatentShape, check_backend

for _spec in BACKENDS.values():
    importlib.import_module(_spec.module)  # registers its class in IMPLEMENTATIONS


def create_backend(
    prefill: str, decode: str, token_to_kv_pool: TokenToKVPool, *, exact: bool = False
) -> AttentionBackend:
    """Creates the backend for the layers of `token_to_kv_pool`: one, or two combined if prefill and decode differ.

    Args:
        prefill: backend name for steps in which some row has several tokens.
        decode: backend name for steps in which every row has one token.
        exact: whether `Feature.EXACT` is needed.

    Raises:
        ConfigError: a backend cannot serve these layers on this device. The message lists backends that can.
    """
    needs, options = needs_of(token_to_kv_pool), {}
    if exact:
        needs, options = needs.with_feature(Feature.EXACT), {"exact": True}
    check_backend(prefill, needs, "attention.prefill_backend")
    check_backend(decode, needs, "attention.decode_backend")
    made = {
        name: IMPLEMENTATIONS[name](token_to_kv_pool.layers, token_to_kv_pool, **options)
        for name in dict.fromkeys((prefill, decode))
    }
    if prefill == decode:
        return made[prefill]
    by_prefill = BACKENDS[prefill].refusal(needs.with_feature(Feature.MASK)) is None
    return HybridBackend(made[prefill], made[decode], masked=made[prefill if by_prefill else decode])


def needs_of(pool: TokenToKVPool) -> AttentionNeeds:
    """What the layers of `pool` need from a backend on the pool's device."""
    on_gpu = pool.device.type == "cuda"
    of_cache = {Feature.FP8_KV} if pool.dtype is FP8 else set[Feature]()
    return AttentionNeeds(
        device="cuda" if on_gpu else "cpu",
        compute_capability=torch.cuda.get_device_capability(pool.device) if on_gpu else None,
        dtype=str(pool.compute_dtype).removeprefix("torch."),
        page_size=pool.page_size,
        head_dims=frozenset(layer.qk_dim for layer in pool.layers),
        features=frozenset(of_cache.union(*map(_features, pool.layers))),
        chunks=frozenset(layer.chunk for layer in pool.layers if layer.chunk is not None),
        latents=frozenset(
            LatentShape(layer.tp_q_head_num, layer.latent_dim, layer.rope_dim)
            for layer in pool.layers
            if isinstance(layer, LatentLayer)
        ),
    )


def _features(layer: AttentionLayer) -> list[Feature]:
    needed = {
        Feature.WINDOW: layer.window,
        Feature.SOFTCAP: layer.softcap,
        Feature.SINKS: layer.sinks,
        Feature.CHUNK: layer.chunk,
        Feature.LATENT: layer if isinstance(layer, LatentLayer) else None,
        Feature.SPARSE: layer.top_k if isinstance(layer, LatentLayer) else None,
    }
    return [feature for feature, value in needed.items() if value is not None]
