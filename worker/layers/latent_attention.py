"""Latent attention (MLA) of a layer."""

from __future__ import annotations

import torch

from attention.latent import LatentHeads, exact_heads
from attention.layer import LatentLayer
from attention.rotation import LatentNorm
from configs.latent_attention import LatentAttention
from configs.layers import Axis, TensorSpec
from parallel.collectives.interface import PartialSum
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.layers.indexer import IndexerHeads
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryHalves
from worker.layers.step import Step

_NORM_EPS = 1e-6
"""Epsilon of the latents' norms, regardless of config.json's value for other norms, as in DeepSeek's code."""


class MLA:
    """Self-attention over this rank's query heads: latents -> norms -> rotary -> attention -> o -> all-reduce.

    Every rank computes the whole latents, with equal bits, and stores them in its own pool. The all-reduce may be left
    to the norm that reads the output of `project`.
    """

    def __init__(self, spec: LatentAttention, context: LayerContext, layer_id: int, _eps: float) -> None:
        num_heads = context.shard[Axis.QUERY_HEADS].size
        self.layer = LatentLayer(
            layer_id=layer_id,
            tp_q_head_num=num_heads,
            tp_k_head_num=1,
            head_dim=spec.kept_dim,
            scale=spec.scale,
            latent_dim=spec.kv_lora_rank,
            nope_dim=spec.qk_nope_head_dim,
            v_dim=spec.v_head_dim,
            top_k=spec.top_k,
            index_heads=spec.index_heads,
            index_dim=spec.index_dim,
        )
        self._spec = spec
        self._context = context
        into = [spec.q if spec.q_a is None else spec.q_a, spec.kv_a]
        self._indexer: IndexerHeads | None = None
        if spec.indexer is not None:
            into += [spec.indexer.k, spec.indexer.weights]
            self._indexer = IndexerHeads(spec.indexer, spec.qk_rope_head_dim, context)
        self._into = ColumnParallelLinear(*into, context=context)
        self._q_b = None if spec.q_a is None else ColumnParallelLinear(spec.q, context=context)
        self._q_norm = None if spec.q_norm is None else self._norm(spec.q_norm)
        self._kv_norm = self._norm(spec.kv_norm)
        self._o = RowParallelLinear(spec.o, context)
        self._heads: LatentHeads | None = None

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        spec = self._spec
        heads = {
            f"{prefix}{spec.q.name}.weight": (spec.head_dim, spec.qk_nope_head_dim),
            f"{prefix}{spec.kv_a.name}.weight": (spec.kept_dim, spec.kv_lora_rank),
        }
        halves = RotaryHalves(source, heads, spec.qk_rope_head_dim) if spec.rope.interleaved else source
        if self._indexer is not None:
            halves = self._indexer.halves(halves, prefix)
            self._indexer.load(halves, prefix)
        self._into.load(halves, prefix)
        if self._q_b is not None:
            self._q_b.load(halves, prefix)
        for norm, tensor in ((self._q_norm, spec.q_norm), (self._kv_norm, spec.kv_norm)):
            if norm is not None and tensor is not None:
                norm.load(source, prefix + tensor.name)
        rows, made = self._context.shard.span_of(spec.kv_b.cut), spec.qk_nope_head_dim + spec.v_head_dim
        kv_b = self._context.empty(self.layer.tp_q_head_num, made, spec.kv_lora_rank)
        source.read(f"{prefix}{spec.kv_b.name}.weight", kv_b.flatten(0, 1), rows=rows)
        self._heads = self._context.arithmetic.choose(fast=LatentHeads, exact=exact_heads)(self.layer, kv_b)
        self._o.load(source, prefix)

    def row_groups(self) -> None:
        """Implements MixerModule. Returns None: the input must not be in FP8."""

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, tp_q_head_num * v_head_dim]. Stores latents in the pool."""
        layer, spec = self.layer, self._spec
        assert self._heads is not None, "forward before load"
        into, index, rotation = self._into(x), None, step.rotations[layer.layer_id]
        widths = [layer.head_dim, layer.index_dim, layer.index_heads]
        q, latents, index_k, index_weights = torch.split(into, [into.shape[1] - sum(widths), *widths], dim=1)
        if self._q_b is not None and self._q_norm is not None:
            q_latent = self._q_norm(q)
            q = self._q_b(q_latent)
            if self._indexer is not None:
                index = self._indexer(q_latent, index_k, index_weights, rotation)
        q = q.view(len(x), layer.tp_q_head_num, spec.head_dim)
        norm = LatentNorm(self._kv_norm.weight, _NORM_EPS)
        return step.backend.forward_latent(q, latents, layer, self._heads, rotation, norm, index)

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """Computes the layer's output [num_tokens, hidden_size] from the output of `attend`."""
        return self._o.for_norm(attended)

    def _norm(self, weight: TensorSpec) -> RMSNorm:
        return RMSNorm(weight.elements, _NORM_EPS, dtype=self._context.dtype, device=self._context.device)
