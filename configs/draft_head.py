"""A head that drafts what follows: one more layer, which reads states of the model.

At a position it takes the states there and the token that follows, and predicts the token after that one. From a token
of its own it goes on with what it made in place of the states. It shares the model's embedding. There are two kinds.

EAGLE-3 has a checkpoint of its own. It goes on with its layer's output, and its LM head is of a vocabulary of its own,
whose token i is the model's i + d2t[i]:

    h = fc(states);  x = mixer([norm(embedding(token)) | hidden_norm(h)]);  the rest is a layer's, with residual h

A layer for multi-token prediction (MTP) is in the model's checkpoint, behind its layers, and has the model's LM head:

    state = norm(layer(eh_proj([enorm(embedding(token)) | hnorm(state)])));  at first the state behind the model's norm
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.layers import LayerSpec, Role, TensorSpec

PREFIX = "draft."
"""The beginning of the names of an EAGLE-3 head's tensors, beside those of the model."""
LAST_STATE = -1
"""Stands among layers for the state behind the model's last norm."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """One head. Its layer is cut as any other; all else is whole on every rank."""

    layer: LayerSpec
    rms_norm_eps: float
    state_layers: tuple[int, ...]
    """Layers of the model that are entered by the states which it reads, in order; or LAST_STATE."""
    layer_prefix: str
    """The beginning of the names of its layer's tensors."""

    @property
    def projection(self) -> TensorSpec:
        """[hidden_size, columns]: it reads the states, or a token and a state."""
        raise NotImplementedError

    @property
    def norms(self) -> tuple[TensorSpec, ...]:
        """Weights of its norms that are not the layer's, each [hidden_size]."""
        raise NotImplementedError

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors that are not the layer's."""
        return (self.projection, *self.norms)

    def _matrix(self, name: str, num_inputs: int) -> TensorSpec:
        size = self.layer.hidden_size
        return TensorSpec(name, (size, num_inputs * size), Role.MATRIX)

    def _norm(self, name: str) -> TensorSpec:
        return TensorSpec(name, (self.layer.hidden_size,), Role.NORM)


@dataclass(frozen=True, kw_only=True)
class Eagle3Head(DraftHead):
    """A head of EAGLE-3, with a mixer whose inputs are twice as wide as the layer."""

    vocab_size: int
    """Tokens that it may predict."""
    model_vocab_size: int
    """Tokens of the model."""
    layer_prefix: str = f"{PREFIX}midlayer."
    norm_before_residual: bool = False
    """Whether the residual is hidden_norm(h)."""

    @property
    def projection(self) -> TensorSpec:
        """[hidden_size, states * hidden_size]: `fc`."""
        return self._matrix(f"{PREFIX}fc.weight", len(self.state_layers))

    @property
    def norms(self) -> tuple[TensorSpec, TensorSpec]:
        """Weights of hidden_norm, and of the norm before the LM head."""
        return self._norm(f"{self.layer_prefix}hidden_norm.weight"), self._norm(f"{PREFIX}norm.weight")

    @property
    def lm_head(self) -> TensorSpec:
        """[vocab_size, hidden_size]."""
        return TensorSpec(f"{PREFIX}lm_head.weight", (self.vocab_size, self.layer.hidden_size), Role.EMBEDDING)

    @property
    def map(self) -> TensorSpec | None:
        """[vocab_size] integers: the sum with a token is the model's. None: they are the same."""
        is_other = self.vocab_size < self.model_vocab_size
        return TensorSpec(f"{PREFIX}d2t", (self.vocab_size,), Role.BIAS) if is_other else None

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors that are not the layer's."""
        return (*super().outer_tensors, self.lm_head, *(() if self.map is None else (self.map,)))


@dataclass(frozen=True, kw_only=True)
class MTPHead(DraftHead):
    """A layer for multi-token prediction, whose own tensors have the names of DeepSeek-V3."""

    state_layers: tuple[int, ...] = (LAST_STATE,)

    @property
    def projection(self) -> TensorSpec:
        """[hidden_size, 2 * hidden_size]: `eh_proj`."""
        return self._matrix(f"{self.layer_prefix}eh_proj.weight", 2)

    @property
    def norms(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Weights of enorm and hnorm, and of the norm before the LM head."""
        prefix = self.layer_prefix
        own = self._norm(f"{prefix}enorm.weight"), self._norm(f"{prefix}hnorm.weight")
        return *own, self._norm(f"{prefix}shared_head.norm.weight")

    @property
    def unread(self) -> tuple[str, str]:
        """Names of the model's embedding and LM head, which the checkpoint has once more."""
        return f"{self.layer_prefix}embed_tokens.weight", f"{self.layer_prefix}shared_head.head.weight"
