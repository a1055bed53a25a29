"""Grouped-query attention of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.layer import AttentionLayer
from attention.rotation import QKNorms
from configs.layers import Axis, GroupedQueryAttention
from parallel.collectives.interface import PartialSum
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.fp8 import Fp8Rows
from parallel.numerics.tensor_source import TensorSource
from worker.kernels import cpu_pointwise
from worker.layers.interleaved_rows import InterleavedRows
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryHalves
from worker.layers.step import Step

if TYPE_CHECKING:
    from parallel.numerics.kernels.fp8_groups import Groups


class Attention:
    """Self-attention over this rank's query heads: qkv -> norm -> rotary -> attention -> o -> all-reduce.

    The all-reduce may be left to the norm that reads the output.
    """

    def __init__(self, spec: GroupedQueryAttention, context: LayerContext, layer_id: int, eps: float) -> None:
        num_q, num_kv = context.shard[Axis.QUERY_HEADS].size, context.shard[Axis.KV_HEADS].size
        self.layer = AttentionLayer(
            layer_id=layer_id,
            tp_q_head_num=num_q,
            tp_k_head_num=num_kv,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            softcap=spec.softcap,
            sinks=torch.empty(num_q, dtype=torch.float32, device=context.device) if spec.has_sinks else None,
        )
        self._spec = spec
        self._shard = context.shard
        self._qkv = ColumnParallelLinear(*spec.qkv, context=context)
        self._gate = None if spec.gate is None else ColumnParallelLinear(spec.gate, context=context)
        if self._gate is not None and context.device.type == "cuda":
            from worker.kernels import activation

            self._mul_sigmoid_ = activation.mul_sigmoid_
        else:
            self._mul_sigmoid_ = cpu_pointwise.mul_sigmoid_
        self._o = RowParallelLinear(spec.o, context)
        self._head_norms = [
            RMSNorm(spec.head_dim, eps, dtype=context.dtype, device=context.device, offset=tensor.offset)
            for tensor in spec.head_norms
        ]
        self._norms: QKNorms | None = None
        if spec.qk_norm and not spec.norms_have_weights:
            ones = torch.ones(spec.head_dim, dtype=context.dtype, device=context.device)
            self._norms = QKNorms(ones, ones, eps)
        elif spec.qk_norm:
            q_norm, k_norm = self._head_norms
            self._norms = QKNorms(q_norm.weight, k_norm.weight, eps)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        spec = self._spec
        heads = {f"{prefix}{it.name}": (spec.head_dim, 0) for linear in spec.qkv[:2] for it in linear.tensors}
        rows = RotaryHalves(source, heads, spec.rotary_dim) if spec.rope.interleaved else source
        if self._gate is not None:
            of_head = {f"{prefix}{it.name}": (spec.head_dim,) * 2 for it in spec.qkv[0].tensors}
            rows = InterleavedRows(rows, of_head, spec.num_attention_heads)
            self._gate.load(rows, prefix)
        self._qkv.load(rows, prefix)
        self._o.load(source, prefix)
        for norm, tensor in zip(self._head_norms, self._spec.head_norms, strict=True):
            norm.load(source, prefix + tensor.name)
        if self._spec.sinks is not None and self.layer.sinks is not None:
            source.read(prefix + self._spec.sinks.name, self.layer.sinks, rows=self._shard[Axis.QUERY_HEADS])

    def row_groups(self) -> Groups | None:
        """The groups of elements that share a scale if `attend`'s input is in FP8. None if it must not be in FP8."""
        return self._qkv.row_groups()

    def attend(self, x: torch.Tensor | Fp8Rows, step: Step) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, tp_q_head_num * head_dim]. Stores K and V in the pool."""
        out = step.backend.forward(self._qkv(x), self.layer, step.rotations[self.layer.layer_id], self._norms)
        return out if self._gate is None else self._mul_sigmoid_(out, self._gate(x))

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """Computes the layer's output [num_tokens, hidden_size] from the output of `attend`."""
        return self._o.for_norm(attended)
