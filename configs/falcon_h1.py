"""The layers of Falcon-H1, from config.json: attention beside Mamba2 in every layer, with factors everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields
from configs.layers import DenseMLP, GroupedQueryAttention, HeadGroups, LayerSpec, NormNames, StateTensor, TensorSpec
from configs.mamba import Mamba2, read_mamba
from configs.model_config import layers_of
from configs.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class AttentionAndMamba(GroupedQueryAttention):
    """Attention, and Mamba2 with the same input. Their outputs are added."""

    mamba: Mamba2
    factors: tuple[float, float]
    """Factors of the outputs of attention and of Mamba2."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return super().tensors + self.mamba.tensors

    @property
    def axes(self) -> tuple[HeadGroups, ...]:
        return super().axes + self.mamba.axes

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return self.mamba.state


def falcon_h1_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of the model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", 32, MOST_PARTS)
    has_norm = fields.flag("mamba_rms_norm", False)
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.check(key, False)
    if has_norm and fields.flag("mamba_norm_before_gate", True):
        raise CheckpointError(f"{fields.where}: mamba_norm_before_gate=True is not supported; only False is")
    fields.check("hidden_act", "silu")
    gate, down = fields.numbers("mlp_multipliers", (1.0,) * 2)
    mlp = DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size", 14336),
        factors=(gate, down),  # down(x) is linear, so its factor may be that of up(x)
        name="feed_forward",
    )
    names = NormNames(before_feed_forward="pre_ff_layernorm")
    return layers_of(
        [_mixer(fields, rope, has_norm)] * num_layers, [mlp] * num_layers, mlp.hidden_size, norm_names=names
    )


def _mixer(fields: Fields, rope: RopeConfig, has_norm: bool) -> AttentionAndMamba:
    num_q, hidden_size = fields.count("num_attention_heads", 32), fields.count("hidden_size")
    # An explicit null of `mamba_d_ssm` means that `mamba_expand` counts.
    expanded = fields.count("mamba_expand", 2) * hidden_size if "mamba_d_ssm" in fields.values else 1024
    of_input = fields.number("ssm_in_multiplier", 1.0)
    factors = tuple(it * of_input for it in fields.numbers("ssm_multipliers", (1.0,) * 5))
    eps = fields.number("rms_norm_eps", 1e-5) if has_norm else None
    attention_in, head_dim = (
        fields.number("attention_in_multiplier", 1.0),
        fields.count("head_dim", hidden_size // num_q),
    )
    return AttentionAndMamba(
        hidden_size=hidden_size,
        num_attention_heads=num_q,
        num_key_value_heads=fields.kv_heads(num_q, 8),
        head_dim=head_dim,
        rope=rope,
        # Factors of queries and keys are factors of the scores, and those of values are factors of the output.
        scale=head_dim**-0.5 * fields.number("key_multiplier", 1.0) * attention_in**2,
        mamba=read_mamba(fields, fields.count("mamba_d_ssm", expanded), eps, factors),
        factors=(
            fields.number("attention_out_multiplier", 1.0) * attention_in,
            fields.number("ssm_out_multiplier", 1.0),
        ),
    )
