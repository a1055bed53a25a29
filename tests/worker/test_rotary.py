"""Rotary embeddings are those of transformers, and what of them or of activations is not known is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from configs.errors import ConfigError
from configs.rope import RopeConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from tests.helpers.dense_model import dense_model
from tests.helpers.families import GROUPED, LLAMA3, YARN
from worker.layers.rotary import check_length, inverse_frequencies
from worker.models.decoder import Decoder

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("scaling_type", "scaling"),
    [
        ("default", {}),
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("llama3", {**LLAMA3, "high_freq_factor": 1.0}),
        ("yarn", YARN),
        ("yarn", {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.7}),
        ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}),
    ],
)
def test_rotary_frequencies_equal_transformers(scaling_type: str, scaling: dict[str, Any]) -> None:
    rope = {"rope_type": scaling_type, "rope_theta": 500000.0, **scaling}
    config = LlamaConfig(**{**GROUPED, "head_dim": 64, "max_position_embeddings": 128}, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = inverse_frequencies(
        RopeConfig(theta=5e5, scaling_type=scaling_type, scaling=tuple(scaling.items())), 64
    )
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_refuses_an_unknown_rope_scaling() -> None:
    rope = RopeConfig(theta=1e4, scaling_type="ntk")
    with pytest.raises(ConfigError, match="ntk is not supported"):
        inverse_frequencies(rope, 16)


def test_refuses_lengths_at_which_dynamic_rope_would_change_cached_keys() -> None:
    model = dense_model(rope=RopeConfig(theta=1e4, scaling_type="dynamic", scaling=(("factor", 2.0),)))
    check_length(model, 128)
    with pytest.raises(ConfigError, match="max_model_len=129"):
        check_length(model, 129)


def test_refuses_an_unknown_activation() -> None:
    model = dense_model(hidden_act="swish7")
    with pytest.raises(ConfigError, match="swish7"):
        Decoder(model, ShardPlan.create(model, 1), TensorParallelGroup.single(), dtype=torch.float32, device=CPU)
