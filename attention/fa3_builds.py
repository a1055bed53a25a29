"""Finds an installed build of FlashAttention-3, checks what it can do, and calls it through one interface.

attention/fa3.py decides what a step passes to FA3. One call serves decodes, prompts, chunks after a cached prefix and
mixtures of them: only `cu_seqlens_q` and `max_seqlen_q` differ. FA3 never writes the KV cache here.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from attention.forward_batch import PagedMetadata
from attention.layer import AttentionLayer, LatentLayer
from configs.errors import ConfigError

_log = logging.getLogger(__name__)

_PROBED_KEYS, _PROBED_CHUNK = 4, 2
SGLANG_KERNEL = "0.4.3"
"""The version of the sglang-kernel package that was tested, with torch 2.11."""


class FA3Provider(ABC):
    """One build of FlashAttention-3."""

    name: ClassVar[str]

    @abstractmethod
    def _call(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        lens: torch.Tensor,
        window: int,
        **same: Any,
    ) -> torch.Tensor:
        """Calls this build's operator.

        Args:
            lens: `cache_seqlens`.
            window: number of keys that a query sees before its own position. -1 means all.
            same: arguments that have the same names in all builds.
        """

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        paged: PagedMetadata,
        layer: AttentionLayer,
        *,
        sinks: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        num_splits: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of new tokens over the pages of their rows. The pages already hold these tokens.

        The mask is aligned at the end: a row's last query sees all `cache_seqlens` keys. This launches two kernels, or
        three if keys are split. There is no host sync, so a CUDA graph can capture it.

        Args:
            q: [num_tokens, tp_q_head_num, head_dim] bf16 or fp16; the last dimension is contiguous.
            k_pages: [num_pages, page_size, tp_k_head_num, head_dim] in q's dtype. `v_pages` has the same shape.
            paged: `page_table` is read up to each row's last page. FA3 chooses the number of splits from its width
                times page_size, so keep one width if results must be equal bit for bit.
            layer: its scale, window, chunk and softcap are applied. Positions count from the start of the row: the
                first query is at `cache_seqlens` minus the row's queries.
            sinks: the layer's sinks, made by `sinks_of`. None without sinks.
            qv: [num_tokens, tp_q_head_num, columns of a value] in q's dtype: queries for the values. Their products
                with the values are added to the scores. Keys may then have another width than values, and keys and
                values may be parts of one tensor.
            num_splits: largest number of pieces of a row's keys. 0 lets FA3 choose: up to 19 times as fast as one piece
                for one row of 32k tokens (H200, two KV heads), but a row's last bits then depend on the batch.
            out: [num_tokens, tp_q_head_num, columns of a value], written. If None, a new tensor.

        Returns:
            `out` or the new tensor, contiguous.
        """
        not_always_known = {"attention_chunk": layer.chunk, "sinks": sinks, "qv": qv}
        return self._call(
            q,
            k_pages,
            v_pages,
            paged.cache_seqlens,
            -1 if layer.window is None else layer.window - 1,
            page_table=paged.page_table,
            cu_seqlens_q=paged.cu_seqlens_q,
            max_seqlen_q=paged.max_seqlen_q,
            softmax_scale=layer.scale,
            softcap=layer.softcap or 0.0,
            num_splits=num_splits,
            out=out,
            **{name: value for name, value in not_always_known.items() if value is not None},
        )

    def probe(self, layer: AttentionLayer, *, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Tests the build: attends from the last of four tokens as `layer` would, but with chunks of two. Waits for the
        device.

        Raises:
            ConfigError: the build has no kernel for this layer, or its result is not the mean of the visible values
                less the sinks' share.
        """
        if layer.chunk is not None:
            layer = dataclasses.replace(layer, chunk=_PROBED_CHUNK)
        num_pages = -(-_PROBED_KEYS // page_size)
        shape = (num_pages, page_size, layer.tp_k_head_num, layer.head_dim)
        v = torch.linspace(0.0, 1.0, math.prod(shape), device=device).view(shape).to(dtype)
        k, qv = v, None
        if isinstance(layer, LatentLayer):
            v, k = torch.split(v, [layer.latent_dim, layer.rope_dim], dim=-1)
            qv = torch.zeros(1, layer.tp_q_head_num, layer.latent_dim, dtype=dtype, device=device)
        q = torch.zeros(1, layer.tp_q_head_num, k.shape[-1], dtype=dtype, device=device)
        # The row is longer than the window, because FA3 treats a window that no row can exceed as none.
        page_table = torch.zeros(1, num_pages + (layer.window or 0) // page_size + 1, dtype=torch.int32, device=device)
        page_table[0, :num_pages] = torch.arange(num_pages)
        paged = PagedMetadata(
            cache_seqlens=torch.full((1,), _PROBED_KEYS, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=device),
            page_table=page_table,
            max_seqlen_q=1,
        )
        sinks, wrong = sinks_of(layer), None
        try:
            out = self.attend(q, k, v, paged, layer, sinks=sinks, qv=qv)[0]
            num_seen = min(layer.window or _PROBED_KEYS, layer.chunk or _PROBED_KEYS, _PROBED_KEYS)
            value = v.flatten(0, 1)[_PROBED_KEYS - num_seen : _PROBED_KEYS].float().mean(0)
            value = value.repeat_interleave(layer.tp_q_head_num // layer.tp_k_head_num, dim=0)
            if sinks is not None:
                value = value * (num_seen / (num_seen + sinks.float().exp()))[:, None]
            if not torch.allclose(out.float(), value, atol=0.01, rtol=0.01):
                wrong = "it returned wrong values: was it built for this torch and CUDA?"
        except (RuntimeError, TypeError) as error:  # TypeError: the build has no such argument
            wrong = str(error).partition("\n")[0]
        if wrong is not None:
            raise ConfigError(
                f"attention backend fa3: {self.name} cannot serve layer {layer.layer_id} (head_dim="
                f"{layer.head_dim}, window={layer.window}, softcap={layer.softcap}, chunks={layer.chunk is not None}, "
                f"sinks={sinks is not None}, latent={qv is not None}, {dtype}): {wrong}\n"
                "Install another build of FlashAttention-3, or set attention.backend=triton."
            )


class SglKernel(FA3Provider):
    """The build in the sglang-kernel wheel, called through its thin Python function."""

    name = "sgl_kernel"

    def __init__(self, with_kvcache: Callable[..., torch.Tensor]) -> None:
        self._with_kvcache = with_kvcache

    def _call(self, q: Any, k_pages: Any, v_pages: Any, lens: Any, window: int, **same: Any) -> torch.Tensor:
        after = -1 if window < 0 else 0
        return self._with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lens, causal=True, window_size=(window, after), **same
        )


class FlashAttention3(FA3Provider):
    """FA3's own package, called through its operator: its Python function has no `out` and allocates more."""

    name = "flash_attention_3"

    def __init__(self, fwd: Callable[..., Any]) -> None:
        self._fwd = fwd

    def _call(self, q: Any, k_pages: Any, v_pages: Any, lens: Any, window: int, **same: Any) -> torch.Tensor:
        sides = {"window_size_left": window, "window_size_right": -1 if window < 0 else 0}
        attended, *_ = self._fwd(q, k_pages, v_pages, seqused_k=lens, is_causal=True, **sides, **same)
        return attended


def sinks_of(layer: AttentionLayer) -> torch.Tensor | None:
    """A copy of the layer's sinks in bf16, the dtype that FA3 needs and checkpoints have."""
    return None if layer.sinks is None else layer.sinks.to(torch.bfloat16)


def _load_sgl_kernel() -> FA3Provider:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache  # optional, like the next import

    return SglKernel(flash_attn_with_kvcache)


def _load_flash_attention_3() -> FA3Provider:
    import flash_attn_interface  # noqa: F401 # the import registers the operators

    return FlashAttention3(torch.ops.flash_attn_3.fwd.default)


_LOADERS: dict[str, Callable[[], FA3Provider]] = {
    SglKernel.name: _load_sgl_kernel,
    FlashAttention3.name: _load_flash_attention_3,
}


def _other_version(provider: str) -> str | None:
    """A warning if this version of sglang-kernel was never tested, else None."""
    if provider != SglKernel.name:
        return None
    try:
        version = importlib.metadata.version("sglang-kernel").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
    if version == SGLANG_KERNEL:
        return None
    return (
        f"sglang-kernel {version} is installed, with torch {torch.__version__}; only {SGLANG_KERNEL} with torch 2.11 "
        "was run, and other versions lack operators: `pip install '.[cuda]'` takes that one"
    )


def load_provider(name: str | None) -> FA3Provider:
    """Imports the build called `name`, or the first installed one, and logs its name.

    Raises:
        ConfigError: no build can be imported, or there is no build of this name.
    """
    if name is not None and name not in _LOADERS:
        raise ConfigError(f"FlashAttention-3 provider {name} is not one of {', '.join(_LOADERS)}")
    failures = []
    for candidate in _LOADERS if name is None else (name,):
        try:
            provider = _LOADERS[candidate]()
        except (ImportError, OSError) as error:  # OSError: a shared library that the build needs is missing
            failures.append("; ".join(filter(None, (f"{candidate}: {error}", _other_version(candidate)))))
            continue
        _log.info("attention: FlashAttention-3 of %s", candidate)
        if other := _other_version(candidate):
            _log.warning("%s", other)
        return provider
    raise ConfigError(
        "attention backend fa3 finds no build of FlashAttention-3: install `sglang-kernel` (the `cuda` "
        "extra) or the package of `flash_attn_interface`, or set attention.backend=triton\n" + "\n".join(failures)
    )
