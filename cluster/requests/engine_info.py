"""Facts about a replica's engine that clients may see: resolved settings and measured sizes."""

from __future__ import annotations

from typing import Literal

import msgspec

from configs.schema import EngineConfig, resolved


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one tensor-parallel group. They must not contain paths, addresses or secrets."""

    dtype: str
    numerics: Literal["exact", "fast"]
    device: str
    prefill_attention_backend: str
    decode_attention_backend: str
    tensor_parallel_size: int
    num_replicas: int
    page_size: int
    num_kv_tokens: int
    """Number of tokens that fit in the KV pool."""
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_requests: int
    max_num_queued_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, num_pages: int) -> EngineInfo:
        """The facts of a group with the resolved `config` and a KV pool of `num_pages`."""
        scheduler = config.scheduler
        return cls(
            dtype=config.dtype,
            numerics="exact" if config.is_exact else "fast",
            device=config.device,
            prefill_attention_backend=resolved(config.attention.prefill_backend),
            decode_attention_backend=resolved(config.attention.decode_backend),
            tensor_parallel_size=config.tensor_parallel_size,
            num_replicas=config.num_replicas,
            page_size=config.kv_cache.page_size,
            num_kv_tokens=num_pages * config.kv_cache.page_size,
            enable_prefix_caching=config.kv_cache.enable_prefix_caching,
            max_num_seqs=resolved(scheduler.max_num_seqs),
            max_num_batched_tokens=resolved(scheduler.max_num_batched_tokens),
            max_num_queued_requests=scheduler.max_num_queued_requests,
            max_num_queued_tokens=scheduler.max_num_queued_tokens,
        )
