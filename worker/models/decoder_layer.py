"""One layer of a decoder: the modules that its specs describe, one kind of module for each kind of spec, and norms.

Activations are [num_tokens, hidden_size], tokens of all rows one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attention.layer import AttentionLayer
from configs.biased_mixture import BiasedMixture
from configs.latent_attention import LatentAttention
from configs.layers import DenseMLP, GroupedQueryAttention, LayerSpec, MixtureOfExperts, Norms
from parallel.collectives.fused_sum import PartialSum
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.layers.attention import Attention
from worker.layers.experts import Experts
from worker.layers.latent_attention import MLA
from worker.layers.mlp import MLP
from worker.layers.norm import RMSNorm
from worker.layers.step import Padding, Step

if TYPE_CHECKING:
    from parallel.numerics.fp8 import Fp8Rows
    from parallel.numerics.kernels.fp8_groups import Groups


class MixerModule(Protocol):
    """Computes what a Mixer spec describes, on this rank's heads, and sums over the ranks."""

    @property
    def layer(self) -> AttentionLayer:
        """The layer's geometry on this rank."""

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors, whose names begin with `prefix`."""

    def row_groups(self) -> Groups | None:
        """The groups in which rows of `attend`'s input may be in FP8; None: they are not."""

    def attend(self, x: Any, step: Step) -> torch.Tensor:
        """Makes what `project` takes of [num_tokens, hidden_size], in FP8 only as `row_groups` has it; the tokens'
        state is in the pool then."""

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] of what `attend` returned; the sum over the ranks may be left to the norm."""


class FeedForwardModule(Protocol):
    """Computes what a FeedForward spec describes, on this rank's columns, and sums over the ranks."""

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors, whose names begin with `prefix`."""

    def row_groups(self) -> Groups | None:
        """The groups in which rows of its input may be in FP8; None: they are not."""

    def __call__(self, x: Any, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] of the same; the sum over the ranks may be left to the norm after it.

        Args:
            padding: which of the tokens nobody reads.
        """


# One module for each kind of spec. A new kind is a spec, a module and an entry.
_MIXERS: dict[type[Any], Callable[[Any, LayerContext, int, float], MixerModule]] = {
    GroupedQueryAttention: Attention,
    LatentAttention: MLA,
}
_FEED_FORWARDS: dict[type[Any], Callable[[Any, LayerContext], FeedForwardModule]] = {
    DenseMLP: MLP,
    MixtureOfExperts: Experts.of,
    BiasedMixture: Experts.of,
}


class NormPair:
    """The norms around a mixer or a feed-forward: the one before it, and perhaps one of what it returns."""

    def __init__(self, norms: Norms, context: LayerContext, eps: float) -> None:
        self._tensors = [tensor for tensor in norms if tensor is not None]
        self._norms = [
            RMSNorm(tensor.shape[0], eps, dtype=context.dtype, device=context.device, offset=tensor.offset)
            for tensor in self._tensors
        ]
        self.before, *after = self._norms
        self._after = after[0] if after else None

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads their weights, whose names begin with `prefix`."""
        for norm, tensor in zip(self._norms, self._tensors, strict=True):
            norm.load(source, prefix + tensor.name)

    def output(self, x: torch.Tensor | PartialSum) -> torch.Tensor | PartialSum:
        """Makes what is added to the residual of what the module between them returned."""
        return x if self._after is None else self._after(x)


class DecoderLayer:
    """Residual + attention(norm(residual)), then + feed_forward(norm(...)); what is added may be normed, too."""

    def __init__(self, spec: LayerSpec, context: LayerContext, layer_id: int, eps: float) -> None:
        self.attention = _MIXERS[type(spec.mixer)](spec.mixer, context, layer_id, eps)
        self._feed_forward = _FEED_FORWARDS[type(spec.feed_forward)](spec.feed_forward, context)
        self._mixer_norms = NormPair(spec.mixer_norms, context, eps)
        self._feed_forward_norms = NormPair(spec.feed_forward_norms, context, eps)
        self.norm = self._mixer_norms.before
        """The first one."""

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors, whose names begin with `prefix`."""
        self.attention.load(source, prefix)
        self._feed_forward.load(source, prefix)
        self._mixer_norms.load(source, prefix)
        self._feed_forward_norms.load(source, prefix)

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        step: Step,
        keep: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """(the feed-forward's output, the residual it is still to be added to): the next norm's kernel adds and norms.

        Args:
            x: the layer before's output, to be added to `residual`; None for the first layer.
            residual: [num_tokens, hidden_size]; added to in place.
            keep: tokens to go on with once K and V are stored; None: all. With none of them the output means nothing.
            state: [num_tokens, hidden_size]: gets the sum that the layer is entered by.
        """
        normed = self.norm(residual) if x is None else self.norm.add_for(x, residual, self.attention.row_groups())
        if state is not None:
            state.copy_(residual)
        return self.after_norm(normed, residual, step, keep)

    def after_norm(
        self, normed: torch.Tensor | Fp8Rows, residual: torch.Tensor, step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """The layer behind its first norm, whose output is `normed`; the rest is as above."""
        attended, padding = self.attention.attend(normed, step), step.padding
        if keep is not None and not len(keep):
            return residual[:0], residual[:0]
        if keep is not None:
            attended, residual = attended.index_select(0, keep), residual.index_select(0, keep)
            padding = padding.of(keep)
        x = self._mixer_norms.output(self.attention.project(attended))
        groups = self._feed_forward.row_groups()
        x = self._feed_forward(self._feed_forward_norms.before.add_for(x, residual, groups), padding)
        return self._feed_forward_norms.output(x), residual
