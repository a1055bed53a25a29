"""Reads a model's config from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from pathlib import Path

from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields, checked_rope
from configs.gguf_header import GGUFHeader
from configs.layers import DenseMLP, GroupedQueryAttention
from configs.model_config import ModelConfig, layers_of
from configs.rope import RopeConfig

_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_DTYPES = {0: "float32", 1: "float16"}


def config_of_gguf(path: Path) -> ModelConfig:
    header = GGUFHeader.read(path)
    fields = Fields(header.metadata, str(path))
    family = fields.text("general.architecture")
    if fields.integer(f"{family}.expert_count", 0):
        raise CheckpointError(
            f"{path}: mixtures of experts are not read from GGUF files; use the model's safetensors checkpoint"
        )
    if family not in _GGUF_FAMILIES:
        raise CheckpointError(
            f"{path}: general.architecture={family} is not supported; supported are {', '.join(_GGUF_FAMILIES)}"
        )
    tensors = header.tensors
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{path} has no two-dimensional tensor token_embd.weight; the checkpoint is incomplete")
    embedding = tensors["token_embd.weight"]
    hidden_size, num_q = fields.count(f"{family}.embedding_length"), fields.count(f"{family}.attention.head_count")
    head_dim = fields.count(f"{family}.attention.key_length", hidden_size // num_q)
    rotary_dim = fields.integer(f"{family}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim or fields.integer(f"{family}.attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{path}: rotary, key and value widths of a head must be the same; head_dim={head_dim}")
    num_layers = fields.count(f"{family}.block_count", at_most=MOST_PARTS)
    if fields.values.get(f"{family}.attention.sliding_window"):
        raise CheckpointError(f"{path}: sliding windows of GGUF files are not supported")
    attention = GroupedQueryAttention(
        hidden_size=hidden_size,
        num_attention_heads=num_q,
        num_key_value_heads=fields.count(f"{family}.attention.head_count_kv", num_q),
        head_dim=head_dim,
        rope=_gguf_rope(path, header, fields, family, head_dim),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    mlp = DenseMLP(
        hidden_size=hidden_size,
        intermediate_size=fields.count(f"{family}.feed_forward_length"),
        bias="blk.0.ffn_up.bias" in tensors,
    )
    return ModelConfig(
        model_type=family,
        hidden_size=hidden_size,
        vocab_size=embedding.shape[0],
        max_position_embeddings=fields.count(f"{family}.context_length"),
        rms_norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
        layers=layers_of([attention] * num_layers, [mlp] * num_layers, hidden_size),
        # Quantised weights come from bfloat16 models more often than not, and bfloat16 never overflows.
        dtype=_GGUF_DTYPES.get(embedding.ggml_type, "bfloat16"),
        bos_token_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(i for key in _GGUF_EOS_KEYS for i in fields.ids(f"tokenizer.ggml.{key}"))),
    )


def _gguf_rope(path: Path, header: GGUFHeader, fields: Fields, family: str, head_dim: int) -> RopeConfig:
    theta = fields.number(f"{family}.rope.freq_base", 10000.0)
    prefix = f"{family}.rope.scaling."
    scaling_type = fields.text(f"{prefix}type", "none").replace("none", "default")
    if "rope_freqs.weight" in header.tensors:
        scaling = _llama3_scaling(path, header.tensors["rope_freqs.weight"].offset, theta, head_dim)
        return checked_rope(theta, "llama3", scaling, str(path))
    if scaling_type == "default":
        return RopeConfig(theta=theta)
    if scaling_type == "longrope":
        raise CheckpointError(f"{path}: rope scaling type longrope is not read from GGUF files")
    if fields.number(f"{prefix}attn_factor", 1.0) != 1.0 or fields.values.get(f"{prefix}yarn_log_multiplier"):
        raise CheckpointError(f"{path}: {prefix}attn_factor and yarn_log_multiplier are not supported")
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    scaling = {
        ours: fields.number(prefix + theirs) for theirs, ours in names.items() if prefix + theirs in fields.values
    }
    if scaling_type == "yarn":
        scaling.setdefault("original_max_position_embeddings", fields.integer(f"{family}.context_length"))
    return checked_rope(theta, scaling_type, scaling, str(path))


def _llama3_scaling(path: Path, offset: int, theta: float, head_dim: int) -> dict[str, float]:
    """Parameters of Llama 3.1's frequency scaling, of which a GGUF keeps only the divisors it comes to.

    All published models share the constants but for the factor, which is the largest divisor; the file's divisors
    must be what these parameters give.
    """
    half = head_dim // 2
    with path.open("rb") as file:
        file.seek(offset)
        raw = file.read(4 * half)
    if len(raw) < 4 * half:
        raise CheckpointError(f"{path} is truncated: it ends inside rope_freqs.weight; download it again")
    divisors = struct.unpack(f"<{half}f", raw)
    factor, low, high, original = max(divisors), 1.0, 4.0, 8192
    for i, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        kept = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - kept) / factor + kept), rel_tol=1e-3):
            raise CheckpointError(
                f"{path}: rope_freqs.weight is not Llama 3.1's frequency scaling; use the safetensors checkpoint"
            )
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
