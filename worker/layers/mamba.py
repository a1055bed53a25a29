"""Mamba2, the recurrent mixer of Granite 4, Nemotron-H and Falcon-H1."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attention.state_pool import StateLayer
from configs.layers import Axis
from configs.mamba import Mamba2
from parallel.collectives.interface import PartialSum
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.kernels import cpu_mamba
from worker.kernels.cpu_mamba import MambaArgs
from worker.layers.causal_conv import CausalConv
from worker.layers.step import Step


class Mamba:
    """Mamba2 over this rank's heads: x, B, C, z, dt -> convolution -> recurrence -> gate -> grouped norm -> out.

    The all-reduce may be left to the norm that reads the output of `project`.
    """

    def __init__(self, spec: Mamba2, context: LayerContext, layer_id: int, _eps: float) -> None:
        self._spec, self._context = spec, context
        self._heads = context.shard[Axis.MAMBA_HEADS]
        num_heads, num_groups = self._heads.size, context.shard[Axis.MAMBA_GROUPS].size
        self.layer = StateLayer.of(layer_id, spec, context)
        numbers = spec.factors[0], spec.factors[4], *spec.dt_limits
        sizes = num_heads, num_groups, spec.head_size, spec.state_size
        a_log, dt_bias, d = (torch.empty(num_heads, device=context.device) for _ in range(3))
        self._args = MambaArgs(*sizes, a_log, dt_bias, d, numbers)
        of_x, of_groups = num_heads * spec.head_size, num_groups * spec.state_size
        self._widths = [of_x + 2 * of_groups, of_x, num_heads]
        self._into = ColumnParallelLinear(*spec.into, context=context)
        self._conv = CausalConv(spec.conv, context, silu=True, factors=spec.factors[1:4])
        self._norm = torch.empty(of_x, device=context.device)
        self._out = RowParallelLinear(spec.out, context)
        if context.device.type == "cuda":
            from worker.kernels import mamba

            self._mamba, self._grouped_norm = mamba.mamba, mamba.grouped_norm
        else:
            self._mamba, self._grouped_norm = cpu_mamba.mamba, cpu_mamba.grouped_norm

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        for part in (self._into, self._conv, self._out):
            part.load(source, prefix)
        args = self._args
        for tensor, out in zip(self._spec.of_heads, (args.a_log, args.dt_bias, args.d), strict=True):
            source.read(prefix + tensor.name, out, rows=self._heads)
        norm = self._spec.norm
        if norm is not None and norm.cut is not None:
            source.read(prefix + norm.name, self._norm, rows=self._context.shard.span_of(norm.cut))

    def row_groups(self) -> None:
        """Implements MixerModule. Returns None: the input must not be in FP8."""

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, this rank's heads * head_size]. Moves the states forward."""
        assert step.states is not None, "a model with recurrent layers has a state pool"
        conv_slots, conv_recent, slots, *recent = step.states.pool.tensors(self.layer.layer_id)
        xbc, z, dt = torch.split(self._into(x), self._widths, dim=1)
        xbc = self._conv(xbc, step.states, conv_slots, conv_recent)
        entries, steps = recent
        y, squares = self._mamba(xbc, (z, dt), self._args, step.states, slots, (entries, steps))
        return y.to(x.dtype) if self._spec.norm_eps is None else self._normed(y, squares, x.dtype)

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """Computes the layer's output [num_tokens, hidden_size] from the output of `attend`."""
        return self._out.for_norm(attended)

    def _normed(self, y: torch.Tensor, squares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The grouped norm of y. If ranks share a group, they exchange the sums of squares of single heads."""
        spec, group, groups = self._spec, self._context.group, self._context.shard[Axis.MAMBA_GROUPS]
        assert spec.norm_eps is not None, "a norm has an eps"
        heads = spec.num_heads // spec.num_groups
        if group.size > spec.num_groups:
            counts = [shard[Axis.MAMBA_HEADS].size for shard in self._context.shards]
            # Messages have equal sizes; the unused part is never read.
            sent = F.pad(squares, (0, max(counts) - squares.shape[1]))
            parts = zip(group.all_gather(sent), counts, strict=True)
            squares = torch.cat([of_rank[:, :count] for of_rank, count in parts], dim=1)
            squares = squares[:, groups.start * heads : groups.stop * heads]
        size = heads * spec.head_size
        return self._grouped_norm(y, squares, self._norm, groups.size, size, spec.norm_eps, dtype)
