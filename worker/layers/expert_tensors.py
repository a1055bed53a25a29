"""Reads experts from tensors that hold all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from configs.biased_mixture import BiasedMixture
from configs.layers import Axis, MixtureOfExperts
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import Span


def read_stacked(
    source: TensorSource, prefix: str, spec: MixtureOfExperts, i: int, columns: Span, gate_up: Tensor, down: Tensor
) -> None:
    """Like `worker.layers.experts.Experts._read_expert`, from stacked tensors of all experts."""
    (all_gate_up, all_down), size = spec.stacks, spec.intermediate_size
    if spec.stacked == "outputs first":
        for half, out in enumerate(gate_up.chunk(2)):
            first = (2 * i + half) * size
            source.read(prefix + all_gate_up.name, out, rows=Span(*(first + it for it in columns)))
        rows = Span(i * spec.hidden_size, (i + 1) * spec.hidden_size)
        source.read(prefix + all_down.name, down, rows=rows, columns=columns)
        return
    rows = Span(i * spec.hidden_size, (i + 1) * spec.hidden_size)
    for first, out in zip((0, size), gate_up.chunk(2), strict=True):
        part = torch.empty_like(out.t(), memory_format=torch.contiguous_format)
        source.read(prefix + all_gate_up.name, part, rows=rows, columns=Span(*(first + it for it in columns)))
        out.copy_(part.t())
    part = torch.empty_like(down.t(), memory_format=torch.contiguous_format)
    source.read(prefix + all_down.name, part, rows=Span(*(i * size + it for it in columns)))
    down.copy_(part.t())


def read_biased(
    source: TensorSource, prefix: str, spec: BiasedMixture, context: LayerContext
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's columns of each expert, from stacked tensors with the inputs first and alternating columns of gate
    and up. Yields [2 * columns, hidden_size] and [hidden_size, columns], which the caller must copy."""
    columns = context.shard[Axis.EXPERT_COLUMNS]
    gate_up = context.empty(spec.num_experts, spec.hidden_size, 2 * columns.size)
    down = context.empty(columns.size, spec.hidden_size)
    source.read(prefix + spec.gate_up.name, gate_up, columns=Span(2 * columns.start, 2 * columns.stop))
    for expert in range(spec.num_experts):
        start, stop = (expert * spec.intermediate_size + column for column in columns)
        source.read(prefix + spec.down.name, down, rows=Span(start, stop))
        yield _parted(gate_up[expert].t()), down.t()


def read_gate_up_bias(source: TensorSource, prefix: str, spec: BiasedMixture, context: LayerContext) -> Tensor:
    """The bias of this rank's columns of gate, then up, of each expert [num_experts, 2 * columns]."""
    columns = context.shard[Axis.EXPERT_COLUMNS]
    bias = context.empty(spec.num_experts, 2 * columns.size)
    source.read(prefix + spec.gate_up_bias.name, bias, columns=Span(2 * columns.start, 2 * columns.stop))
    return bias.view(spec.num_experts, columns.size, 2).mT.flatten(1)


def _parted(rows: torch.Tensor) -> torch.Tensor:
    """Separates alternating rows: the rows of gate, then those of up."""
    return torch.cat((rows[::2], rows[1::2]))
