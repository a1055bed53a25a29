"""A model: its layers, vocabulary and positions. Plain data, built by configs/read_config.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from configs.draft_head import DraftHead
from configs.errors import ConfigError
from configs.layers import (
    PLAIN_NORMS,
    Axis,
    Cut,
    FeedForward,
    HeadGroups,
    LayerSpec,
    Linear,
    Mixer,
    NormNames,
    Role,
    TensorSpec,
    tensors_of,
)
from configs.quantization import WeightScales


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. All counts are for the whole model, not for one rank."""

    model_type: str
    """The family's name in config.json, such as llama or qwen3_moe."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    """Factor of the embeddings before the first layer."""
    rounds_embedding_scale: bool = False
    """Whether the factor is rounded to the activations' dtype (Gemma)."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    norm_offset: float = 0.0
    """`TensorSpec.offset` of the final norm's weight."""
    embedding_name: str = "embed_tokens"
    norm_name: str = "norm"
    """Name of the final norm."""
    final_logit_softcap: float | None = None
    """If set, logits become softcap * tanh(logits / softcap)."""
    dtype: str = "float32"
    """The checkpoint's dtype: float32, bfloat16 or float16."""
    weight_scales: WeightScales | None = None
    """The layout of the FP8 weight scales. None if the checkpoint has no FP8 weights."""
    has_mxfp4: bool = False
    """Whether the checkpoint has experts in MXFP4."""
    tensor_prefix: str = ""
    """Prefix of the tensor names if the checkpoint holds a larger model. Tensors without the prefix are not read."""
    body: str = "model"
    """Prefix, after `tensor_prefix`, of all tensor names but the LM head's."""
    unread: tuple[str, ...] = ()
    """Prefixes of tensors that are not read: a vision tower, or draft heads."""
    num_mtp_layers: int = 0
    """MTP layers at the end of the checkpoint. They are not read, unless the first one is the draft head."""
    draft_head: DraftHead | None = None
    """The model that drafts tokens. None if the ranks do not draft."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """The union of the ids in config, generation_config and tokenizer metadata."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers of all kinds."""
        return len(self.layers)

    @property
    def has_states(self) -> bool:
        """Whether some layer is recurrent."""
        return any(layer.mixer.state for layer in self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """All layers that have weights and KV on the ranks: the model's, and the draft head's if there is one."""
        return self.layers if self.draft_head is None else (*self.layers, self.draft_head.layer)

    @property
    def num_attention_heads(self) -> int:
        """The smallest number of query heads of any layer, which is the largest number of ranks."""
        return min(axis.num_heads for layer in self.all_layers for axis in layer.axes if isinstance(axis, HeadGroups))

    @property
    def embedding(self) -> Linear:
        """The embedding [vocab_size, hidden_size]. It is the LM head too if the two are tied."""
        return self._vocabulary(f"{self.tensor_prefix}{self.body}.{self.embedding_name}")

    @property
    def lm_head(self) -> Linear | None:
        """The LM head, or None if it is tied to the embedding."""
        return None if self.tie_word_embeddings else self._vocabulary(f"{self.tensor_prefix}lm_head")

    @property
    def norm(self) -> TensorSpec:
        """The weight of the norm before the LM head."""
        name = f"{self.tensor_prefix}{self.body}.{self.norm_name}.weight"
        return TensorSpec(name, (self.hidden_size,), Role.NORM, offset=self.norm_offset)

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that belong to no layer."""
        heads = () if self.lm_head is None else (self.lm_head,)
        of_drafts = () if self.draft_head is None else self.draft_head.outer_tensors
        return (*tensors_of(self.embedding, *heads), self.norm, *of_drafts)

    def tensors(self) -> Iterator[TensorSpec]:
        """Yields all tensors of a checkpoint, with full names. Tensors that the checkpoint stores as one have the same
        name."""
        yield from self.outer_tensors
        for prefix, layer in self.prefixed_layers:
            for tensor in layer.tensors:
                yield replace(tensor, name=prefix + tensor.name)

    @property
    def prefixed_layers(self) -> tuple[tuple[str, LayerSpec], ...]:
        """All layers, each with the prefix of its tensor names."""
        of_drafts = () if self.draft_head is None else ((self.draft_head.layer_prefix, self.draft_head.layer),)
        return (*((self.layer_prefix(i), layer) for i, layer in enumerate(self.layers)), *of_drafts)

    def layer_prefix(self, layer: int | str) -> str:
        """The prefix of the names of a layer's tensors."""
        return f"{self.tensor_prefix}{self.body}.layers.{layer}."

    def stored_tensors(self) -> dict[str, TensorSpec]:
        """All tensors of the checkpoint by full name. Tensors of one name are stacked in one tensor."""
        stored: dict[str, TensorSpec] = {}
        for it in self.tensors():
            rows = stored[it.name].shape[0] if it.name in stored else 0
            stored[it.name] = replace(it, shape=(rows + it.shape[0], *it.shape[1:]))
        return stored

    @property
    def max_context(self) -> int:
        """The longest sequence that the rotary embeddings support. Layers without a rotary embedding support any
        length."""
        ropes = {layer.mixer.rope for layer in self.layers if layer.mixer.rotary_dim}
        return min(
            (rope.max_context(self.max_position_embeddings) for rope in ropes), default=self.max_position_embeddings
        )

    def _vocabulary(self, name: str) -> Linear:
        cut = Cut(Axis.VOCABULARY, 0)
        return Linear(name, self.vocab_size, self.hidden_size, cut, role=Role.EMBEDDING)


def check_tensor_parallel_size(model: ModelConfig, tp_size: int) -> None:
    """Raises ConfigError if the model's heads cannot be divided among `tp_size` ranks."""
    num_q = model.num_attention_heads
    if tp_size < 1:
        raise ConfigError(f"tensor_parallel_size={tp_size} is less than 1; choose 1 to {num_q}")
    if tp_size > num_q:
        raise ConfigError(
            f"tensor_parallel_size={tp_size} exceeds num_attention_heads={num_q}, and every rank needs a query head of "
            f"its own; choose 1 to {num_q}"
        )


def layers_of(
    mixers: Sequence[Mixer],
    feed_forwards: Sequence[FeedForward | None],
    hidden_size: int,
    *,
    norm_names: NormNames = PLAIN_NORMS,
    norm_offset: float = 0.0,
) -> tuple[LayerSpec, ...]:
    """One layer for each pair of `mixers` and `feed_forwards`. Equal layers share one object, so that its tensors
    and element counts are computed once."""
    kinds = list(zip(mixers, feed_forwards, strict=True))
    made = {kind: LayerSpec(hidden_size, *kind, norm_names, norm_offset) for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)
