"""Exact numerics through HTTP: a drawn answer is the same text at every number of ranks, alone and beside others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.engine.engine_spec import EngineSpec
from cluster.engine.fingerprint import system_fingerprint
from configs.load import load_app_config
from configs.numerics import CONTRACT
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from tests.conftest import ROOT, SMALL

NUM_OTHERS = 30


def _ask(url: str, model: str, seed: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me the story of {seed} foxes."}]
    body = {"model": model, "messages": messages, "temperature": 1.0, "seed": seed, "max_tokens": 32, "logprobs": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_drawn_answer_is_the_same_at_every_number_of_ranks_alone_and_beside_others(
    endpoint: Any, smollm2_path: Path, tmp_path: Path
) -> None:
    from ray import serve

    from cluster.serve.app import build_app

    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 49152}))
    shape = [f"model={tmp_path}", f"tokenizer={smollm2_path}", f"served_model_name={endpoint.model}"]
    answers: dict[int, dict[str, Any]] = {}
    for size in (1, 3):
        overrides = [*shape, "load_format=dummy", f"tensor_parallel_size={size}", "kv_cache.num_tokens=16384"]
        app = load_app_config(ROOT / "configs" / "smollm2-135m.yaml", overrides)
        url = f"{endpoint.url}/exact{size}"
        serve.run(build_app(app.engine.model_dump()), name=f"exact{size}", route_prefix=f"/exact{size}")
        try:
            assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["numerics"] == "exact"
            alone = _ask(url, endpoint.model, 0)
            with ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
                together = list(pool.map(partial(_ask, url, endpoint.model), range(NUM_OTHERS + 1)))
        finally:
            serve.delete(f"exact{size}")
        for seed, answer in enumerate([*together, alone]):
            expected = answers.setdefault(seed % (NUM_OTHERS + 1), answer)
            assert answer["choices"] == expected["choices"], f"{size} ranks, seed {seed}"
            assert answer["system_fingerprint"] == expected["system_fingerprint"]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers.values()}) > NUM_OTHERS / 2


H200 = "sm90, torch 2.11.0+cu130, triton 3.6.0, cublaslt 130002"


def _fingerprint(path: Path, *overrides: str, platforms: Sequence[str] = (H200,)) -> str:
    given = load_app_config(ROOT / "configs" / "smollm2-135m.yaml", [f"model={path}", *overrides]).engine
    model = read_model_config(path)
    host = HostFacts(num_cores=2, num_gpus=0)
    config = resolve(given, model, host).config
    return system_fingerprint(EngineSpec(config, model, path, path, config, host), platforms)


def test_equal_fingerprints_are_those_that_promise_equal_bits(
    smollm2_path: Path, small_path: Path, tmp_path: Path
) -> None:
    one = _fingerprint(smollm2_path)
    for other in ("tensor_parallel_size=3", "kv_cache.page_size=64", "scheduler.prefill_chunk_size=64"):
        assert _fingerprint(smollm2_path, other) == one
    for other in ("dtype=bfloat16", "kv_cache.dtype=fp8_e4m3", "numerics=fast", "load_format=dummy"):
        assert _fingerprint(smollm2_path, other) != one
    assert _fingerprint(smollm2_path, "tensor_parallel_size=3", platforms=[H200] * 3) == one
    for other in ("sm100, torch 2.11", H200.replace("3.6.0", "3.7.0"), H200.replace("130002", "130100")):
        assert _fingerprint(smollm2_path, platforms=[other]) != one
        assert _fingerprint(smollm2_path, platforms=[H200, other]) != one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.engine.fingerprint.CONTRACT", CONTRACT + 1)
        assert _fingerprint(smollm2_path) != one
    changed = shutil.copytree(small_path, tmp_path / "changed")
    assert _fingerprint(changed) == _fingerprint(small_path)
    [file] = changed.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert _fingerprint(changed) != _fingerprint(small_path)
    fast = [_fingerprint(smollm2_path, "numerics=fast", f"tensor_parallel_size={size}") for size in (1, 2)]
    assert fast[0] != fast[1]
