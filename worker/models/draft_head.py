"""The head that drafts, on one rank: configs/draft_head.py says what it computes.

Its layer's heads and columns are cut over the ranks as any other layer's; its norms and its projection, and the LM head
of EAGLE-3, are whole on every rank.
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
    """The modules of a head. What it reads of the model, states and embedded tokens, comes from outside."""

    def __init__(self, head: DraftHead, context: LayerContext, layer_id: int) -> None:
        self._head = head
        self._context = context
        self.layer = DecoderLayer(head.layer, context, layer_id, head.rms_norm_eps)
        self.state_layers = head.state_layers
        """Layers whose states it reads, as DraftHead has them."""
        kind = (head.layer.hidden_size, head.rms_norm_eps)
        self._norms = [RMSNorm(*kind, dtype=context.dtype, device=context.device) for _ in head.norms]
        self._projection: Weight | None = None

    @staticmethod
    def of(head: DraftHead, context: LayerContext, layer_id: int) -> DraftModel:
        """The modules of a head of either kind."""
        return (Eagle3Model if isinstance(head, Eagle3Head) else MTPModel)(head, context, layer_id)

    def load(self, source: TensorSource) -> None:
        """Reads this rank's part of every tensor."""
        self.layer.load(source, self._head.layer_prefix)
        for norm, tensor in zip(self._norms, self._head.norms, strict=True):
            norm.load(source, tensor.name)
        self._projection = self._whole(source, self._head.projection)

    def empty_states(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, len(state_layers), hidden_size]: room for the model's states."""
        return self._context.empty(num_tokens, len(self.state_layers), self._head.layer.hidden_size)

    def reduced(self, states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] that `forward` takes, of states."""
        raise NotImplementedError

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the tokens of a step, whose K and V are in the pool then.

        Args:
            embedded: [num_tokens, hidden_size]: the embedding of the token that follows each.
            hidden: [num_tokens, hidden_size]: what `reduced` returned, or this at the token before; may be changed.
            keep: as for DecoderLayer.

        Returns what predicts the token after that, and `hidden` for tokens behind: each [num_kept, hidden_size].
        """
        raise NotImplementedError

    def predicted(self, output: torch.Tensor) -> torch.Tensor | None:
        """[num_rows] int64: the model's token that is likeliest by `forward`'s first output; None: the model's LM head
        says."""
        return None

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        assert self._projection is not None, "forward before load"
        return self._projection(x)

    def _whole(self, source: TensorSource, tensor: TensorSpec) -> Weight:
        weight = self._context.empty(*tensor.shape)
        source.read(tensor.name, weight)
        return self._context.arithmetic.weight(weight, None)


class Eagle3Model(DraftModel):
    """The modules of an Eagle3Head: all ranks arrive at the same drafts without a word."""

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
            self._map.add_(ids).clamp_(0, head.model_vocab_size - 1)  # no id that is none comes from a bad file

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
        # hnorm was trained on normed states: the next pass goes on with the normed output, as in transformers.
        output = norm.add(x, residual) if len(residual) else residual
        return output, output
