"""Rows of random latents over a poisoned pool, and latent attention of them in plain fp32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attention.backend import AttentionBackend
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import LatentLayer
from attention.registry import create_backend
from tests.helpers.batches import batch_of

CPU = torch.device("cpu")
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (1, 1), (16, 1), (63, 1), (64, 1), (100, 1)],
    "decode_alone": [(37, 1)],
    "extend": [(0, 5), (0, 33)],
    "extend_with_prefix": [(16, 20), (7, 2), (60, 3), (0, 18)],
    "mixed": [(20, 1), (0, 17), (90, 1), (33, 9), (0, 1)],
}
LITE = {"latent_dim": 512, "nope_dim": 128, "v_dim": 128, "head_dim": 576}
"""The widths of DeepSeek-V2-Lite."""


def layer_of(num_heads: int, **changes: Any) -> LatentLayer:
    dims = {"latent_dim": 32, "nope_dim": 12, "v_dim": 20, "head_dim": 40, **changes}
    return LatentLayer(layer_id=0, tp_q_head_num=num_heads, tp_k_head_num=1, scale=0.2, **dims)


class LatentCase:
    """A pool with poisoned slots, and rows of random latents and queries."""

    def __init__(
        self,
        layer: LatentLayer,
        page_size: int,
        rows: list[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device = CPU,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype`: of the pool; None: `dtype`. `expected` takes what it holds of the latents."""
        self.layer, self.rows, self.dtype = layer, rows, dtype
        max_pages = math.ceil(max(map(sum, rows)) / page_size) + 2
        num_pages = max_pages * len(rows)
        self.table = ReqToTokenPool(len(rows), max_pages, device)
        self.table.page_table[:] = 1 << 30  # unused entries are far outside the pool
        self.pool = TokenToKVPool(
            [layer],
            num_pages=num_pages,
            page_size=page_size,
            dtype=kv_dtype or dtype,
            compute_dtype=dtype,
            device=device,
        )
        for pages in self.pool.pages(0):
            pages.copy_(torch.tensor(math.nan))
        shuffled = np.random.default_rng(0).permutation(np.arange(1, num_pages + 1, dtype=np.int32))
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        rope_dim = layer.rope_dim
        self.weight = (
            random(layer.tp_q_head_num, layer.nope_dim + layer.v_dim, layer.latent_dim) / (layer.latent_dim / 2) ** 0.5
        )
        self.q = [random(extend, layer.tp_q_head_num, layer.nope_dim + rope_dim) for _, extend in rows]
        self.kept = [random(prefix + extend, layer.head_dim) for prefix, extend in rows]
        for i, ((prefix, extend), kept) in enumerate(zip(rows, self.kept, strict=True)):
            used = math.ceil((prefix + extend) / page_size)
            self.table.page_table[i + 1, :used] = torch.from_numpy(shuffled[i * max_pages : i * max_pages + used])
            pages_of_row = self.table.page_table[i + 1].long()
            at = torch.arange(prefix, device=device)
            self.pool.set_kv(0, pages_of_row[at // page_size] * page_size + at % page_size, kept[:prefix])
        if kv_dtype is not None:
            numbers = [(it.float() / layer.k_scale).clamp(-448.0, 448.0).to(kv_dtype).float() for it in self.kept]
            self.held = [it * layer.k_scale for it in numbers]
        else:
            self.held = self.kept
        batch = batch_of(self.table, [(i + 1, *lens) for i, lens in enumerate(rows)], page_size)
        # With the poison behind each row's last page.
        self.batch = replace(batch, paged=replace(batch.paged, page_table=self.table.page_table[1:]))

    def run(self, backend: AttentionBackend | None = None, *, exact: bool = False) -> list[torch.Tensor]:
        """[extend_len, tp_q_head_num, v_dim] of each row, by a backend, which stores the new tokens.

        Args:
            backend: None: torch_native.
            exact: whether the heads' products are a GPU's exact ones.
        """
        if backend is None:
            backend = create_backend("torch_native", "torch_native", self.pool)
            backend.init_forward_metadata(self.batch)
        new = torch.cat([kept[prefix:] for kept, (prefix, _) in zip(self.kept, self.rows, strict=True)])
        heads = LatentHeads(self.layer, self.weight, exact=exact)
        self.pool.set_kv(0, self.batch.out_cache_loc, new)
        out = backend.attend_latent(torch.cat(self.q), self.layer, heads)
        assert out.is_contiguous()
        return list(out.view(-1, self.layer.tp_q_head_num, self.layer.v_dim).split([extend for _, extend in self.rows]))

    def again(
        self,
        first: int,
        end: int,
        backend_of: Callable[[LatentLayer, TokenToKVPool], AttentionBackend],
        heads_of: Callable[[LatentLayer, torch.Tensor], LatentHeads],
        heads: slice = slice(None),
    ) -> torch.Tensor:
        """[end - first, heads, v_dim]: the same for some tokens of the first row, which has no prefix, in a step of
        their own on a rank that has some of the heads. The pool has to hold the row."""
        weight = self.weight[heads]
        layer = replace(self.layer, tp_q_head_num=len(weight))
        backend = backend_of(layer, self.pool)
        backend.init_forward_metadata(batch_of(self.table, [(1, first, end - first)], self.pool.page_size))
        q = self.q[0][first:end, heads].contiguous()
        return backend.attend_latent(q, layer, heads_of(layer, weight)).view(end - first, -1, layer.v_dim)

    def expected(self) -> list[torch.Tensor]:
        """In fp32, one head and one query at a time, each key and value made from its token's latent."""
        layer, weight, results = self.layer, self.weight.float(), []
        for q, kept, (prefix, extend) in zip(self.q, self.held, self.rows, strict=True):
            latent, k_rope = kept.float().split((layer.latent_dim, layer.rope_dim), dim=1)
            out = torch.empty(extend, layer.tp_q_head_num, layer.v_dim, device=q.device)
            for i, head in itertools.product(range(extend), range(layer.tp_q_head_num)):
                own = latent[: prefix + i + 1] @ weight[head].T
                keys = torch.cat((own[:, : layer.nope_dim], k_rope[: prefix + i + 1]), dim=1)
                scores = keys @ q[i, head].float() * layer.scale
                out[i, head] = torch.softmax(scores, 0) @ own[:, layer.nope_dim :]
            results.append(out)
        return results

    def check(self, rows: list[torch.Tensor]) -> None:
        """Asserts that `rows` err as fp32 does, or at most twice as far as torch_native in the same 16-bit dtype."""
        ours, exact = torch.cat(rows), torch.cat(self.expected())
        assert ours.dtype is self.dtype
        if ours.dtype is torch.float32:
            torch.testing.assert_close(ours, exact, atol=2e-5, rtol=2e-5)
            return
        error, bound = (float((it.float() - exact).abs().max()) for it in (ours, torch.cat(self.run())))
        assert error <= 2 * bound + 1e-3, f"error {error:.5f}, {bound:.5f} by torch_native"
