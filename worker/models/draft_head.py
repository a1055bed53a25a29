"""The draft head on one rank. configs/draft_head.py describes what it computes.

The head's layer is divided among the ranks. Each rank has all of its norms, its projection and EAGLE-3's LM head.
"""

from __future__ import annotations

import torch

from configs.draft_head import DraftHead, Eagle3Head
from configs.layers import TensorSpec
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import Weight
from worker.layers.norm import RMSNorm
from worker.layers.step import Step
from worker.models.decoder_layer import DecoderLayer


class DraftModel:
    """The modules of a draft head. The caller provides its inputs from the model: states and embedded tokens."""

    def __init__(self, head: DraftHead, context: LayerContext, layer_id: int) -> None:
        self._head = head
        self._context = context
        self.layer = DecoderLayer(head.layer, context, layer_id, head.rms_norm_eps)
        self.state_layers = head.state_layers
        """Indices of the layers from which the head reads states, as in DraftHead."""
        kind = (head.layer.hidden_size, head.rms_norm_eps)
        self._norms = [
            RMSNorm(*kind, dtype=context.dtype, device=context.device, offset=tensor.offset) for tensor in head.norms
        ]
        self._projection: Weight | None = None

    @staticmethod
    def of(head: DraftHead, context: LayerContext, layer_id: int) -> DraftModel:
        """The modules for a head of either kind."""
        return (Eagle3Model if isinstance(head, Eagle3Head) else MTPModel)(head, context, layer_id)

    def load(self, source: TensorSource) -> None:
        """Reads this rank's part of every tensor."""
        self.layer.load(source, self._head.layer_prefix)
        for norm, tensor in zip(self._norms, self._head.norms, strict=True):
            norm.load(source, tensor.name)
        self._projection = self._whole(source, self._head.projection)

    def empty_head_inputs(self, num_tokens: int) -> torch.Tensor:
        """An empty tensor for the model's states, [num_tokens, len(state_layers), hidden_size]."""
        return self._context.empty(num_tokens, len(self.state_layers), self._head.layer.hidden_size)

    def reduced(self, states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size], the input of `forward`, computed from states."""
        raise NotImplementedError

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the tokens of a step. Stores their K and V in the pool.

        Args:
            embedded: [num_tokens, hidden_size]: the embedding of the token that follows each token.
            hidden: [num_tokens, hidden_size]: the output of `reduced`, or `forward`'s second result for the token
                before. May be changed.
            keep: indices of the tokens for which output is returned. If None, all. If empty, only K and V are stored.

        Returns [num_kept, hidden_size] each: the LM head's input, which predicts the token after the embedded one, and
        `hidden` for the next pass.
        """
        raise NotImplementedError

    def predicted(self, output: torch.Tensor) -> torch.Tensor | None:
        """[num_rows] int64: the likeliest token in the model's vocabulary, from `forward`'s first output. None if the
        model's LM head must be used instead."""
        return None

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        assert self._projection is not None, "forward before load"
        return self._projection(x)

    def _whole(self, source: TensorSource, tensor: TensorSpec) -> Weight:
        weight = self._context.empty(*tensor.shape)
        source.read(tensor.name, weight)
        return self._context.arithmetic.weight(weight, None)


class Eagle3Model(DraftModel):
    """The modules of an Eagle3Head. All ranks compute the same drafts without communication."""

    def __init__(self, head: DraftHead, context: LayerContext, layer_id: int) -> None:
        assert isinstance(head, Eagle3Head), "another kind of head"
        super().__init__(head, context, layer_id)
        self._eagle = head
        self._lm_head: Weight | None = None
        self._map: torch.Tensor | None = None

    def load(self, source: TensorSource) -> None:
        super().load(source)
        head = self._eagle
        self._lm_head = self._whole(source, head.lm_head)
        if head.map is not None:
            ids = torch.arange(head.vocab_size, device=self._context.device)
            self._map = torch.zeros_like(ids)
            source.read(head.map.name, self._map)
            self._map.add_(ids).clamp_(0, head.model_vocab_size - 1)  # even a bad file must not produce an invalid id

    def reduced(self, states: torch.Tensor) -> torch.Tensor:
        return self._project(states.flatten(1))

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_norm, norm = self._norms
        normed = hidden_norm(hidden)
        both = torch.cat((self.layer.norm(embedded), normed), dim=1)
        residual = normed if self._eagle.norm_before_residual else hidden
        x, residual = self.layer.after_norm(both, residual, step, keep)
        return (norm.add(x, residual) if len(residual) else residual), residual

    def predicted(self, output: torch.Tensor) -> torch.Tensor:
        assert self._lm_head is not None, "forward before load"
        found = self._lm_head.in_fp32(output, None).argmax(dim=1)
        return found if self._map is None else self._map.index_select(0, found)


class MTPModel(DraftModel):
    """The modules of an MTPHead."""

    def reduced(self, states: torch.Tensor) -> torch.Tensor:
        return states.flatten(1)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        enorm, hnorm, norm = self._norms
        x, residual = self.layer(None, self._project(torch.cat((enorm(embedded), hnorm(hidden)), dim=1)), step, keep)
        # hnorm was trained on normed states, so the next pass uses the normed output, as in transformers.
        output = norm.add(x, residual) if len(residual) else residual
        return output, output
