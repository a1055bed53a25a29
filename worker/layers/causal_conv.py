"""The causal convolution of recurrent layers: each channel over its own last tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from attention.state_pool import RowStates
from configs.layers import Role, TensorSpec
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import Span
from worker.kernels import cpu_conv


class CausalConv:
    """This rank's channels of a convolution.

    Args:
        tensors: the parts of the weight [channels, 1, width] in the order of the checkpoint's rows, and those of the
            bias [channels].
        silu: whether silu is applied to the result.
        normed: the number of the first heads, and their size. On GPUs the outputs of each of these heads are scaled to
            length 1. On CPUs the kernel that reads the outputs scales them.
        factors: factors of the inputs of each part of the weight, which are applied to the weight. Ones if empty.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        context: LayerContext,
        *,
        silu: bool = False,
        normed: tuple[int, int] = (0, 0),
        factors: Sequence[float] = (),
    ) -> None:
        self._tensors = tensors
        self._factors = factors
        self._context = context
        self._silu = silu
        self._weight = torch.empty(0)
        self._bias: torch.Tensor | None = None
        self._causal_conv: Callable[..., torch.Tensor] = cpu_conv.causal_conv
        if context.device.type == "cuda":
            from worker.kernels import conv

            self._causal_conv = partial(conv.causal_conv, normed=normed)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the weight and the bias. Their names begin with `prefix`."""
        weights = [it for it in self._tensors if it.role is not Role.BIAS]
        weight = self._read(source, prefix, weights)
        biases = [it for it in self._tensors if it.role is Role.BIAS]
        # The kernel reads the channels of one token after the other.
        self._weight = weight.squeeze(1).t().contiguous().float()
        sizes = [self._context.shard.span_of(it.cut).size for it in weights if it.cut is not None]
        for part, factor in zip(
            torch.split(self._weight, sizes, dim=1), self._factors or [1.0] * len(sizes), strict=True
        ):
            part *= factor
        self._bias = self._read(source, prefix, biases).float() if biases else None

    def __call__(self, x: torch.Tensor, states: RowStates, slots: torch.Tensor, recent: torch.Tensor) -> torch.Tensor:
        """[num_tokens, channels of this rank] -> the same shape. `slots` and `recent` are the layer's tensors in the
        state pool."""
        return self._causal_conv(x, self._weight, self._bias, states, slots, recent, silu=self._silu)

    def _read(self, source: TensorSource, prefix: str, parts: Sequence[TensorSpec]) -> torch.Tensor:
        """This rank's rows of all parts, stacked. The checkpoint stores parts of one name as one tensor."""
        spans, num_rows = [], Counter[str]()
        for part in parts:
            assert part.cut is not None, "the channels are divided among the ranks"
            span, first = self._context.shard.span_of(part.cut), num_rows[part.name]
            spans.append(Span(first + span.start, first + span.stop))
            num_rows[part.name] += part.shape[0]
        out = self._context.empty(sum(span.size for span in spans), *parts[0].shape[1:])
        for part, span, rows in zip(parts, spans, torch.split(out, [span.size for span in spans]), strict=True):
            source.read(prefix + part.name, rows, rows=span)
        return out
