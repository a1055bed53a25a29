"""Other weights for an engine that serves: they compute what a start with them would, and one that fails changes
nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cluster.engine.messages import SamplingParams
from configs.errors import CheckpointError, ConfigError
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from parallel.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, ExactArithmetic
from parallel.plan import ShardPlan
from tests import test_families, test_latent_models, test_moe_models
from tests.local_group import Limits, LocalGroup
from worker.dummy_weights import DummyCheckpoint
from worker.models.decoder import Decoder
from worker.staged_weights import StagedWeights, _bytes_of, storages

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {**test_families.SIZES, "tie_word_embeddings": True}),
    "untied_with_biases": ("qwen2", {**test_families.SIZES, "tie_word_embeddings": False}),
    "head_norms": ("qwen3", {**test_families.SIZES, "vocab_size": 333}),
    "norm_offsets": ("gemma3_text", {**test_families.SIZES, **test_families.MODELS["gemma3_text"][1]}),
    "sinks": ("gpt_oss", {**test_families.SIZES, **test_families.MODELS["gpt_oss"][1]}),
    "experts": ("qwen2_moe", {**test_moe_models.SIZES, **test_moe_models.MODELS["qwen2_moe"][1]}),
    "latents": ("deepseek_v2", {**test_latent_models.SIZES, **test_latent_models.MODELS["lite"]}),
}


def _model(path: Path, family: str) -> ModelConfig:
    kind, settings = FAMILIES[family]
    transformers.CONFIG_MAPPING[kind](**settings).save_pretrained(path)
    return read_model_config(path)


def _decoder(model: ModelConfig, size: int, rank: int, *, exact: bool, dtype: torch.dtype) -> Decoder:
    plan = ShardPlan.create(model, size, exact=exact)
    group = TensorParallelGroup(rank=rank, size=size, device=CPU, collectives=None)
    arithmetic = ExactArithmetic(CPU) if exact else FAST
    return Decoder(model, plan, group, arithmetic=arithmetic, dtype=dtype, device=CPU)


def _bits(decoder: Decoder) -> list[bytes]:
    return [_bytes_of(storage).numpy().tobytes() for storage in storages(decoder)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "exact", "dtype"), [(1, False, torch.bfloat16), (2, True, torch.float32)])
def test_each_weight_of_each_family_becomes_the_new_one(
    tmp_path: Path, family: str, size: int, exact: bool, dtype: torch.dtype
) -> None:
    model = _model(tmp_path, family)
    exact = exact and family != "latents"  # there are none in exact numerics
    for rank in range(size):
        live, staged, cold = (_decoder(model, size, rank, exact=exact, dtype=dtype) for _ in range(3))
        first, second = DummyCheckpoint(model), DummyCheckpoint(model, "second")
        live.load(first)
        cold.load(second)
        before, addresses = _bits(live), [storage.data_ptr() for storage in storages(live)]
        new = StagedWeights(live, staged, DummyCheckpoint(model, "second"), first.bytes_loaded)
        assert _bits(live) == before, "live weights changed before they were to"
        new.take_over()
        assert _bits(live) == _bits(cold)
        assert _bits(live) != before
        assert [storage.data_ptr() for storage in storages(live)] == addresses
        # None of the weights is somewhere that is not looked at.
        found = {storage._cdata: storage.nbytes() for storage in storages(live)}
        assert sum(found.values()) >= second.bytes_loaded


def _other(path: Path, out: Path, factor: float = 1.25) -> Path:
    """A checkpoint of the model at `path` with other weights."""
    (out / "config.json").write_text((path / "config.json").read_text())
    random = torch.Generator().manual_seed(1)
    save_file(
        {
            name: tensor * (1 + factor * torch.rand(tensor.shape, generator=random))
            for name, tensor in load_file(path / "model.safetensors").items()
        },
        out / "model.safetensors",
    )
    return out


def _in_fp8(path: Path, out: Path) -> Path:
    """The checkpoint at `path` with its layers' matrices in FP8 by blocks."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and "layers" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full([-(-it // 16) for it in tensor.shape], 0.75)
    save_file(tensors, out / "model.safetensors")
    return out


def _tokens(group: LocalGroup) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6, 7], [*range(3, 60)], [900, 2]]
    return group.generate([(prompt, sampling) for prompt in prompts], Limits(64), at_once=True).tokens


@pytest.mark.parametrize(
    ("size", "numerics", "is_fp8"), [(1, "fast", False), (2, "auto", False), (2, "fast", True), (1, "auto", True)]
)
def test_ranks_that_serve_answer_as_a_start_with_the_new_weights_would(
    small_path: Path, tmp_path: Path, size: int, numerics: Any, is_fp8: bool
) -> None:
    other = (_in_fp8 if is_fp8 else _other)(small_path, tmp_path)
    cold = LocalGroup(other, size, 64, numerics=numerics)
    expected = _tokens(cold)
    cold.close()
    group = LocalGroup(small_path, size, 64, numerics=numerics)
    before = _tokens(group)
    assert before != expected
    model = replace(read_model_config(other), dtype=group.model.dtype)
    for worker in group.workers.values():
        assert not worker.stage(model, other, None), "a CPU has but one memory"
    assert _tokens(group) == before
    for worker in group.workers.values():
        worker.take_staged()
    assert _tokens(group) == expected
    group.close()


def test_weights_that_cannot_be_read_change_nothing(small_path: Path, tmp_path: Path) -> None:
    other = _other(small_path, tmp_path)
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-8])
    group = LocalGroup(small_path, 1, 64)
    before = _tokens(group)
    with pytest.raises(CheckpointError, match="truncated"):
        group.workers[0].stage(group.model, other, None)
    assert _tokens(group) == before
    group.close()


def test_other_factors_of_a_kv_cache_in_fp8_are_refused(small_path: Path, tmp_path: Path) -> None:
    other = _other(small_path, tmp_path)
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "model.layers.1.self_attn.k_scale": torch.tensor(0.5)}, other / "model.safetensors")
    group = LocalGroup(small_path, 1, 64, kv_dtype="fp8_e4m3", numerics="fast")
    _tokens(group)
    with pytest.raises(ConfigError, match="factors of keys and values in FP8 differ"):
        group.workers[0].stage(group.model, other, None)
    group.close()
