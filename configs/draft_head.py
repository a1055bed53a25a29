"""The head of EAGLE-3 that drafts what follows: one more layer, which reads states of the model's own layers.

At a position it takes the states there and the token that follows, and predicts the token after that one:

    h = fc(states);  x = mixer([norm(embedding(token)) | hidden_norm(h)]);  the rest is a layer's, with residual h

From a token of its own it goes on with that layer's output in place of h. It shares the model's embedding; its LM head
is of a vocabulary of its own, whose token i is the model's i + d2t[i].
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.layers import LayerSpec, Role, TensorSpec

PREFIX = "draft."
"""The beginning of the names of its tensors, beside those of the model."""
LAYER_PREFIX = f"{PREFIX}midlayer."


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """One head. Its LM head, `fc` and norms are whole on every rank; its layer is cut as any other."""

    layer: LayerSpec
    """With a mixer whose inputs are twice as wide as the layer."""
    rms_norm_eps: float
    vocab_size: int
    """Tokens that it may predict."""
    model_vocab_size: int
    """Tokens of the model."""
    state_layers: tuple[int, ...]
    """Layers of the model that are entered by the states which it reads, in order of `fc`'s columns."""
    norm_before_residual: bool = False
    """Whether the residual is hidden_norm(h)."""

    @property
    def fc(self) -> TensorSpec:
        """[hidden_size, states * hidden_size]."""
        size = self.layer.hidden_size
        return TensorSpec(f"{PREFIX}fc.weight", "", (size, len(self.state_layers) * size), Role.MATRIX)

    @property
    def norms(self) -> tuple[TensorSpec, TensorSpec]:
        """Weights of hidden_norm, and of the norm before the LM head."""
        names, size = (f"{LAYER_PREFIX}hidden_norm.weight", f"{PREFIX}norm.weight"), (self.layer.hidden_size,)
        return TensorSpec(names[0], "", size, Role.NORM), TensorSpec(names[1], "", size, Role.NORM)

    @property
    def lm_head(self) -> TensorSpec:
        """[vocab_size, hidden_size]."""
        return TensorSpec(f"{PREFIX}lm_head.weight", "", (self.vocab_size, self.layer.hidden_size), Role.EMBEDDING)

    @property
    def map(self) -> TensorSpec | None:
        """[vocab_size] integers: the sum with a token is the model's. None: they are the same."""
        is_other = self.vocab_size < self.model_vocab_size
        return TensorSpec(f"{PREFIX}d2t", "", (self.vocab_size,), Role.BIAS) if is_other else None

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors that are not the layer's."""
        return (self.fc, *self.norms, self.lm_head, *(() if self.map is None else (self.map,)))
