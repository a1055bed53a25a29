"""The inputs that a step gives every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention.backend import AttentionBackend
from attention.rotation import Rotation
from attention.state_pool import RowStates


@dataclass(frozen=True, slots=True)
class Padding:
    """Identifies the tokens that are a graph's padding: their keys and values go to a slot before `first_slot`."""

    slots: torch.Tensor
    """[num_tokens] int64: the slots in the KV pool of the step's tokens."""
    first_slot: int
    tokens: torch.Tensor | None = None
    """[num_tokens] int64 or int32: indices of the step's tokens that this object covers. If None, all."""

    def of(self, tokens: torch.Tensor) -> Padding:
        """The padding among only `tokens` of the step. Launches no kernel, as most layers never read padding."""
        return replace(self, tokens=tokens)

    def token_slots(self) -> torch.Tensor:
        """[num_tokens] int64: slot of each token that this object covers."""
        return self.slots if self.tokens is None else self.slots.index_select(0, self.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs that every layer of one forward pass reads."""

    backend: AttentionBackend
    rotations: Sequence[Rotation]
    """Each layer's rotation, at the positions of the batch."""
    padding: Padding
    states: RowStates | None = None
    """States of recurrent layers. None if the model has no recurrent layer."""
