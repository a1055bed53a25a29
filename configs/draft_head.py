"""The draft head: one more layer, which reads the model's hidden states and drafts the next tokens.

At each position, the head reads the model's states and the next token, and predicts the token after that. For further
drafts, it reads its own output in place of the model's states. It shares the model's embedding. There are two kinds.

An EAGLE-3 head has its own checkpoint. In place of the model's states, it reads its layer's output. Its LM head has its
own vocabulary, in which token i is the model's token i + d2t[i]:

    h = fc(states); x = mixer([norm(embedding(token)) | hidden_norm(h)]); the rest is a layer's, with residual h

A multi-token prediction (MTP) layer follows the model's layers in the model's checkpoint, and uses the model's LM head:

    state = norm(layer(eh_proj([enorm(embedding(token)) | hnorm(state)]))); the first state is the model's, after its
    norm
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.layers import LayerSpec, Role, TensorSpec

PREFIX = "draft."
"""Prefix of the names of an EAGLE-3 head's tensors, among those of the model."""
LAST_STATE = -1
"""Used in place of a layer index for the state after the model's final norm."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A draft head. Its layer is cut like any layer; every rank holds its other tensors whole."""

    layer: LayerSpec
    rms_norm_eps: float
    state_layers: tuple[int, ...]
    """Indices of layers, in order. The head reads the states at their inputs; for LAST_STATE, the model's last
    states."""
    layer_prefix: str
    """Prefix of the names of the tensors of the head's layer."""

    @property
    def projection(self) -> TensorSpec:
        """The input projection [hidden_size, columns]. It reads the states, or a token and a state."""
        raise NotImplementedError

    @property
    def norms(self) -> tuple[TensorSpec, ...]:
        """Weights of the norms outside the head's layer, each [hidden_size]."""
        raise NotImplementedError

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors outside the head's layer."""
        return (self.projection, *self.norms)

    def _matrix(self, name: str, num_inputs: int) -> TensorSpec:
        size = self.layer.hidden_size
        return TensorSpec(name, (size, num_inputs * size), Role.MATRIX)

    def _norm(self, name: str) -> TensorSpec:
        return TensorSpec(name, (self.layer.hidden_size,), Role.NORM, offset=self.layer.norm_offset)


@dataclass(frozen=True, kw_only=True)
class Eagle3Head(DraftHead):
    """An EAGLE-3 head. The input of its mixer is twice as wide as hidden_size."""

    vocab_size: int
    """Size of the head's vocabulary."""
    model_vocab_size: int
    """Size of the model's vocabulary."""
    layer_prefix: str = f"{PREFIX}midlayer."
    norm_before_residual: bool = False
    """Whether the residual is hidden_norm(h) instead of h."""

    @property
    def projection(self) -> TensorSpec:
        """`fc` [hidden_size, states * hidden_size]."""
        return self._matrix(f"{PREFIX}fc.weight", len(self.state_layers))

    @property
    def norms(self) -> tuple[TensorSpec, TensorSpec]:
        """Weights of hidden_norm and of the norm before the LM head."""
        return self._norm(f"{self.layer_prefix}hidden_norm.weight"), self._norm(f"{PREFIX}norm.weight")

    @property
    def lm_head(self) -> TensorSpec:
        """The head's LM head [vocab_size, hidden_size]."""
        return TensorSpec(f"{PREFIX}lm_head.weight", (self.vocab_size, self.layer.hidden_size), Role.EMBEDDING)

    @property
    def map(self) -> TensorSpec | None:
        """Integers [vocab_size] that are added to the head's token ids to get the model's. None if the ids are the
        same."""
        is_other = self.vocab_size < self.model_vocab_size
        return TensorSpec(f"{PREFIX}d2t", (self.vocab_size,), Role.BIAS) if is_other else None

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors outside the head's layer."""
        return (*super().outer_tensors, self.lm_head, *(() if self.map is None else (self.map,)))


@dataclass(frozen=True, kw_only=True)
class MTPHead(DraftHead):
    """An MTP layer, with DeepSeek-V3's tensor names."""

    state_layers: tuple[int, ...] = (LAST_STATE,)

    @property
    def projection(self) -> TensorSpec:
        """`eh_proj` [hidden_size, 2 * hidden_size]."""
        return self._matrix(f"{self.layer_prefix}eh_proj.weight", 2)

    @property
    def norms(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Weights of enorm and hnorm, and of the norm before the LM head."""
        prefix = self.layer_prefix
        own = self._norm(f"{prefix}enorm.weight"), self._norm(f"{prefix}hnorm.weight")
        return *own, self._norm(f"{prefix}shared_head.norm.weight")

    @property
    def unread(self) -> tuple[str, str]:
        """Names under which the checkpoint repeats the model's embedding and LM head."""
        return f"{self.layer_prefix}embed_tokens.weight", f"{self.layer_prefix}shared_head.head.weight"


@dataclass(frozen=True, kw_only=True)
class QwenMTPHead(MTPHead):
    """An MTP layer, with the tensor names of Qwen3-Next and Qwen 3.5."""

    layer_prefix: str = "mtp.layers.0."

    @property
    def projection(self) -> TensorSpec:
        """`fc` [hidden_size, 2 * hidden_size]."""
        return self._matrix("mtp.fc.weight", 2)

    @property
    def norms(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Weights of the norms of token and state, and of the norm before the LM head."""
        token, state = (self._norm(f"mtp.pre_fc_norm_{name}.weight") for name in ("embedding", "hidden"))
        return token, state, self._norm("mtp.norm.weight")

    @property
    def unread(self) -> tuple[str, str]:
        """Names under which the checkpoint repeats the model's embedding and LM head."""
        return "mtp.embed_tokens.weight", "mtp.lm_head.weight"
