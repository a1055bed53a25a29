"""One decoder for every supported family. It builds one module for each spec in ModelConfig.layers.

Activations are [num_tokens, hidden_size], with the tokens of all rows one after the other. Ranks hold spans of heads,
and of columns of MLPs or of every expert. Two all-reduces a layer make the residual stream the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.layer import AttentionLayer
from attention.state_pool import StateLayer
from configs.draft_head import LAST_STATE
from configs.model_config import ModelConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.collectives.interface import PartialSum
from parallel.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.numerics.arithmetic import FAST, Arithmetic, LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import ShardPlan
from worker.kernels.cpu_pointwise import softcap_
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding
from worker.layers.step import Padding, Step
from worker.models.decoder_layer import DecoderLayer, MixerModule
from worker.models.draft_head import DraftModel


class Decoder:
    """The transformer of one rank.

    Args:
        model: the whole model's shape.
        plan: this rank's ranges are `plan.shard(layer, group.rank)` and `plan.vocab[group.rank]`.
        group: runs the all-reduces.
        arithmetic: computes products and sums. Exact arithmetic needs an exact plan.
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
        """The model's layers in order, without the draft head's."""
        self.draft_model: DraftModel | None = None
        """The draft head, if there is one. It is not part of `layers`."""
        if (head := model.draft_head) is not None:
            context = LayerContext(plan.layers[-1], group, arithmetic, dtype, device)
            self.draft_model = DraftModel.of(head, context, len(self.layers))
        self._norm = RMSNorm(
            model.hidden_size, model.rms_norm_eps, dtype=dtype, device=device, offset=model.norm.offset
        )
        self._embedding_scale = model.embedding_scale
        if model.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(model.embedding_scale, dtype=dtype).item()
        self._lm_head = ParallelLMHead(model.hidden_size, plan, group, arithmetic, dtype=dtype, device=device)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Geometry of every attention layer on this rank, the draft head's last."""
        return [it.layer for it in self._mixers if isinstance(it.layer, AttentionLayer)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of every recurrent layer on this rank."""
        return [it.layer for it in self._mixers if isinstance(it.layer, StateLayer)]

    @property
    def _mixers(self) -> list[MixerModule]:
        return [mixer for layer in self._all_layers for mixer in layer.mixers]

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
        """Sets the factors by which each layer's keys and values are divided in an FP8 pool: one for each, or one for
        both. Call before a pool is made from `attention_layers`."""
        for layer, of_layer in zip(self._all_layers, scales, strict=True):
            if of_layer:
                attention: Any = layer.mixers[0]  # each kind of attention has its own kind of layer
                attention.layer = replace(attention.layer, k_scale=of_layer[0], v_scale=of_layer[-1])

    def set_max_positions(self, max_positions: int) -> None:
        """Prepares rotary tables for positions below `max_positions`."""
        self._rotary = [
            RotaryEmbedding(rope, rotary_dim, max_positions, dtype=self.dtype, device=self.device)
            for rope, rotary_dim in self._ropes
        ]

    def step_of(self, batch: ForwardBatch, backend: AttentionBackend) -> Step:
        """The inputs of every layer. `backend` must be ready for `batch`."""
        assert self._rotary, "set_max_positions() was not called"
        # Padding rows have page 0, which belongs to no sequence.
        padding = Padding(batch.out_cache_loc, backend.token_to_kv_pool.page_size)
        rotations = [rotary.at(batch.positions) for rotary in self._rotary]
        return Step(backend, [rotations[i] for i in self._rope_of_layer], padding, batch.states)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] of ids [num_tokens] int64, without the embedding scale."""
        return self._embedding(ids)

    def forward(
        self, batch: ForwardBatch, backend: AttentionBackend, head_inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [num_sampled, hidden_size] of `batch.sample_indices` after the last norm.

        The last layer's products run only for these tokens, unless the draft head reads that layer's output for all
        tokens. `backend` must be ready for `batch`. `head_inputs`, from `DraftModel.empty_head_inputs`, get the inputs
        of the draft head.
        """
        step = self.step_of(batch, backend)
        residual = self._embedding(batch.input_ids)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        x: torch.Tensor | PartialSum | None = None
        read: list[tuple[int, torch.Tensor]] = []
        if head_inputs is not None and self.draft_model is not None:
            read = list(zip(self.draft_model.state_layers, head_inputs.unbind(1), strict=True))
        wanted = dict(read)
        all_states = wanted.get(LAST_STATE)
        # A captured shape with drafts may have an equal number of samples and tokens, even if a step samples fewer.
        is_decode = batch.batch_size == len(batch.sample_indices) == batch.num_tokens
        keep = None if is_decode else batch.sample_indices
        for i, layer in enumerate(self.layers):
            is_last = i == len(self.layers) - 1 and all_states is None
            x, residual = layer(x, residual, step, keep if is_last else None, wanted.get(i))
        for i, state in read:  # a head may read the same layer twice
            if state is not wanted[i]:
                state.copy_(wanted[i])
        hidden = residual if x is None or not len(residual) else self._norm.add(x, residual)
        if all_states is None:
            return hidden
        all_states.copy_(hidden)
        return hidden if keep is None else hidden.index_select(0, keep)

    @property
    def num_local_logits(self) -> int:
        """Number of columns of `local_logits`: the size of this rank's vocabulary span."""
        return self._lm_head.num_local_columns

    def local_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's columns of the logits, from hidden states [num_rows, hidden_size] that `forward` returned.

        Returns:
            [num_rows, num_local_logits] fp32. `out` if it is given.
        """
        logits = self._lm_head.local_logits(hidden, out)
        if self._model.logit_scale != 1.0:
            logits *= self._model.logit_scale
        softcap = self._model.final_logit_softcap
        if softcap is None:
            return logits
        if logits.is_cuda:
            return logits.div_(softcap).tanh_().mul_(softcap)
        return softcap_(logits, softcap)
