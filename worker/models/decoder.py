"""One decoder for every supported family: Llama 2/3, Qwen2/2.5, Qwen3, Mistral. What differs is in ModelConfig.

Activations are [num_tokens, hidden_size], tokens of all rows one after the other. Ranks hold spans of heads and MLP
columns; two all-reduces a layer make the residual stream the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.layer import AttentionLayer
from attention.rotation import QKNorms, Rotation
from configs.model_config import ModelConfig
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.fused_sum import PartialSum
from parallel.group import TensorParallelGroup
from parallel.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, TensorSource
from parallel.plan import LayerShard, ShardPlan, Span
from worker.layers.activation import ActAndMul
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward pass reads."""

    backend: AttentionBackend
    rotation: Rotation
    """At the positions of the batch."""


class Attention:
    """Self-attention over this rank's query heads: qkv -> norm -> rotary -> attention -> o -> all-reduce.

    The all-reduce may be left to the norm that takes what this returns.
    """

    def __init__(
        self,
        model: ModelConfig,
        shard: LayerShard,
        layer_id: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        window = model.layer_windows[layer_id] if model.layer_windows else None
        self.layer = AttentionLayer(
            layer_id=layer_id,
            tp_q_head_num=shard.q_heads.size,
            tp_k_head_num=shard.kv_heads.size,
            head_dim=model.head_dim,
            scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
            window=window,
            softcap=model.attention_softcap,
        )
        self._qkv = QKVParallelLinear(
            model.hidden_size,
            model.head_dim,
            shard.q_heads,
            shard.kv_heads,
            bias=model.qkv_bias,
            dtype=dtype,
            device=device,
        )
        columns = Span(shard.q_heads.start * model.head_dim, shard.q_heads.stop * model.head_dim)
        self._o = RowParallelLinear(
            columns, model.hidden_size, bias=model.o_bias, group=group, dtype=dtype, device=device
        )
        self._q_norm: RMSNorm | None = None
        self._k_norm: RMSNorm | None = None
        self._norms: QKNorms | None = None
        if model.qk_norm:
            self._q_norm = RMSNorm(model.head_dim, model.rms_norm_eps, dtype=dtype, device=device)
            self._k_norm = RMSNorm(model.head_dim, model.rms_norm_eps, dtype=dtype, device=device)
            self._norms = QKNorms(self._q_norm.weight, self._k_norm.weight, model.rms_norm_eps)

    def load(self, source: TensorSource, prefix: str) -> None:
        self._qkv.load(source, f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self._o.load(source, f"{prefix}.o_proj")
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.load(source, f"{prefix}.q_norm")
            self._k_norm.load(source, f"{prefix}.k_norm")

    def attend(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        """[num_tokens, tp_q_head_num * head_dim] of [num_tokens, hidden_size]; the tokens' K and V are in the pool."""
        return step.backend.forward(self._qkv(x), self.layer, step.rotation, self._norms)

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] of what `attend` returned."""
        return self._o.for_norm(attended)


class MLP:
    """down(act(gate(x)) * up(x)) over this rank's columns, then all-reduce, which may be left to the next norm."""

    def __init__(
        self,
        model: ModelConfig,
        shard: LayerShard,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._act_and_mul = ActAndMul(model.hidden_act)
        self._gate_up = MergedColumnParallelLinear(
            model.hidden_size, (shard.mlp, shard.mlp), bias=model.mlp_bias, dtype=dtype, device=device
        )
        self._down = RowParallelLinear(
            shard.mlp, model.hidden_size, bias=model.mlp_bias, group=group, dtype=dtype, device=device
        )

    def load(self, source: TensorSource, prefix: str) -> None:
        self._gate_up.load(source, (f"{prefix}.gate_proj", f"{prefix}.up_proj"))
        self._down.load(source, f"{prefix}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor | PartialSum:
        return self._down.for_norm(self._act_and_mul(self._gate_up(x)))


class DecoderLayer:
    """Residual + attention(norm(residual)), then + mlp(norm(...))."""

    def __init__(
        self,
        model: ModelConfig,
        shard: LayerShard,
        layer_id: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.attention = Attention(model, shard, layer_id, group, dtype=dtype, device=device)
        self._mlp = MLP(model, shard, group, dtype=dtype, device=device)
        self._input_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype=dtype, device=device)
        self._post_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype=dtype, device=device)

    def load(self, source: TensorSource, prefix: str) -> None:
        self.attention.load(source, f"{prefix}.self_attn")
        self._mlp.load(source, f"{prefix}.mlp")
        self._input_norm.load(source, f"{prefix}.input_layernorm")
        self._post_norm.load(source, f"{prefix}.post_attention_layernorm")

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        step: _Step,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """(the MLP's output, the residual it is still to be added to): the next norm adds and norms in one kernel.

        Args:
            x: the layer before's output, to be added to `residual`; None for the first layer.
            residual: [num_tokens, hidden_size]; added to in place.
            keep: tokens to go on with once K and V are stored; at least one. None: all.
        """
        normed = self._input_norm(residual) if x is None else self._input_norm.add(x, residual)
        attended = self.attention.attend(normed, step)
        if keep is not None:
            attended, residual = attended.index_select(0, keep), residual.index_select(0, keep)
        x = self.attention.project(attended)
        return self._mlp(self._post_norm.add(x, residual)), residual

    def store(self, x: torch.Tensor | PartialSum, residual: torch.Tensor, step: _Step) -> None:
        """Only puts the tokens' K and V into the pool."""
        self.attention.attend(self._input_norm.add(x, residual), step)


class Decoder:
    """The transformer of one rank.

    Args:
        model: the whole model's shape.
        plan: this rank's ranges are `plan.shard(layer, group.rank)` and `plan.vocab[group.rank]`.
        group: where the all-reduces run.
    """

    def __init__(
        self,
        model: ModelConfig,
        plan: ShardPlan,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._rotary: RotaryEmbedding | None = None
        self._embedding = VocabParallelEmbedding(model.hidden_size, plan, group, dtype=dtype, device=device)
        self._layers = [
            DecoderLayer(model, plan.shard(i, group.rank), i, group, dtype=dtype, device=device)
            for i in range(model.num_hidden_layers)
        ]
        self._norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype=dtype, device=device)
        self._lm_head = ParallelLMHead(model.hidden_size, plan, group, dtype=dtype, device=device)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Geometry of every layer on this rank."""
        return [layer.attention.layer for layer in self._layers]

    def load(self, source: TensorSource, on_progress: Callable[[float], None] | None = None) -> None:
        """Reads this rank's shard of every tensor. `on_progress` gets the share done, 0 to 1, after each layer."""
        self._embedding.load(source, "model.embed_tokens")
        for i, layer in enumerate(self._layers):
            layer.load(source, f"model.layers.{i}")
            if on_progress is not None:
                on_progress((i + 1) / (len(self._layers) + 1))
        self._norm.load(source, "model.norm")
        if self._model.tie_word_embeddings:
            self._lm_head.tie(self._embedding)
        else:
            self._lm_head.load(source, "lm_head")
        if on_progress is not None:
            on_progress(1.0)

    def set_max_positions(self, max_positions: int) -> None:
        """Prepares rotary tables for positions below `max_positions`."""
        self._rotary = RotaryEmbedding(self._model, max_positions, dtype=self._dtype, device=self._device)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        """Hidden states [num_sampled, hidden_size] of `batch.sample_indices` after the last norm.

        The last layer's products run for these tokens alone. `backend` is ready for `batch`.
        """
        assert self._rotary is not None, "forward before set_max_positions"
        step = _Step(backend, self._rotary.at(batch.positions))
        residual = self._embedding(batch.input_ids)
        x: torch.Tensor | PartialSum | None = None
        *layers, last = self._layers
        for layer in layers:
            x, residual = layer(x, residual, step)
        num_sampled = len(batch.sample_indices)
        if num_sampled == 0 and x is not None:
            last.store(x, residual, step)
            return residual[:0]
        x, residual = last(x, residual, step, None if num_sampled == batch.num_tokens else batch.sample_indices)
        return self._norm.add(x, residual)

    @property
    def num_local_logits(self) -> int:
        """Columns of `local_logits`: this rank's vocabulary span."""
        return self._lm_head.num_local_columns

    def local_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's columns of the logits of hidden states [num_rows, hidden_size] that `forward` returned.

        Returns:
            [num_rows, num_local_logits] fp32; `out` if one is given.
        """
        logits = self._lm_head.local_logits(hidden, out)
        softcap = self._model.final_logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
