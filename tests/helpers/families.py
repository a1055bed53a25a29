"""Small random models of every family, and their weights in every format.

tests/whole/test_family_answers.py compares them with transformers.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from attention.kv_pool import FP8
from configs.model_config import ModelConfig
from configs.read_config import read_model_config

# ---- the table
_ALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
GROUPED: dict[str, Any] = {
    **_ALL,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
}
EXPERTS: dict[str, Any] = {
    **_ALL,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts_per_tok": 3,
    "rope_theta": 10000.0,
}
LATENTS: dict[str, Any] = {
    **_ALL,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 96,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 0.01,  # which the latents' norms must not take
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_LATENT_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN, "factor": 8.0}


@dataclass(frozen=True)
class Family:
    """One small config of a family, and on how many ranks it is compared."""

    model_type: str
    config: Mapping[str, Any]
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    factor: float = 4.0
    """Of matrices, in multiples of their initial size."""


def _dense(model_type: str, **changes: Any) -> Family:
    sizes = {**GROUPED, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False}
    return Family(model_type, {**sizes, **changes})


def _grouped(model_type: str, **changes: Any) -> Family:
    return Family(model_type, {**GROUPED, **changes})


def _experts(model_type: str, **changes: Any) -> Family:
    return Family(model_type, {**EXPERTS, **changes}, tuple(range(1, 9)))


def _latents(model_type: str, **changes: Any) -> Family:
    return Family(model_type, {**LATENTS, **changes}, (1, 2, 3, 4, 6), factor=6.0)


def _sparse(model_type: str, **changes: Any) -> Family:
    # With fewer index heads many scores are zero, and transformers chooses any of them.
    index = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24}
    return _latents(model_type, q_lora_rank=40, routed_scaling_factor=2.5, **index, **changes)


def _hybrid(model_type: str, **changes: Any) -> Family:
    sizes = {
        **GROUPED,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    }
    return Family(model_type, {**sizes, **changes})


def _kimi(layer_types: tuple[str, ...]) -> Family:
    config = {
        **{key: it for key, it in LATENTS.items() if not key.startswith(("n_routed", "first_k", "rms"))},
        "rms_norm_eps": 1e-5,
        "layer_types": list(layer_types),
        "linear_head_dim": 16,
        "linear_num_heads": 8,
        "use_cache": False,  # transformers has no cache for models without attention
        "num_local_experts": 8,
        "n_group": 2,
        "routed_scaling_factor": 1.5,
        "pad_token_id": 0,
    }
    return Family("kimi_linear", config, (1, 2, 3, 4, 6))


def _convolutions(model_type: str, **changes: Any) -> Family:
    sizes = {
        **{key: it for key, it in GROUPED.items() if key != "rms_norm_eps"},
        "hidden_size": 96,
        "head_dim": 24,
        "norm_eps": 1e-5,
        "layer_types": ["conv", "full_attention", "conv"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return Family(model_type, {**sizes, **changes})


def _granite(ranks: tuple[int, ...] = (1, 2, 3, 4), **changes: Any) -> Family:
    sizes = {
        **GROUPED,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "intermediate_size": 96,
        "shared_intermediate_size": 160,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    }
    return Family("granitemoehybrid", {**sizes, **changes}, ranks)


def _falcon(**changes: Any) -> Family:
    sizes = {
        **GROUPED,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.7, 0.6],
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.4,
        "ssm_in_multiplier": 1.2,
        "ssm_multipliers": [0.9, 0.8, 1.4, 1.5, 0.7],
        "ssm_out_multiplier": 0.5,
    }
    return Family("falcon_h1", {**sizes, **changes})


# Windows and chunks below the prompts' lengths; softcaps that scores and logits reach.
FAMILIES: dict[str, Family] = {
    "llama": _dense("llama"),
    "llama_biased_llama3_rope": _dense(
        "llama",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
    ),
    "qwen2": _dense("qwen2", tie_word_embeddings=True),
    # head_dim is not hidden_size / heads.
    "qwen3_yarn": _dense("qwen3", head_dim=32, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **YARN}),
    "mistral_window": _dense("mistral", sliding_window=8),
    "gemma2": _grouped(
        "gemma2", sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3_text": _grouped(
        "gemma3_text",
        sliding_window=8,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    # Heads turn in part; q, k and v are one tensor, and gate and up; every prompt with its answer is a long one.
    "phi3": _grouped(
        "phi3",
        head_dim=16,
        sliding_window=24,
        pad_token_id=0,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
        },
    ),
    # One layer of three has no positions, and a window.
    "smollm3": _grouped(
        "smollm3",
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=8,
        pad_token_id=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **YARN},
    ),
    # Two key heads with two value heads each. Head dims differ from the attention's, and keys' from values'.
    "qwen3_next": _hybrid("qwen3_next", num_experts=6, mlp_only_layers=[1], shared_expert_intermediate_size=64),
    "qwen3_5": _hybrid("qwen3_5_text"),
    "qwen3_5_moe": _hybrid("qwen3_5_moe_text", num_experts=6, shared_expert_intermediate_size=64),
    # Two convolutions around an attention; 96 channels are not a multiple of 64.
    "lfm2": _convolutions("lfm2", conv_bias=True, block_multiple_of=32),
    "lfm2_moe": _convolutions(
        "lfm2_moe",
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        routed_scaling_factor=1.5,
    ),
    # Heads of both kinds of attention differ in number. A latent layer between two recurrent ones, and these alone.
    "kimi_linear": _kimi(("linear_attention", "full_attention", "linear_attention")),
    "kimi_linear_recurrent": _kimi(("linear_attention",) * 3),
    # The ranks share one group of Mamba heads, whose states are wider than the heads.
    "granite_4": _granite(num_local_experts=0),
    # Two groups, and attention with positions.
    "granite_4_experts": _granite(
        tuple(range(1, 9)),
        num_attention_heads=8,
        num_local_experts=6,
        num_experts_per_tok=3,
        mamba_n_groups=2,
        position_embedding_type="rope",
        attention_bias=True,
    ),
    # Layers of all kinds, mixers after each other, experts on latents; two groups of heads, and limits that dt reaches.
    "nemotron_h": Family(
        "nemotron_h",
        {
            **{
                key: it for key, it in EXPERTS.items() if key not in ("rms_norm_eps", "num_hidden_layers", "rope_theta")
            },
            "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 32,
            "n_groups": 2,
            "time_step_min": 0.02,
            "n_routed_experts": 8,
            "moe_intermediate_size": 96,
            "moe_shared_expert_intermediate_size": 160,
            "moe_latent_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        tuple(range(1, 9)),
    ),
    "falcon_h1": _falcon(),
    # Two groups, and a norm over each.
    "falcon_h1_norm": _falcon(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2),
    "glm4": _grouped("glm4", pad_token_id=0, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}),
    # Of the layers with experts one has positions, and one has none.
    "llama4_text": _grouped(
        "llama4_text",
        pad_token_id=0,
        attention_chunk_size=8,
        no_rope_layer_interval=2,
        attn_scale=0.5,
        floor_scale=4,
        intermediate_size=96,
        intermediate_size_mlp=384,
        moe_layers=[0, 1],
        num_local_experts=6,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
    ),
    # 96 columns are 3 units of 32: on 4 ranks, one has none.
    "gpt_oss": _grouped(
        "gpt_oss",
        sliding_window=8,
        intermediate_size=96,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=0.6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    ),
    # 96 and 160 columns are 3 and 5 units of 32: uneven on most ranks; on 8 some have none. 80 are cut finer.
    "qwen3_moe": _experts("qwen3_moe", num_experts=12, moe_intermediate_size=160, norm_topk_prob=True),
    "qwen3_moe_dense_layer": _experts("qwen3_moe", num_experts=8, moe_intermediate_size=96, mlp_only_layers=[1]),
    "qwen3_moe_every_second": _experts("qwen3_moe", num_experts=8, moe_intermediate_size=80, decoder_sparse_step=2),
    "mixtral": _experts("mixtral", num_local_experts=8, sliding_window=24),
    "qwen2_moe": _experts("qwen2_moe", num_experts=10, moe_intermediate_size=96, shared_expert_intermediate_size=160),
    # Heads turn in part.
    "glm4_moe": _experts(
        "glm4_moe",
        n_routed_experts=8,
        moe_intermediate_size=96,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        pad_token_id=0,
    ),
    "lite": _latents(
        "deepseek_v2", q_lora_rank=None, rope_parameters={**_LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.9}
    ),
    # Values wider than keys; and experts of two groups of four.
    "whole": _latents(
        "deepseek_v2",
        q_lora_rank=40,
        v_head_dim=32,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=0,
    ),
    # With one more layer than are computed.
    "v3": _latents(
        "deepseek_v3",
        q_lora_rank=40,
        rope_parameters={**_LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
    ),
    "v32": _sparse("deepseek_v32", n_group=4, topk_group=2, rope_parameters=_LATENT_YARN),
    # The second layer sees the tokens that the first one chose.
    "glm_5": _sparse("glm_moe_dsa", indexer_types=["full", "shared", "full"], pad_token_id=0),
}

_ROWS = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "FP8 by blocks": {"quant_method": "fp8", "weight_block_size": [16, 12]},
    "FP8 by rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": _ROWS}},
    },
    "FP8 by matrices": {"quant_method": "fp8"},
    "MXFP4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
}
"""`quantization_config` of weights in each format; MXFP4 is gpt-oss's alone."""

# ---- models


@dataclass
class Case:
    """One small model: the transformers side and our description of it."""

    hf: Any
    path: Path
    model: ModelConfig


def save(hf: Any, path: Path) -> None:
    """Writes a transformers model whose norms and biases are random too: ones and zeros would hide their absence."""
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "norm" in name or name.endswith(("bias", ".D", ".A_log")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    hf.eval().save_pretrained(path)
    if hf.config.model_type == "kimi_linear":
        # transformers gives dense MLPs the name of mixtures, unlike published checkpoints, and reads both.
        stored = load_file(path / "model.safetensors")
        names = {name: re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name) for name in stored}
        save_file({names[name]: it for name, it in stored.items()}, path / "model.safetensors", {"format": "pt"})


def random_case(model_type: str, config: Mapping[str, Any], path: Path, factor: float = 4.0) -> Case:
    """A model of that config, written to `path`. Of the initial size, scores would be far below a softcap, routers
    hardly prefer any expert and layers hardly add to the residual: matrices are `factor` times as large."""
    torch.manual_seed(0)
    config = {**config, "attn_implementation": "eager"}
    hf = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.copy_(_in_fp8(parameter * factor))
        for name, tensor in (*hf.named_parameters(), *hf.named_buffers()):
            if name.endswith(("sinks", "e_score_correction_bias", "expert_bias")):
                tensor.normal_()
    save(hf, path)
    return Case(hf, path, read_model_config(path))


def case_of(name: str, path: Path) -> Case:
    """The model of FAMILIES[name], written to `path`."""
    family = FAMILIES[name]
    return random_case(family.model_type, family.config, path, family.factor)


_LARGEST_SCALE = 2.0**-7


def _in_fp8(matrix: torch.Tensor) -> torch.Tensor:
    """The numbers next to those of `matrix` that FP8 has with a scale of 2^-7, 2^-8 or 2^-9."""
    return (matrix / _LARGEST_SCALE).clamp(-112.0, 112.0).to(FP8).float() * _LARGEST_SCALE


def in_format(case: Case, weights: str, path: Path) -> Case:
    """The case with its weights in one of FORMATS, written to `path`. In FP8 it is the very same model."""
    if weights == "plain":
        return case
    stored, hf = load_file(case.path / "model.safetensors"), case.hf
    config = json.loads((case.path / "config.json").read_text()) | {"quantization_config": FORMATS[weights]}
    (path / "config.json").write_text(json.dumps(config))
    model, draw = read_model_config(path), torch.Generator().manual_seed(0)
    if weights == "MXFP4":
        hf = copy.deepcopy(hf)
        hf.load_state_dict(_to_mxfp4(stored, draw))
    else:
        kind = model.weight_scales
        assert kind is not None
        for name, tensor in model.stored_tensors().items():
            if tensor.may_be_fp8:
                block = kind.block(tensor.shape)
                counts = [-(-size // of_block) for size, of_block in zip(tensor.shape, block, strict=True)]
                scales = _LARGEST_SCALE * 0.5 ** torch.randint(0, 3, counts, generator=draw)
                every = scales.repeat_interleave(block[0], 0)[: tensor.shape[0]]
                every = every.repeat_interleave(block[1], 1)[:, : tensor.shape[1]]
                plain, stored[name + kind.suffix] = stored[name], scales
                stored[name] = (plain / every).to(FP8)
                assert torch.equal(stored[name].float() * every, plain), name
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return Case(hf, path, model)


def _to_mxfp4(stored: dict[str, torch.Tensor], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Puts random blocks of four bits in the place of experts' matrices; all tensors as transformers unpacks them."""
    plain = dict(stored)
    for name, tensor in plain.items():
        if name.endswith("_proj") and ".experts." in name:
            num_experts, inputs, outputs = stored.pop(name).shape
            blocks = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(120, 126, blocks.shape[:-1], generator=draw, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert plain[name].shape == tensor.shape
    return plain
