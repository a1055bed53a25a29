"""MTP: what the ranks draft with a checkpoint's own layer is what transformers' layer does, and answers with its drafts
are those without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention import registry
from cluster.engine.preflight import check_checkpoint
from cluster.scheduling.drafter import StepTimes
from configs.errors import CheckpointError, ConfigError
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.schema import AttentionConfig, EngineConfig, SpeculationConfig
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.helpers import mtp
from tests.helpers.families import FAMILIES, Case, case_of, random_case
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.rerun_graphs import PagedBackend, RerunGraphs
from tests.whole.test_eagle3 import Known, Trained, check_answers, check_drafts
from worker.weights.checkpoint import Checkpoint

SEVEN = SpeculationConfig(method="mtp", num_speculative_tokens=7)


def trained_on(case: Case) -> Trained:
    """The case's layer, written beside it, once it has seen the model's answers."""
    known, head = Known.of(case.path), mtp.Head(case)
    head.train(known.texts, 20)
    head.write(case.path)
    return Trained(head, known, SEVEN)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def trained(path: Path) -> Trained:
    return trained_on(case_of("glm4_moe", path))


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, path: Path, trained: Trained) -> Iterator[LocalGroup]:
    group = LocalGroup(path, request.param, Limits().num_pages, speculation=SEVEN)
    yield group
    group.close()


@pytest.fixture(autouse=True)
def cheap_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take on a busy machine would choose for itself."""
    monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))


@pytest.mark.parametrize("group", [1, 3], indirect=True)
def test_ranks_draft_what_the_layer_of_transformers_does(
    group: LocalGroup, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts(group, trained, monkeypatch)


def test_ranks_draft_what_the_layer_of_transformers_does_over_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3's, whose numerics cannot be exact."""
    trained = trained_on(case_of("v3", tmp_path))
    group = LocalGroup(tmp_path, 2, Limits().num_pages, speculation=SEVEN)
    check_drafts(group, trained, monkeypatch)
    group.close()


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_ranks_draft_what_the_layer_of_transformers_does_beside_recurrent_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The last layer has attention, as in published models: transformers takes the class of the norms from it."""
    family = FAMILIES[name]
    types = ["linear_attention", "linear_attention", "full_attention"]
    trained = trained_on(random_case(family.model_type, {**family.config, "layer_types": types}, tmp_path))
    group = LocalGroup(tmp_path, 3, Limits().num_pages, speculation=SEVEN)
    check_drafts(group, trained, monkeypatch)
    check_answers(group, trained, 5, Limits().num_pages)
    group.close()


def test_drafts_behind_captured_steps_are_the_same(
    path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)
    by_name = AttentionConfig(backend="torch_native")
    group = LocalGroup(path, 1, 64, max_model_len=128, attention=by_name, speculation=SEVEN)
    check_drafts(group, trained, monkeypatch)
    group.close()


@pytest.mark.parametrize(
    ("group", "num_drafts", "num_pages"), [(1, 3, 2048), (2, 7, 18), (3, 4, 18)], indirect=["group"]
)
def test_answers_with_drafts_equal_those_without(
    group: LocalGroup, trained: Trained, num_drafts: int, num_pages: int
) -> None:
    check_answers(group, trained, num_drafts, num_pages)


# ---- checkpoints


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), speculation=SEVEN)


def model_of(path: Path) -> ModelConfig:
    return with_draft_head(read_model_config(path), config_of(path))


def test_a_model_without_such_a_layer_is_refused(small_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method=mtp needs a layer for it in the checkpoint, and model=.* has none"):
        model_of(small_path)


def test_a_model_with_sparse_attention_is_refused(tmp_path: Path) -> None:
    case_of("v32", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"method=mtp does not support sparse attention, .*; choose ngram or none"):
        model_of(tmp_path)


def test_a_checkpoint_that_lacks_its_layer_or_has_more_than_is_known_is_refused(tmp_path: Path) -> None:
    case = case_of("glm4_moe", tmp_path)
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.3\.eh_proj\.weight"):
        check_checkpoint(config_of(tmp_path), serves_text=False)
    head = mtp.Head(case)
    head.write(tmp_path)
    check_checkpoint(config_of(tmp_path), serves_text=False)
    save_file({**head.tensors(), "model.layers.3.fc_norm.weight": torch.zeros(64)}, tmp_path / "mtp.safetensors")
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.3\.fc_norm\.weight"):
        check_checkpoint(config_of(tmp_path), serves_text=False)
    check_checkpoint(EngineConfig(model=str(tmp_path)), serves_text=False)


def test_a_layer_in_fp8_is_read_with_its_scales(tmp_path: Path) -> None:
    """DeepSeek-V3's is published so, but for `eh_proj` and the router."""
    case = case_of("v3", tmp_path)
    mtp.Head(case).write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "mtp.safetensors")
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    expected = tensors[name].to(torch.float8_e4m3fn).float() * 0.75
    for it in [it for it in tensors if "_proj" in it and "eh_proj" not in it]:
        tensors[it] = tensors[it].to(torch.float8_e4m3fn)
        tensors[f"{it}_scale_inv"] = torch.full([-(-size // 16) for size in tensors[it].shape], 0.75)
    save_file(tensors, tmp_path / "mtp.safetensors")
    with Checkpoint.open(tmp_path, model_of(tmp_path)) as checkpoint:
        found = torch.empty(expected.shape)
        checkpoint.read(name, found)
        assert torch.equal(found, expected)


def test_the_layer_is_one_more_in_weights_pages_and_the_cost_of_a_step(path: Path, trained: Trained) -> None:
    model = model_of(path)
    alone = dataclasses.replace(model, draft_head=None)
    last, size = model.layers[-1], model.hidden_size
    for tp_size in 1, 3:
        plans = [ShardPlan.create(it, tp_size) for it in (model, alone)]
        ranks = range(tp_size)
        weights, pages = (
            sum(of(plans[0], rank) - of(plans[1], rank) for rank in ranks)
            for of in (ShardPlan.weight_elements, ShardPlan.kv_elements_per_token)
        )
        whole = 2 * size * size + 3 * size  # eh_proj and the norms
        of_layer = sum(tensor.elements for tensor in last.tensors if tensor.cut is not None)
        on_all = sum(tensor.elements for tensor in last.tensors if tensor.cut is None)
        assert weights == of_layer + tp_size * (on_all + whole)
        assert pages == 2 * 4 * 16
        costs = [StepCost.of(plan, 4) for plan in plans]
        assert costs[0].flops_per_token * 3 > costs[1].flops_per_token * 4  # the last layer has experts, the first none
        assert dict(costs[0].routed).keys() == dict(costs[1].routed).keys()
