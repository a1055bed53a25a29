"""A model: its layers, vocabulary and positions. Plain data, which configs/read_config.py makes."""

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
    """One decoder-only transformer. All counts are those of the whole model, never of a rank."""

    model_type: str
    """The family's name in config.json, e.g. llama or qwen3_moe."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    """Factor of the embeddings that enter the first layer, in the activations' type."""
    norm_offset: float = 0.0
    """The `TensorSpec.offset` of the last norm's weight."""
    final_logit_softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    dtype: str = "float32"
    """The checkpoint's own: float32, bfloat16 or float16."""
    weight_scales: WeightScales | None = None
    """The scales of matrices that the checkpoint has in FP8. None: it has none in FP8."""
    has_mxfp4: bool = False
    """Whether the checkpoint has experts in MXFP4."""
    tensor_prefix: str = ""
    """The beginning of its tensors' names in the checkpoint of a larger model, whose other tensors are not read."""
    num_mtp_layers: int = 0
    """Layers behind the others in a checkpoint, for predicting several tokens at once (MTP), which are not read unless
    the first is the draft head."""
    draft_head: DraftHead | None = None
    """The head that drafts tokens to come. None: there is none."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config, generation_config and tokenizer metadata name."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers, of any kind."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, and behind them that of the draft head: all that ranks have a part of and pages hold KV of."""
        return self.layers if self.draft_head is None else (*self.layers, self.draft_head.layer)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the layer that has the fewest: as many ranks as the model can be dealt to."""
        return min(axis.num_heads for layer in self.all_layers for axis in layer.axes if isinstance(axis, HeadGroups))

    @property
    def embedding(self) -> Linear:
        """Rows of token ids. The LM head too where the two are tied."""
        return self._vocabulary(f"{self.tensor_prefix}model.embed_tokens")

    @property
    def lm_head(self) -> Linear | None:
        """None where it is the embedding."""
        return None if self.tie_word_embeddings else self._vocabulary(f"{self.tensor_prefix}lm_head")

    @property
    def norm(self) -> TensorSpec:
        """The weight of the norm before the LM head."""
        name = f"{self.tensor_prefix}model.norm.weight"
        return TensorSpec(name, (self.hidden_size,), Role.NORM, offset=self.norm_offset)

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors that are in no layer."""
        heads = () if self.lm_head is None else (self.lm_head,)
        of_drafts = () if self.draft_head is None else self.draft_head.outer_tensors
        return (*tensors_of(self.embedding, *heads), self.norm, *of_drafts)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor that layers know, under its full name in a checkpoint, where some may be one."""
        yield from self.outer_tensors
        for prefix, layer in self.prefixed_layers:
            for tensor in layer.tensors:
                yield replace(tensor, name=prefix + tensor.name)

    @property
    def prefixed_layers(self) -> tuple[tuple[str, LayerSpec], ...]:
        """All layers, each behind the beginning of its tensors' names."""
        of_drafts = () if self.draft_head is None else ((self.draft_head.layer_prefix, self.draft_head.layer),)
        return (*((self.layer_prefix(i), layer) for i, layer in enumerate(self.layers)), *of_drafts)

    def layer_prefix(self, layer: int | str) -> str:
        """The beginning of the names of a layer's tensors."""
        return f"{self.tensor_prefix}model.layers.{layer}."

    def stored_tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of a checkpoint by its full name; those of one name lie below one another."""
        stored: dict[str, TensorSpec] = {}
        for it in self.tensors():
            rows = stored[it.name].shape[0] if it.name in stored else 0
            stored[it.name] = replace(it, shape=(rows + it.shape[0], *it.shape[1:]))
        return stored

    @property
    def max_context(self) -> int:
        """Longest sequence that the rotary embeddings of all layers are made for."""
        return min(layer.mixer.rope.max_context(self.max_position_embeddings) for layer in self.layers)

    def _vocabulary(self, name: str) -> Linear:
        cut = Cut(Axis.VOCABULARY, 0)
        return Linear(name, self.vocab_size, self.hidden_size, cut, role=Role.EMBEDDING)


def check_tensor_parallel_size(model: ModelConfig, tp_size: int) -> None:
    """Raises ConfigError when the model's heads cannot be dealt to `tp_size` ranks."""
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
    feed_forwards: Sequence[FeedForward],
    hidden_size: int,
    *,
    norm_names: NormNames = PLAIN_NORMS,
    norm_offset: float = 0.0,
) -> tuple[LayerSpec, ...]:
    """A layer for each of `mixers` and `feed_forwards`; equal ones are one object, which keeps its sums."""
    kinds = list(zip(mixers, feed_forwards, strict=True))
    made = {kind: LayerSpec(hidden_size, *kind, norm_names, norm_offset) for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)
