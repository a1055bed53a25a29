"""The layers of LFM2, from config.json: short convolutions, with grouped-query attention between them."""

from __future__ import annotations

from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields
from configs.layers import DenseMLP, GroupedQueryAttention, LayerSpec, Mixer, NormNames
from configs.model_config import layers_of
from configs.recurrent import ShortConvolution
from configs.rope import RopeConfig

_CONVOLUTION, _ATTENTION = "conv", "full_attention"


def lfm2_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of the model. Raises CheckpointError if a field is missing or not supported."""
    num_layers, hidden_size = fields.count("num_hidden_layers", at_most=MOST_PARTS), fields.count("hidden_size")
    types = fields.values.get("layer_types")
    if types is None:
        full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields.values else range(num_layers)
        types = [_ATTENTION if i in full else _CONVOLUTION for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {_CONVOLUTION, _ATTENTION}:
        raise CheckpointError(
            f"{fields.where}: layer_types must name {_CONVOLUTION} or {_ATTENTION} for each of {num_layers} layers"
        )
    num_q = fields.count("num_attention_heads", 32)
    mixers: dict[str, Mixer] = {
        _CONVOLUTION: ShortConvolution(
            hidden_size=hidden_size, width=fields.count("conv_L_cache", 3), bias=fields.flag("conv_bias", False)
        ),
        _ATTENTION: GroupedQueryAttention(
            hidden_size=hidden_size,
            num_attention_heads=num_q,
            num_key_value_heads=fields.count("num_key_value_heads", 8),
            head_dim=fields.count("head_dim", hidden_size // num_q),
            rope=rope,
            o_name="out_proj",
            qk_norm=True,
            head_norm_name="layernorm",
        ),
    }
    mlp = DenseMLP(
        hidden_size=hidden_size,
        intermediate_size=_columns(fields),
        name="feed_forward",
        projections=("w1", "w3", "w2"),
    )
    norm_names = NormNames(before_mixer="operator_norm", before_feed_forward="ffn_norm")
    return layers_of([mixers[it] for it in types], [mlp] * num_layers, hidden_size, norm_names=norm_names)


def _columns(fields: Fields) -> int:
    """Columns of the MLP: two thirds of what the file has, times a factor, rounded up to a multiple."""
    columns = fields.count("block_ff_dim", fields.count("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return columns
    columns = 2 * columns // 3
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
        unit = fields.count("block_multiple_of", 256)
        columns = -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * columns) // unit) * unit
    return columns
