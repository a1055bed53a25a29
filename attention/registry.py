"""Which attention backends there are, by the name that `attention_backend` takes."""

from __future__ import annotations

from collections.abc import Sequence

from attention.backend import AttentionBackend
from attention.flash_attention import FlashAttentionBackend
from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer
from attention.torch_native import TorchNativeBackend
from configs.errors import ConfigError

_BACKENDS: dict[str, type[AttentionBackend]] = {
    "flash_attention": FlashAttentionBackend,
    "torch_native": TorchNativeBackend,
}


def create_backend(name: str, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> AttentionBackend:
    """The backend called `name`; raises ConfigError for a name there is none for."""
    if name not in _BACKENDS:
        raise ConfigError(f"attention_backend={name} is not one of {', '.join(sorted(_BACKENDS))}")
    return _BACKENDS[name](layers, token_to_kv_pool)
