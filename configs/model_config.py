"""What a model is: its layers, vocabulary and positions. Plain data, which configs/read_config.py makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.errors import ConfigError
from configs.layers import (
    Axis,
    Cut,
    FeedForward,
    GroupedQueryAttention,
    HeadGroups,
    LayerSpec,
    Linear,
    Role,
    TensorSpec,
    tensors_of,
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for long-context models, how its frequencies are scaled."""

    theta: float
    """Base of the geometric series of frequencies."""
    scaling_type: str = "default"
    """default, linear, llama3, yarn or dynamic; anything else is refused when the model is read."""
    scaling: tuple[tuple[str, Any], ...] = ()
    """The checkpoint's own parameters for `scaling_type`, sorted by name."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. All counts are those of the whole model, never of a rank."""

    model_type: str
    """As config.json names the family, e.g. llama or qwen3_moe."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    final_logit_softcap: float | None = None
    dtype: str = "float32"
    """The checkpoint's own: float32, bfloat16 or float16."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config, generation_config and tokenizer metadata name."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers, of any kind."""
        return len(self.layers)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the layer that has the fewest: as many ranks as the model can be dealt to."""
        return min(axis.num_heads for layer in self.layers for axis in layer.axes if isinstance(axis, HeadGroups))

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that the rotary embedding turns, in the layers that have it."""
        return max(layer.mixer.rotary_dim for layer in self.layers)

    @property
    def embedding(self) -> Linear:
        """Rows of token ids. The LM head too where the two are tied."""
        return self._vocabulary("model.embed_tokens", "token_embd")

    @property
    def lm_head(self) -> Linear | None:
        """None where it is the embedding."""
        return None if self.tie_word_embeddings else self._vocabulary("lm_head", "output")

    @property
    def norm(self) -> TensorSpec:
        """The weight of the norm before the LM head."""
        return TensorSpec("model.norm.weight", "output_norm.weight", (self.hidden_size,), Role.NORM)

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors that are in no layer."""
        heads = () if self.lm_head is None else (self.lm_head,)
        return (*tensors_of(self.embedding, *heads), self.norm)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of a checkpoint, under its full name."""
        yield from self.outer_tensors
        for i, layer in enumerate(self.layers):
            for tensor in layer.tensors:
                yield replace(tensor, name=layer_prefix(i) + tensor.name, gguf_name=f"blk.{i}.{tensor.gguf_name}")

    @property
    def max_context(self) -> int:
        """Longest sequence the rotary embedding is made for: YaRN reaches beyond `max_position_embeddings`."""
        scaling = dict(self.rope.scaling)
        if self.rope.scaling_type != "yarn" or "factor" not in scaling:
            return self.max_position_embeddings
        original = scaling.get("original_max_position_embeddings") or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * scaling["factor"]))

    def _vocabulary(self, name: str, gguf_name: str) -> Linear:
        cut = Cut(Axis.VOCABULARY, 0)
        return Linear(name, gguf_name, self.vocab_size, self.hidden_size, cut, role=Role.EMBEDDING)


def yarn_mscale(factor: float, weight: float) -> float:
    """How much YaRN sharpens attention over contexts that are `factor` times as long (arXiv 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


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
    attention: GroupedQueryAttention, feed_forwards: Sequence[FeedForward], windows: Sequence[int | None]
) -> tuple[LayerSpec, ...]:
    """A layer for each of `feed_forwards` and `windows`; equal ones are one object, which keeps its sums."""
    kinds = list(zip(feed_forwards, windows, strict=True))
    made = {
        (feed_forward, window): LayerSpec(attention.hidden_size, replace(attention, window=window), feed_forward)
        for feed_forward, window in dict.fromkeys(kinds)
    }
    return tuple(made[kind] for kind in kinds)
