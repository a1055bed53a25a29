"""One model by every pair of the backends that run here, one for prompts and one for decodes, at TP 1, 2 and 3:
any two of these three come together.

Triton's kernels run in its interpreter. On GPUs tests/gpu/test_gpu_models.py does this.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.kernels import decode, extend
from attention.triton_backend import TritonBackend
from cluster.messages.engine import SamplingParams
from configs.attention import BACKENDS
from configs.schema import AttentionConfig
from tests.helpers.families import save
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.pairs import pairs

NAMES = ("torch_native", "triton")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """By transformers, and its checkpoint: a window in every second layer, and three query heads to two KV heads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"],
    )
    hf = transformers.Gemma3ForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("model")
    save(hf, path)
    return hf, path


@pytest.fixture
def triton_on_cpus(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    """Lets ranks that are threads take the Triton backend; its interpreter runs one kernel at a time."""
    anywhere = {"triton": dataclasses.replace(BACKENDS["triton"], device=None)}
    monkeypatch.setattr("configs.attention.BACKENDS", {**BACKENDS, **anywhere})
    monkeypatch.setattr(TritonBackend, "captures_cuda_graphs", False)
    monkeypatch.setattr(decode, "_MAX_SPLITS", 2)  # each a turn of the interpreter's loop, empty or not
    lock = threading.Lock()

    def one_at_a_time(run: Any) -> Any:
        def locked(*args: Any, **options: Any) -> Any:
            with lock:
                return run(*args, **options)

        return locked

    monkeypatch.setattr(decode, "paged_decode", one_at_a_time(decode.paged_decode))
    monkeypatch.setattr(extend, "paged_extend", one_at_a_time(extend.paged_extend))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decodes", "tp_size"), pairs(NAMES, NAMES, [1, 2, 3]))
def test_greedy_tokens_are_those_of_transformers(
    prefill: str, decodes: str, tp_size: int, model: tuple[Any, Path], triton_on_cpus: None
) -> None:
    hf, path = model
    prompts = [np.random.default_rng(length).integers(0, 320, length).tolist() for length in (1, 18, 45)]
    attention = AttentionConfig(prefill_backend=prefill, decode_backend=decodes)  # type: ignore[arg-type]
    group = LocalGroup(path, tp_size, num_pages=40, attention=attention, numerics="fast")
    try:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        answers = group.generate([(prompt, sampling) for prompt in prompts], Limits(40, chunk=24), at_once=True)
    finally:
        group.close()
    for prompt, answer in zip(prompts, answers.tokens, strict=True):
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist()
