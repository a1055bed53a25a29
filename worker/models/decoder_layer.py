"""One layer of a decoder: norms, and one kind of module for each kind of spec.

Activations are [num_tokens, hidden_size], with the tokens of all rows one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attention.layer import AttentionLayer
from attention.state_pool import StateLayer
from configs.biased_mixture import BiasedMixture
from configs.delta_net import GatedDeltaNet
from configs.falcon_h1 import AttentionAndMamba
from configs.kimi_delta import KimiDeltaAttention
from configs.latent_attention import LatentAttention
from configs.layers import DenseMLP, GroupedQueryAttention, LayerSpec, MixtureOfExperts, Norms
from configs.mamba import Mamba2
from configs.recurrent import NoMixer, ShortConvolution
from parallel.collectives.interface import PartialSum
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.layers.attention import Attention
from worker.layers.delta_net import DeltaNet
from worker.layers.experts import Experts
from worker.layers.latent_attention import MLA
from worker.layers.mamba import Mamba
from worker.layers.mlp import MLP
from worker.layers.norm import RMSNorm
from worker.layers.short_conv import ShortConv
from worker.layers.step import Padding, Step

if TYPE_CHECKING:
    from parallel.numerics.fp8 import Fp8Rows
    from parallel.numerics.kernels.fp8_groups import Groups


class MixerModule(Protocol):
    """Computes a Mixer spec on this rank's heads, and sums over the ranks."""

    @property
    def layer(self) -> AttentionLayer | StateLayer:
        """The layer's geometry, or its states, on this rank."""

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""

    def row_groups(self) -> Groups | None:
        """The groups of elements that share a scale if `attend`'s input is in FP8. None if it must not be in FP8."""

    def attend(self, x: Any, step: Step) -> torch.Tensor:
        """Turns `x` [num_tokens, hidden_size] into the input of `project`, and stores the tokens' state in the pool.
        `x` may be in FP8 only in the groups of `row_groups`."""

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """Computes [num_tokens, hidden_size] from `attend`'s output. The sum over the ranks may be left to the norm."""


class FeedForwardModule(Protocol):
    """Computes a FeedForward spec on this rank's columns, and sums over the ranks."""

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""

    def row_groups(self) -> Groups | None:
        """The groups of elements that share a scale if the input is in FP8. None if the input must not be in FP8."""

    def __call__(self, x: Any, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] -> the same shape. The sum over the ranks may be left to the norm after it.

        Args:
            padding: identifies padding tokens, which nothing reads.
        """


# One module for each kind of spec. A new kind is a spec, a module and an entry.
_MIXERS: dict[type[Any], Callable[[Any, LayerContext, int, float], MixerModule]] = {
    GroupedQueryAttention: Attention,
    LatentAttention: MLA,
    GatedDeltaNet: DeltaNet,
    KimiDeltaAttention: DeltaNet,
    ShortConvolution: ShortConv,
    Mamba2: Mamba,
    AttentionAndMamba: Attention,  # DecoderLayer adds Mamba
}
_FEED_FORWARDS: dict[type[Any], Callable[[Any, LayerContext], FeedForwardModule]] = {
    DenseMLP: MLP,
    MixtureOfExperts: Experts.of,
    BiasedMixture: Experts.of,
}


class NormPair:
    """The norms around a mixer or a feed-forward: the one before it, and perhaps one for its output."""

    def __init__(self, norms: Norms, context: LayerContext, eps: float) -> None:
        self._tensors = [tensor for tensor in norms if tensor is not None]
        self._norms = [
            RMSNorm(tensor.shape[0], eps, dtype=context.dtype, device=context.device, offset=tensor.offset)
            for tensor in self._tensors
        ]
        self.before, *after = self._norms
        self._after = after[0] if after else None

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the norms' weights. The tensors' names begin with `prefix`."""
        for norm, tensor in zip(self._norms, self._tensors, strict=True):
            norm.load(source, prefix + tensor.name)

    def output(self, x: torch.Tensor | PartialSum) -> torch.Tensor | PartialSum:
        """Turns the output of the module between the norms into the summand for the residual."""
        return x if self._after is None else self._after(x)


class DecoderLayer:
    """Residual + mixer(norm(residual)), then + feed_forward(norm(...)). Both summands may be normed, too. One may be
    missing."""

    def __init__(self, spec: LayerSpec, context: LayerContext, layer_id: int, eps: float) -> None:
        self.mixers: list[MixerModule] = []
        """The mixer. Empty if there is none, two if their outputs are added."""
        self._factors = (1.0, 1.0)
        self._feed_forward: FeedForwardModule | None = None
        if not isinstance(spec.mixer, NoMixer):
            self.mixers.append(_MIXERS[type(spec.mixer)](spec.mixer, context, layer_id, eps))
        if isinstance(spec.mixer, AttentionAndMamba):
            self.mixers.append(Mamba(spec.mixer.mamba, context, layer_id, eps))
            self._factors = spec.mixer.factors
        if spec.feed_forward is not None:
            self._feed_forward = _FEED_FORWARDS[type(spec.feed_forward)](spec.feed_forward, context)
        norms = (spec.mixer_norms, spec.feed_forward_norms)
        self._norms = [NormPair(it, context, eps) for it in norms if it is not None]
        self.norm = self._norms[0].before
        """The first norm."""

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        for part in (*self.mixers, self._feed_forward, *self._norms):
            if part is not None:
                part.load(source, prefix)

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        step: Step,
        keep: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """The last part's output, and the residual to which the next norm's kernel adds it.

        Args:
            x: the previous layer's output, to add to `residual`. None for the first layer.
            residual: [num_tokens, hidden_size], changed in place.
            keep: indices of the tokens to compute once the state of all is stored. If None, all. If empty, nothing more
                is computed, and the output is empty.
            state: [num_tokens, hidden_size]: gets the residual at the layer's input, after adding x.
        """
        groups = self.mixers[0].row_groups() if len(self.mixers) == 1 else None
        normed = self.norm(residual) if x is None else self.norm.add_for(x, residual, groups)
        if state is not None:
            state.copy_(residual)
        return self.after_norm(normed, residual, step, keep)

    def after_norm(
        self, normed: torch.Tensor | Fp8Rows, residual: torch.Tensor, step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """The layer after its first norm, from that norm's output `normed`. See also `__call__`."""
        attended, padding = [mixer.attend(normed, step) for mixer in self.mixers], step.padding
        if keep is not None and not len(keep):
            return residual[:0], residual[:0]
        if keep is not None:
            attended, residual = [it.index_select(0, keep) for it in attended], residual.index_select(0, keep)
            padding = padding.of(keep)
        if self.mixers:
            x = self._norms[0].output(self._projected(attended, residual))
            if self._feed_forward is None:
                return x, residual
            normed = self._norms[-1].before.add_for(x, residual, self._feed_forward.row_groups())
        elif keep is not None and isinstance(normed, torch.Tensor):
            normed = normed.index_select(0, keep)
        assert self._feed_forward is not None, "a layer has a mixer or a feed-forward"
        return self._norms[-1].output(self._feed_forward(normed, padding)), residual

    def _projected(self, attended: list[torch.Tensor], residual: torch.Tensor) -> torch.Tensor | PartialSum:
        """The output of the mixer, or the sum of the outputs of two, times their factors. `residual` is not changed."""
        if len(self.mixers) == 1:
            return self.mixers[0].project(attended[0])
        # A sum over the ranks ends before the next one begins.
        first, second = (
            _finished(mixer.project(it), residual) for mixer, it in zip(self.mixers, attended, strict=True)
        )
        # Not one fused operation, which would round the last elements otherwise than whole vectors.
        return first.mul_(self._factors[0]).add_(second.mul_(self._factors[1]))


def _finished(x: torch.Tensor | PartialSum, residual: torch.Tensor) -> torch.Tensor:
    """The sum `x`, of the shape and dtype of `residual`."""
    if isinstance(x, torch.Tensor):
        return x
    total = torch.zeros_like(residual)
    x.add_norm(total, torch.ones_like(residual[0]), 1.0)  # only the sum is needed, not the norm
    return total
