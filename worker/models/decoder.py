"""One decoder for every supported family: it builds what ModelConfig.layers describes, one module for each spec.

Activations are [num_tokens, hidden_size], tokens of all rows one after the other. Ranks hold spans of heads, and of
columns of MLPs or of every expert; two all-reduces a layer make the residual stream the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.layer import AttentionLayer
from configs.biased_mixture import BiasedMixture
from configs.draft_head import LAST_STATE
from configs.latent_attention import LatentAttention
from configs.layers import DenseMLP, GroupedQueryAttention, LayerSpec, MixtureOfExperts, Norms
from configs.model_config import ModelConfig
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.fused_sum import PartialSum
from parallel.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, Arithmetic, LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import ShardPlan
from worker.kernels.cpu_pointwise import softcap_
from worker.layers.attention import Attention
from worker.layers.experts import Experts
from worker.layers.latent_attention import MLA
from worker.layers.mlp import MLP
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding
from worker.layers.step import Padding, Step

if TYPE_CHECKING:
    from parallel.numerics.fp8 import Fp8Rows
    from parallel.numerics.kernels.fp8_groups import Groups
    from worker.models.draft_head import DraftModel


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


class Decoder:
    """The transformer of one rank.

    Args:
        model: the whole model's shape.
        plan: this rank's ranges are `plan.shard(layer, group.rank)` and `plan.vocab[group.rank]`.
        group: where the all-reduces run.
        arithmetic: how products and sums are done; exact needs an exact plan.
    """

    def __init__(
        self,
        model: ModelConfig,
        plan: ShardPlan,
        group: TensorParallelGroup,
        *,
        arithmetic: Arithmetic = FAST,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self.dtype = dtype
        """The activations' type."""
        self.device = device
        """The device that computes."""
        ropes = [(layer.mixer.rope, layer.mixer.rotary_dim) for layer in model.all_layers]
        self._ropes = list(dict.fromkeys(ropes))
        self._rope_of_layer = [self._ropes.index(rope) for rope in ropes]
        self._rotary: list[RotaryEmbedding] = []
        self._embedding = VocabParallelEmbedding(model.hidden_size, plan, group, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(layer, LayerContext(plan.layers[i], group, arithmetic, dtype, device), i, model.rms_norm_eps)
            for i, layer in enumerate(model.layers)
        ]
        """One for each of the model's, in order."""
        self.draft_model: DraftModel | None = None
        """The head that drafts, beside the layers."""
        if (head := model.draft_head) is not None:
            from worker.models.draft_head import DraftModel  # it has a DecoderLayer itself

            context = LayerContext(plan.layers[-1], group, arithmetic, dtype, device)
            self.draft_model = DraftModel.of(head, context, len(self.layers))
        self._norm = RMSNorm(
            model.hidden_size, model.rms_norm_eps, dtype=dtype, device=device, offset=model.norm.offset
        )
        self._embedding_scale = torch.tensor(model.embedding_scale, dtype=dtype).item()  # rounded as transformers does
        self._lm_head = ParallelLMHead(model.hidden_size, plan, group, arithmetic, dtype=dtype, device=device)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Geometry of every layer on this rank, the draft head's last."""
        return [layer.attention.layer for layer in self._all_layers]

    @property
    def _all_layers(self) -> list[DecoderLayer]:
        return self.layers if self.draft_model is None else [*self.layers, self.draft_model.layer]

    def load(self, source: TensorSource, on_progress: Callable[[float], None] | None = None) -> None:
        """Reads this rank's shard of every tensor. `on_progress` gets the share done, 0 to 1, after each layer."""
        model = self._model
        self._embedding.load(source, model.embedding.name)
        for i, layer in enumerate(self.layers):
            layer.load(source, model.layer_prefix(i))
            if on_progress is not None:
                on_progress((i + 1) / (len(self.layers) + 1))
        self._norm.load(source, model.norm.name)
        if model.lm_head is None:
            self._lm_head.tie(self._embedding)
        else:
            self._lm_head.load(source, model.lm_head.name)
        if self.draft_model is not None:
            self.draft_model.load(source)
        if on_progress is not None:
            on_progress(1.0)

    def set_kv_scales(self, scales: Sequence[tuple[float, ...]]) -> None:
        """Sets what each layer's keys, and its values, or both as one, are divided by in a pool in FP8; before
        `attention_layers` are asked for to make one."""
        for layer, of_layer in zip(self._all_layers, scales, strict=True):
            attention: Any = layer.attention  # each kind has layers of its own kind
            attention.layer = replace(attention.layer, k_scale=of_layer[0], v_scale=of_layer[-1])

    def set_max_positions(self, max_positions: int) -> None:
        """Prepares rotary tables for positions below `max_positions`."""
        self._rotary = [
            RotaryEmbedding(rope, rotary_dim, max_positions, dtype=self.dtype, device=self.device)
            for rope, rotary_dim in self._ropes
        ]

    def step_of(self, batch: ForwardBatch, backend: AttentionBackend) -> Step:
        """The inputs of every layer; `backend` is ready for `batch`."""
        assert self._rotary, "forward before set_max_positions"
        # Padding rows have page 0, which no sequence has.
        padding = Padding(batch.out_cache_loc, backend.token_to_kv_pool.page_size)
        rotations = [rotary.at(batch.positions) for rotary in self._rotary]
        return Step(backend, [rotations[i] for i in self._rope_of_layer], padding)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] of ids [num_tokens] int64, as the checkpoint has them."""
        return self._embedding(ids)

    def forward(
        self, batch: ForwardBatch, backend: AttentionBackend, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [num_sampled, hidden_size] of `batch.sample_indices` after the last norm.

        The last layer's products run for these tokens alone, unless all are wanted behind it. `backend` is ready for
        `batch`. `states`, made by `DraftModel.empty_states`, get what the draft head reads of all tokens.
        """
        step = self.step_of(batch, backend)
        residual = self._embedding(batch.input_ids)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        x: torch.Tensor | PartialSum | None = None
        read: list[tuple[int, torch.Tensor]] = []
        if states is not None and self.draft_model is not None:
            read = list(zip(self.draft_model.state_layers, states.unbind(1), strict=True))
        wanted = dict(read)
        all_states = wanted.get(LAST_STATE)
        # A captured shape with drafts has as many samples as tokens, whichever of them a step samples.
        is_decode = batch.batch_size == len(batch.sample_indices) == batch.num_tokens
        keep = None if is_decode else batch.sample_indices
        for i, layer in enumerate(self.layers):
            is_last = i == len(self.layers) - 1 and all_states is None
            x, residual = layer(x, residual, step, keep if is_last else None, wanted.get(i))
        for i, state in read:  # a head may read one layer's twice
            if state is not wanted[i]:
                state.copy_(wanted[i])
        hidden = residual if x is None or not len(residual) else self._norm.add(x, residual)
        if all_states is None:
            return hidden
        all_states.copy_(hidden)
        return hidden if keep is None else hidden.index_select(0, keep)

    @property
    def num_local_logits(self) -> int:
        """Columns of `local_logits`: this rank's vocabulary span."""
        return self._lm_head.num_local_columns

    def local_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's columns of the logits of hidden states [num_rows, hidden_size] that `forward` returned.

        Returns:
            [num_rows, num_local_logits] fp32; `out` if one is given.
        """
        logits = self._lm_head.local_logits(hidden, out)
        softcap = self._model.final_logit_softcap
        if softcap is None:
            return logits
        if logits.is_cuda:
            return logits.div_(softcap).tanh_().mul_(softcap)
        return softcap_(logits, softcap)
