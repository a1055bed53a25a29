"""Drafts of the ranks on GPUs: from graphs of the head's passes they are those of eager passes, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.speculation import Foreseeing
from cluster.scheduling.drafter import StepTimes
from configs.schema import SpeculationConfig
from tests.conftest import ROOT
from tests.helpers.gpu_engine import GpuEngine, write_shape
from worker.protocol import StepResult

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"frequency_penalty": 0.7, "num_logprobs": 1},
    {"temperature": 0.8, "seed": 4},
]


def write_eagle3(path: Path) -> SpeculationConfig:
    """A model of four layers and a head for it, for random weights."""
    model = json.loads((write_shape(path) / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    head = json.loads((ROOT / "benchmarks/heads/qwen3-8b-eagle3/config.json").read_text())
    (path / "head").mkdir()
    (path / "head/config.json").write_text(json.dumps(head | {name: model[name] for name in names}))
    return SpeculationConfig(method="eagle3", model=str(path / "head"), num_speculative_tokens=6)


def write_mtp(path: Path) -> SpeculationConfig:
    """A mixture of experts with such a layer, for random weights."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return SpeculationConfig(method="mtp", num_speculative_tokens=3)


def recorded(engine: GpuEngine) -> list[tuple[list[int], list[list[int]]]]:
    """Tokens and drafts of all steps from now on, as they come."""
    steps, answer = list[tuple[list[int], list[list[int]]]](), engine._answer

    def taken() -> Any:
        step = StepResult.decode(encoded := answer())
        steps.append((step.tokens.tolist(), step.drafts.tolist()))
        return encoded

    engine._answer = taken  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("write", [write_eagle3, write_mtp])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu)])
def test_graphs_draft_what_eager_passes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, write: Callable[[Path], SpeculationConfig]
) -> None:
    """Numerics are exact: other numbers of rows change nothing. Verified drafts are known answers with errors."""
    settings = {
        "load_format": "dummy",
        "tensor_parallel_size": size,
        "numerics": "exact",
        "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 512},
        "speculation": write(tmp_path),
    }
    # What steps take chooses nothing, so that both engines have the same steps.
    monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4000, int(rng.integers(1, 200))).tolist() for _ in range(24)]
    ways = [{"max_tokens": 20 + 3 * index, **way} for index, way in enumerate(6 * WAYS)]

    def run(engine: GpuEngine) -> dict[int, list[int]]:
        for index, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
            engine.add(index + 1, prompt, **way)
        return {index: answer.tokens for index, answer in engine.run().items()}

    runs = []
    for is_eager in (True, False):
        with GpuEngine(tmp_path, num_pages=300, eager_drafts=is_eager, **settings) as engine:
            known = run(engine)
            wholes = {index: [*prompts[index - 1], *tokens] for index, tokens in known.items()}
            with monkeypatch.context() as patched:
                patched.setattr("cluster.scheduling.scheduler.Drafter", partial(Foreseeing, wholes=wholes, rate=0.8))
                engine.restart_loops()
            steps = recorded(engine)
            assert run(engine) == known
            stats = engine.stats()
        assert 0.3 < stats.total_accepted / stats.total_drafted < 0.9
        runs.append((known, steps))
    assert runs[0] == runs[1]
    drafts = [draft for _, of_rows in runs[0][1] for of_row in of_rows for draft in of_row if draft >= 0]
    assert len(drafts) > 500
    assert len(set(drafts)) > 50
