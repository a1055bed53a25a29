"""Plain attention in torch, and batches of random rows over a poisoned paged cache to compare kernels with it on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attention.forward_batch import ForwardBatch, NewTokenMask, PagedMetadata
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer
from tests.helpers.batches import batch_of

PADDING = -1
"""The row of one token on page 0, which is NaN here."""


def grouped_layer(
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    scale: float = 0.11,
    sinks: torch.Tensor | torch.device | None = None,
    **features: Any,
) -> AttentionLayer:
    """A layer of `group` query heads to each KV head; `sinks`: theirs, or where to make some, each one in bf16."""
    num_heads = kv_heads * group
    if isinstance(sinks, torch.device):
        sinks = torch.linspace(-1.0, 3.0, num_heads).bfloat16().float().to(sinks)
    heads = {"tp_q_head_num": num_heads, "tp_k_head_num": kv_heads, "head_dim": head_dim}
    return AttentionLayer(layer_id=0, **heads, scale=scale, sinks=sinks, **features)


class NewTokens(NamedTuple):
    """A row's part of a mask: which of its n new tokens each sees, and where in the sequence they are."""

    visible: torch.Tensor
    """[n, n] bool or uint8"""
    positions: torch.Tensor
    """[n] int64"""


def tree(prefix_len: int, num_tokens: int) -> NewTokens:
    """A random tree of drafts: each token sees its ancestors and itself, and lies as deep as it has ancestors."""
    generator = torch.Generator().manual_seed(num_tokens)
    seen = torch.eye(num_tokens, dtype=torch.bool)
    for token in range(1, num_tokens):
        seen[token] |= seen[int(torch.randint(token, (), generator=generator))]
    return NewTokens(seen, prefix_len + seen.sum(1) - 1)


def in_order(prefix_len: int, visible: torch.Tensor) -> NewTokens:
    """New tokens that follow one another and see each other as `visible` says."""
    return NewTokens(visible, prefix_len + torch.arange(len(visible)))


def both_ways(prefix_len: int, num_tokens: int) -> NewTokens:
    """New tokens that all see each other, as those of an image do."""
    return in_order(prefix_len, torch.ones(num_tokens, num_tokens, dtype=torch.bool))


def mask_of(parts: Sequence[NewTokens | None], lens: Sequence[int], device: torch.device) -> NewTokenMask:
    """The mask of rows of `lens` new tokens; None: a causal row."""
    sizes = [0 if part is None else part.visible.numel() for part in parts]
    starts = [
        -1 if part is None else start
        for part, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False)
    ]
    positions = [
        torch.full((length,), -1) if part is None else part.positions for part, length in zip(parts, lens, strict=True)
    ]
    return NewTokenMask(
        visible=torch.cat([part.visible.flatten() for part in parts if part is not None]).to(device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        positions=torch.cat(positions).to(device),
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    dtype: torch.dtype,
    new: NewTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row, computed in `dtype`: answers [n, Hq, D] and logarithms of the sums of exponentials [n, Hq], fp32.

    Args:
        q: [n, Hq, D], the last of
        k: [L, Hkv, D], and likewise `v`.
        new: which of the last n keys each query sees; None: those before it and itself. Window and chunk then hide
            others alone.
    """
    group, num_keys = q.shape[1] // k.shape[1], len(k)
    wide_k, wide_v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.to(dtype), wide_k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    keys = torch.arange(num_keys, device=q.device)
    queries = keys[num_keys - len(q) :, None] if new is None else new.positions.to(q.device)[:, None]
    seen = keys <= queries
    if layer.window is not None:
        seen &= keys > queries - layer.window
    if layer.chunk is not None:
        seen &= keys // layer.chunk == queries // layer.chunk
    if new is not None:
        seen[:, num_keys - len(q) :] = new.visible.to(q.device)
    scores = scores.masked_fill(~seen, -math.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], -1)
        wide_v = torch.cat([wide_v, torch.zeros_like(wide_v[:1])])
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # of who sees nothing
    return torch.einsum("hnl,lhd->nhd", weights, wide_v).float(), torch.logsumexp(scores.float(), -1).T


class PagedCase:
    """Rows of random keys and values on pages in random order, the last of them new tokens with queries.

    Whatever a row does not own is poisoned: unused page-table entries point far outside the pool, unused slots are NaN.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        page_size: int,
        rows: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`rows` are of (prefix_len, extend_len). Keys and values are of `kv_dtype`, None: `dtype`; `expected` takes
        what the pool holds of them."""
        self.layer, self.rows, self.device = layer, [*rows, (0, 1)], device
        # numpy, which the interpreter computes with, has no bf16.
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        generator = torch.Generator().manual_seed(0)
        lens = [prefix + extend for prefix, extend in rows]
        num_pages = [math.ceil(length / page_size) for length in lens]
        self.table = torch.full((len(lens) + 1, max(num_pages) + 2), 1 << 30, dtype=torch.int32)
        self.table[PADDING, 0] = 0
        pool = (sum(num_pages) + 2, page_size, layer.tp_k_head_num, layer.head_dim)
        self.kv_dtype = kv_dtype or self.dtype
        self.k, self.v = (torch.full(pool, math.nan, dtype=self.kv_dtype) for _ in range(2))
        free = (1 + torch.randperm(sum(num_pages) + 1, generator=generator)).int()
        self.keys, self.values = [], []
        for i, (length, count) in enumerate(zip(lens, num_pages, strict=True)):
            pages = free[sum(num_pages[:i]) :][:count]
            self.table[i, :count] = pages
            slots = (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            for target, values, scale in ((self.k, self.keys, layer.k_scale), (self.v, self.values, layer.v_scale)):
                new = (torch.randn(length, *pool[2:], generator=generator) / scale).to(self.kv_dtype)
                target.flatten(0, 1)[slots] = new
                values.append((new if scale == 1.0 else new.float() * scale).to(device))
        heads = (layer.tp_q_head_num, layer.head_dim)
        self.q = [torch.randn(extend, *heads, generator=generator).to(device, self.dtype) for _, extend in self.rows]
        self.k, self.v = (x.to(device) for x in (self.k, self.v))

    def in_pool(self) -> tuple[TokenToKVPool, ForwardBatch]:
        """A pool with these pages, and the batch of all rows but padding."""
        num_pages, page_size = self.k.shape[:2]
        pool = TokenToKVPool(
            [self.layer],
            num_pages=num_pages - 1,
            page_size=page_size,
            dtype=self.kv_dtype,
            device=self.device,
            compute_dtype=self.dtype,
        )
        for pages, written in zip(pool.pages(0), (self.k, self.v), strict=True):
            pages.copy_(written)
        return pool, self.batch(range(len(self.rows) - 1))

    def batch(self, rows: Sequence[int]) -> ForwardBatch:
        """The batch of `rows`, in this order, with the poison behind each row's last page."""
        table = ReqToTokenPool(len(rows), self.table.shape[1], self.device)
        table.page_table[1:] = self.table[list(rows)]
        batch = batch_of(table, [(i, *self.rows[row]) for i, row in enumerate(rows, 1)], self.k.shape[1])
        return replace(batch, paged=replace(batch.paged, page_table=table.page_table[1:]))

    def paged(self, rows: Sequence[int], cuts: Sequence[tuple[int, int]] | None = None) -> PagedMetadata:
        """Of `rows`, in this order, and of each the new tokens from the first to before the second of its cut; None:
        all of them."""
        cuts = self._cuts(rows, cuts)
        lens = torch.tensor([0, *(stop - start for start, stop in cuts)])
        return PagedMetadata(
            cache_seqlens=torch.tensor(
                [self.rows[i][0] + stop for i, (_, stop) in zip(rows, cuts, strict=True)], dtype=torch.int32
            ).to(self.device),
            cu_seqlens_q=lens.cumsum(0).int().to(self.device),
            page_table=self.table[list(rows)].to(self.device),
            max_seqlen_q=int(lens.max()),
        )

    def queries(self, rows: Sequence[int], cuts: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """[num_tokens, Hq, D] of them, a slice of wider rows, as of a fused projection."""
        cuts = self._cuts(rows, cuts)
        q = torch.cat([self.q[i][start:stop] for i, (start, stop) in zip(rows, cuts, strict=True)])
        return torch.cat([q, q], dim=1)[:, : q.shape[1]]

    def expected(
        self, dtype: torch.dtype, masks: Sequence[NewTokens | None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attention`, of all rows but padding, one row at a time."""
        masks = [None] * len(self.keys) if masks is None else masks
        rows = zip(self.q[:-1], self.keys, self.values, masks, strict=True)
        answers, lses = zip(*(attention(q, k, v, self.layer, dtype, new) for q, k, v, new in rows), strict=True)
        return torch.cat(answers), torch.cat(lses)

    def check(self, out: torch.Tensor, masks: Sequence[NewTokens | None] | None = None) -> None:
        """Asserts that `out`, or what it has of a value's columns, errs as fp32 does, or at most twice as far as torch
        in the same 16-bit dtype."""
        exact = self.expected(torch.float32, masks)[0][..., : out.shape[-1]]
        if self.dtype is torch.float32:
            # Sums over more than 256 columns err a little further. A GPU's exponential is not the nearest fp32.
            on_cpu = 2e-6 if self.layer.head_dim <= 256 else 3e-6
            torch.testing.assert_close(out, exact, atol=on_cpu if self.device.type == "cpu" else 1e-5, rtol=2e-5)
            return
        # torch's max, unlike Python's, never passes over a NaN.
        same_dtype = self.expected(self.dtype, masks)[0][..., : out.shape[-1]]
        error, bound = (float((x.float() - exact).abs().max()) for x in (out, same_dtype))
        assert error <= 2 * bound + 1e-3, f"error {error:.5f}, {bound:.5f} by torch in {self.dtype}"

    def _cuts(self, rows: Sequence[int], cuts: Sequence[tuple[int, int]] | None) -> Sequence[tuple[int, int]]:
        return [(0, self.rows[i][1]) for i in rows] if cuts is None else cuts
