"""The EAGLE-3 head on one rank: configs/draft_head.py says what it computes.

Its layer's heads and columns are cut over the ranks as any other layer's; `fc`, the LM head and the norms are whole on
every rank, so that all arrive at the same drafts without a word.
"""

from __future__ import annotations

import torch

from configs.draft_head import LAYER_PREFIX, DraftHead
from configs.layers import TensorSpec
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import Weight
from worker.layers.norm import RMSNorm
from worker.layers.step import Step
from worker.models.decoder import DecoderLayer


class DraftModel:
    """The head's modules. What it reads of the model, states and embedded tokens, comes from outside."""

    def __init__(self, head: DraftHead, context: LayerContext, layer_id: int) -> None:
        self._head = head
        self._context = context
        self.layer = DecoderLayer(head.layer, context, layer_id, head.rms_norm_eps)
        self.state_layers = head.state_layers
        """Layers of the model whose entering states it reads."""
        kind = (head.layer.hidden_size, head.rms_norm_eps)
        self._hidden_norm, self._norm = (RMSNorm(*kind, dtype=context.dtype, device=context.device) for _ in range(2))
        self._fc: Weight | None = None
        self._lm_head: Weight | None = None
        self._map: torch.Tensor | None = None

    def load(self, source: TensorSource) -> None:
        """Reads this rank's part of every tensor."""
        head = self._head
        self.layer.load(source, LAYER_PREFIX)
        for norm, tensor in zip((self._hidden_norm, self._norm), head.norms, strict=True):
            norm.load(source, tensor.name)
        self._fc, self._lm_head = self._whole(source, head.fc), self._whole(source, head.lm_head)
        if head.map is not None:
            ids = torch.arange(head.vocab_size, device=self._context.device)
            self._map = torch.zeros_like(ids)
            source.read(head.map.name, self._map)
            self._map.add_(ids).clamp_(0, head.model_vocab_size - 1)  # no id that is none comes from a bad file

    def empty_states(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, len(state_layers), hidden_size]: room for the model's states."""
        return self._context.empty(num_tokens, len(self.state_layers), self._head.layer.hidden_size)

    def reduced(self, states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] that `forward` takes, of states."""
        assert self._fc is not None, "forward before load"
        return self._fc(states.flatten(1))

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
        normed = self._hidden_norm(hidden)
        both = torch.cat((self.layer.norm(embedded), normed), dim=1)
        residual = normed if self._head.norm_before_residual else hidden
        x, residual = self.layer.after_norm(both, residual, step, keep)
        return (self._norm.add(x, residual) if len(residual) else residual), residual

    def predicted(self, output: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64: the model's token that is likeliest by `forward`'s first output."""
        assert self._lm_head is not None, "forward before load"
        found = self._lm_head.in_fp32(output, None).argmax(dim=1)
        return found if self._map is None else self._map.index_select(0, found)

    def _whole(self, source: TensorSource, tensor: TensorSpec) -> Weight:
        weight = self._context.empty(*tensor.shape)
        source.read(tensor.name, weight)
        return self._context.arithmetic.weight(weight, None)
