"""ModelConfig from config.json; transformers is the reference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import CheckpointError
from configs.layers import Axis, DenseMLP, GroupedQueryAttention, HeadGroups
from configs.model_config import ModelConfig
from configs.quantization import WeightScales
from configs.read_config import read_model_config
from configs.rope import RopeConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

FP8_KV = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def _write(directory: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(config))
    return directory


def _windows(model: ModelConfig) -> list[int | None]:
    return [layer.mixer.window for layer in model.layers]


def _read(directory: Path, model_type: str, **config: Any) -> ModelConfig:
    return read_model_config(_write(directory, {"model_type": model_type, **SIZES, **config}))


# ---- config.json


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "hidden_act": "gelu", "bos_token_id": 7, "eos_token_id": [1, 2]},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"sliding_window": 128},
        {"sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
    ids=["plain", "tokens", "heads", "window", "no-window", "use-window", "biases", "linear", "yarn", "llama3"],
)
def test_a_saved_config_reads_as_transformers_builds_it(
    tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    import transformers as t

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    config = getattr(t, f"{names[model_type]}Config")(**{**SIZES, **options})
    config.save_pretrained(tmp_path)
    ours = read_model_config(tmp_path)
    with torch.device("meta"):
        hf = getattr(t, f"{names[model_type]}ForCausalLM")(config)
    mixer, feed_forward = ours.layers[0].mixer, ours.layers[0].feed_forward
    assert isinstance(mixer, GroupedQueryAttention)
    assert isinstance(feed_forward, DenseMLP)
    for name in SIZES:
        owner = next(part for part in (ours, mixer, feed_forward) if hasattr(part, name))
        assert getattr(owner, name) == getattr(config, name), name
    assert mixer.head_dim == hf.model.layers[0].self_attn.head_dim
    assert {tensor.name: tensor.shape for tensor in ours.tensors()} == {
        name: tuple(parameter.shape) for name, parameter in hf.named_parameters()
    }
    assert ours.tie_word_embeddings == config.tie_word_embeddings
    assert feed_forward.hidden_act == config.hidden_act
    assert ours.bos_token_id == config.bos_token_id
    eos = config.eos_token_id
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in hf.model.layers]
    if model_type == "mistral":
        windows = [config.sliding_window] * 4
    assert _windows(ours) == windows
    parameters = dict(config.rope_parameters)
    assert mixer.rope.theta == parameters.pop("rope_theta")
    assert mixer.rope.scaling_type == parameters.pop("rope_type")
    assert dict(mixer.rope.scaling) == {key: value for key, value in parameters.items() if value is not None}


def test_old_and_new_rope_layouts_mean_the_same(tmp_path: Path) -> None:
    old = _read(tmp_path, "llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = _read(tmp_path, "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old == new
    assert old.layers[0].mixer.rope == RopeConfig(theta=5e5, scaling_type="linear", scaling=(("factor", 2.0),))
    assert _read(tmp_path, "llama", rope_theta=5e5, rope_scaling=None).layers[0].mixer.rope == RopeConfig(theta=5e5)


def test_a_null_number_of_kv_heads_means_one_for_each_query_head(tmp_path: Path) -> None:
    axes = (HeadGroups(Axis.QUERY_HEADS, 4, Axis.KV_HEADS, 4),)
    for model_type in ("llama", "qwen2", "qwen3"):
        assert _read(tmp_path, model_type, num_key_value_heads=None).layers[0].mixer.axes == axes


def test_yarn_reaches_beyond_the_trained_positions(tmp_path: Path) -> None:
    assert _read(tmp_path, "qwen2", rope_scaling={"type": "yarn", "factor": 4.0}).max_context == 4 * 4096
    assert _read(tmp_path, "qwen2").max_context == 4096


def test_layer_types_say_which_layers_have_a_window(tmp_path: Path) -> None:
    layer_types = ["full_attention", "sliding_attention"] * 2
    windowed = {"layer_types": layer_types, "sliding_window": 64}
    assert _windows(_read(tmp_path, "qwen3", use_sliding_window=True, **windowed)) == [None, 64, None, 64]
    assert _windows(_read(tmp_path, "qwen3", use_sliding_window=False, **windowed)) == [None] * 4
    assert _windows(_read(tmp_path, "llama", **windowed)) == [None] * 4


def test_end_tokens_are_the_union_of_what_all_files_name(tmp_path: Path) -> None:
    _write(tmp_path, {"eos_token_id": [5, 3]}, "generation_config.json")
    tokens = {"9": {"content": "<|im_end|>"}, "8": {"content": "<|other|>"}}
    _write(tmp_path, {"eos_token": "<|im_end|>", "added_tokens_decoder": tokens}, "tokenizer_config.json")
    assert _read(tmp_path, "llama", eos_token_id=3).eos_token_ids == (3, 5, 9)
    assert _read(tmp_path, "llama", eos_token_id=3, vocab_size=9).eos_token_ids == (3, 5), "9 has no embedding"


def test_the_dtype_is_read_from_old_and_new_keys(tmp_path: Path) -> None:
    assert _read(tmp_path, "llama", torch_dtype="bfloat16").dtype == "bfloat16"
    assert _read(tmp_path, "llama", dtype="float16").dtype == "float16"
    assert _read(tmp_path, "llama").dtype == "float32"


def test_factors_of_an_fp8_kv_cache_beside_plain_weights_are_no_quantised_weights(tmp_path: Path) -> None:
    assert _read(tmp_path, "llama", quantization_config=FP8_KV) == _read(tmp_path, "llama")


def test_weights_in_fp8_say_what_their_scales_are_of(tmp_path: Path) -> None:
    plain = _read(tmp_path, "llama")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    groups = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}

    def group(strategy: str, **more: Any) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}
        return {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}

    for said, expected in (
        (fp8 | {"weight_block_size": [128, 64]}, WeightScales(128, 64)),
        (fp8, WeightScales(0, 0, "_scale")),
        (groups | {"config_groups": {"group_0": group("channel")}}, WeightScales(1, 0, "_scale")),
        (groups | {"config_groups": {"0": group("tensor"), "1": group("tensor")}}, WeightScales(0, 0, "_scale")),
        (
            groups | {"config_groups": {"0": group("block", block_structure=[128, 64])}, "kv_cache_scheme": None},
            WeightScales(128, 64, "_scale"),
        ),
    ):
        read = _read(tmp_path, "llama", quantization_config=said)
        assert read == dataclasses.replace(plain, weight_scales=expected), said
    for other, message in (
        ({"0": group("group")}, "strategy=group are not supported"),
        ({"0": group("channel", num_bits=4)}, "{'num_bits': 4} is not supported"),
        ({"0": group("channel"), "1": group("tensor")}, "scales of 2 kinds"),
        ({"0": None}, "quantised weights are read in FP8 with scales"),
    ):
        with pytest.raises(CheckpointError, match=message):
            _read(tmp_path, "llama", quantization_config=groups | {"config_groups": other})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "blocks of rows and columns"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "blocks of rows and columns"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1], "fmt": "e5m2"}}, "in e4m3"),
        ({"model_type": "gemma3"}, "model_type=gemma3 is not supported; supported are llama, qwen2, qwen3, mistral"),
        ({"hidden_size": None}, "config.json has no hidden_size; the checkpoint is incomplete"),
        ({"hidden_size": "64"}, "hidden_size='64' is not an integer"),
        ({"hidden_size": True}, "hidden_size=True is not an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is less than 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' is not a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is not true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' is neither an integer nor a list"),
        ({"dtype": "float64"}, "dtype=float64 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights are read in FP8 with scales"),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
            "quantised weights are read in FP8 with scales",
        ),
        (
            {"quantization_config": FP8_KV | {"config_groups": {"0": {}}}},
            "quantised weights are read in FP8 with scales",
        ),
        (
            {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "strategy": "attn_head"}}},
            r"kv_cache_scheme with {'type': 'int', 'strategy': 'attn_head'} is not supported; supported are .*FP8 e4m3",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope scaling type ntk is not supported"),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0] * 8}}, "longrope: short_factor must be 8 positive"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [0]}},
            "longrope: long_factor must be 8 positive numbers",
        ),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope scaling llama3 has no low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope scaling linear: factor=0 is not positive"),
        ({"rope_theta": 0}, "rope theta=0.0 is not positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; this family's heads turn as a"),
        ({"model_type": "glm4", "partial_rotary_factor": 0}, "partial_rotary_factor=0.0 is not supported; .* above 0"),
        (
            {"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}},
            "are of other layers than full_attention and",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x"] * 4}, "layer_types must name"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0 is less than 1"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_file_key_and_reason(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, **{"model_type": "llama", **config})
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ['{"eos_token_id": ', "[1]"])
def test_corrupt_json_is_a_checkpoint_error_that_names_the_file(tmp_path: Path, name: str, text: str) -> None:
    _write(tmp_path, {"model_type": "llama", **SIZES})
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
        read_model_config(tmp_path)


def test_a_directory_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        read_model_config(tmp_path)


def test_more_layers_than_any_model_has_are_refused_before_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers=1000000000 is more than 4096"):
        _read(tmp_path, "llama", num_hidden_layers=1_000_000_000)
    experts = {"num_experts": 5000, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(CheckpointError, match="num_experts=5000 is more than 4096"):
        _read(tmp_path, "qwen3_moe", **experts)
