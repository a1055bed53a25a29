"""What is special of some families: parts of larger checkpoints, four bits, factors of caches, and names of tensors.

tests/whole/test_family_answers.py compares them all with transformers.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.kv_pool import FP8
from configs.errors import CheckpointError
from configs.layers import HeadGroups
from configs.read_config import read_model_config
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import Span, leaf_columns
from tests.helpers.families import FAMILIES, GROUPED, Case, case_of, in_format, random_case
from tests.helpers.family_checks import ExactLogits, Rank, check_logits, random_tokens
from tests.helpers.rank_threads import on_ranks
from worker.weights.checkpoint import Checkpoint


@pytest.mark.slow
def test_leaves_of_several_heads_and_many_columns_are_the_same_bits_on_any_ranks(tmp_path: Path) -> None:
    wide = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "intermediate_size": 4096}
    case = random_case("qwen3", {**GROUPED, **wide}, tmp_path, factor=1.0)
    (axis,) = case.model.layers[0].mixer.axes
    assert isinstance(axis, HeadGroups)
    assert (axis.leaf_heads, leaf_columns(4096)) == (2, 512)
    for dtype in (torch.float32, torch.bfloat16):
        of_one_rank = ExactLogits.of(case, dtype)
        for tp_size in (2, 3, 5, 8):
            of_one_rank.check(case, tp_size)


def test_llama_4_is_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    (text_path := tmp_path / "text").mkdir()
    case = case_of("llama4_text", text_path)
    text = json.loads((case.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    tensors = load_file(case.path / "model.safetensors")
    beside = {"vision_model.class_embedding": torch.zeros(3)}
    save_file(beside | {f"language_model.{name}": it for name, it in tensors.items()}, tmp_path / "model.safetensors")
    check_logits(Case(case.hf, tmp_path, read_model_config(tmp_path)), 2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4"}))
    with pytest.raises(CheckpointError, match="has no text_config"):
        read_model_config(tmp_path)


def test_experts_may_be_stacked_in_two_tensors_of_a_layer(tmp_path: Path) -> None:
    case = case_of("qwen3_5_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate(case.hf.model.layers):
        prefix = f"model.layers.{i}.mlp.experts."
        tensors = {name: it for name, it in tensors.items() if not name.startswith(prefix)}
        tensors |= {prefix + name: it.detach() for name, it in layer.mlp.experts.named_parameters()}
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 2 * 96, 64)
    assert tensors["model.layers.0.mlp.experts.down_proj"].shape == (6, 64, 96)
    save_file(tensors, tmp_path / "model.safetensors")
    for tp_size in (1, 3, 4):
        check_logits(case, tp_size)
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    for checkpoint in (Checkpoint.open(tmp_path, case.model), Checkpoint.of_tensors(tensors, case.model)):
        with checkpoint:
            checkpoint.read(name, part := torch.empty(5, 64), rows=Span(90, 95))
            assert checkpoint.bytes_read == part.nbytes
        assert torch.equal(part, case.hf.model.layers[2].mlp.experts.gate_up_proj[4, 96 + 90 : 96 + 95])
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(6, 96, 64)
    with pytest.raises(CheckpointError, match=r"experts.0.down_proj.weight has shape \[96, 64\], .* \[64, 96\]"):
        Checkpoint.of_tensors(tensors, case.model)
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 64, 96)
    with pytest.raises(CheckpointError, match=r"missing tensors: .*experts\.5\.down_proj\.weight"):
        Checkpoint.of_tensors(tensors, case.model)


def test_four_bits_are_read_in_parts(tmp_path: Path) -> None:
    """Of blocks, and of two experts; as transformers unpacks them."""
    case = in_format(case_of("gpt_oss", tmp_path), "MXFP4", tmp_path)
    name, rows, columns = "model.layers.1.mlp.experts.down_proj", Span(70, 150), Span(3, 40)
    plain = dict(case.hf.named_parameters())[name]
    with Checkpoint.open(tmp_path, case.model) as checkpoint:
        checkpoint.read(name, part := torch.empty(rows.size, columns.size), rows=rows, columns=columns)
    assert torch.equal(part, plain.flatten(0, 1)[70:150, 3:40])


def test_a_rank_without_columns_of_experts_reads_no_four_bits(tmp_path: Path) -> None:
    """One of 4 ranks has none if experts have 96 columns."""
    case = in_format(case_of("gpt_oss", tmp_path), "MXFP4", tmp_path)
    with Checkpoint.open(tmp_path, case.model) as checkpoint:
        checkpoint.read("model.layers.1.mlp.experts.down_proj", torch.empty(0, 64), rows=Span(64, 64))


def test_four_bits_are_refused_where_half_of_them_is_missing(tmp_path: Path) -> None:
    case = case_of("gpt_oss", tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    stored = load_file(tmp_path / "model.safetensors")
    num_experts, inputs, outputs = stored.pop(name).shape
    stored[f"{name}_blocks"] = torch.zeros(num_experts, outputs, inputs // 32, 16, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        Checkpoint.open(tmp_path, case.model)
    stored[name] = torch.zeros(num_experts, inputs, outputs, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"bytes without scales, or scales of other tensors: {name}"):
        Checkpoint.open(tmp_path, case.model)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "_moe" in name or name == "mixtral"])
def test_a_missing_and_a_surplus_expert_are_named(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    tensors = load_file(case.path / "model.safetensors")
    name = max(name for name in tensors if ".experts.3." in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        Checkpoint.open(tmp_path, case.model)
    surplus = name.replace(".experts.3.", ".experts.99.")
    save_file({**tensors, surplus: tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"does not use: {surplus}"):
        Checkpoint.open(tmp_path, case.model)


@pytest.mark.parametrize("name", ["lite", "whole", "v3"])
def test_bf16_of_latents_is_as_exact_as_transformers_bf16(name: str, tmp_path: Path) -> None:
    """Absorbed decodes round other numbers than transformers does."""
    case = case_of(name, tmp_path)
    tokens = random_tokens(3, 40)

    def body(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group, torch.bfloat16)
        return rank.logits([(1, 0, tokens[:8])]) + [rank.logits([(1, i, tokens[i : i + 1])])[0] for i in range(8, 40)]

    [ours] = on_ranks(1, body)
    with torch.inference_mode():
        expected = case.hf(torch.tensor([tokens])).logits[0]
        theirs = copy.deepcopy(case.hf).bfloat16()(torch.tensor([tokens])).logits[0]
    # Of most positions: at some, a rounded state chooses other experts.
    rms = [(it.float() - expected).square().mean(1).sqrt().median() for it in (torch.cat(ours), theirs)]
    assert rms[0] <= 1.5 * rms[1]


def test_a_factor_of_latents_in_fp8_comes_from_the_checkpoint(tmp_path: Path) -> None:
    """Of a power of two nothing is rounded otherwise, but what leaves the range of FP8."""
    case, tokens = case_of("v3", tmp_path), list(range(40, 77))
    (with_factors := tmp_path / "with factors").mkdir()
    factors = {f"model.layers.{i}.self_attn.k_scale": torch.tensor(0.25) for i in range(3)}
    save_file(load_file(tmp_path / "model.safetensors") | factors, with_factors / "model.safetensors")
    with Checkpoint.open(with_factors, case.model) as checkpoint:
        assert checkpoint.kv_scales() == [(0.25,)] * 3

    def logits(of_case: Case, kv_dtype: torch.dtype | None, tp_size: int = 1) -> torch.Tensor:
        def body(group: TensorParallelGroup) -> torch.Tensor:
            rank = Rank.create(of_case, group, kv_dtype=kv_dtype)
            parts = [(0, 11), (11, 30), *((i, i + 1) for i in range(30, 37))]
            return torch.cat([rank.logits([(1, first, tokens[first:stop])])[0] for first, stop in parts])

        return on_ranks(tp_size, body)[0]

    exact, plain = logits(case, None), logits(case, FP8)
    scaled, of_three = (logits(replace(case, path=with_factors), FP8, size) for size in (1, 3))
    rms = [float((it - exact).square().mean(1).sqrt().median() / exact.std()) for it in (plain, scaled, of_three)]
    assert not torch.equal(scaled, plain), "small numbers have more bits by a quarter"
    assert all(0.0 < it < 0.2 for it in rms), rms
