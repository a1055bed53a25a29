"""Models of the Hugging Face Hub: fetched once a node by the ranks, with news of how far it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.make_checkpoint import write_checkpoint
from cluster.openai.tokenizer import convert_gguf
from tests.fake_hub import COMMIT, REPO, hub
from tests.test_cli import CONFIG as EXAMPLE
from tests.test_cli import ROOT, read_until_ready, run, served

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
FETCH = """
from configs.checkpoint import resolve_model_path

shares = []
described = resolve_model_path("owner/tiny", weights=False)
print(described)
print(sorted(file.name for file in described.iterdir()))
assert resolve_model_path("owner/tiny", on_progress=shares.append) == described
print(shares)
resolve_model_path("owner/tiny", on_progress=shares.append)
"""


def test_weights_are_fetched_once_and_their_progress_told(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(CONFIG))
    (files / "model.safetensors").write_bytes(os.urandom(24 << 20))
    (files / "pytorch_model.bin").write_bytes(b"a pickle")
    with hub(files, pause_s=0.02) as (url, fetched):
        # huggingface_hub reads its settings when it is imported.
        settings = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [sys.executable, "-c", FETCH], env={**os.environ, **settings}, capture_output=True, text=True, timeout=120
        )
    assert result.returncode == 0, result.stderr
    path, names, told = result.stdout.splitlines()
    assert path.endswith(COMMIT)
    assert names == "['config.json']"
    shares = json.loads(told)
    assert 0 < shares[0] < shares[-1] == 1.0
    assert fetched == ["config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_serve_fetches_a_model_of_the_hub(
    smollm2_path: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, files = tmp_path / "source", tmp_path / "files"
    for folder in (source, files):
        folder.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    write_checkpoint(source, files)
    convert_gguf(smollm2_path, files)
    settings = [f"model={REPO}", "served_model_name=tiny", "max_model_len=512", "tensor_parallel_size=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    with hub(files, pause_s=0.5) as (url, fetched):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        checked = run("check", EXAMPLE, *options)
        assert checked.returncode == 0, checked.stderr
        assert "2 layers" in checked.stdout
        assert not any(name.endswith(".safetensors") for name in fetched)
        with served(free_port, *options) as server:
            output = read_until_ready(server)
            assert "downloading weights" in output
            assert output.index("downloading weights") < output.index("loading weights")
            body = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
            reply = httpx.post(f"http://127.0.0.1:{free_port}/v1/completions", json=body, timeout=60)
            assert reply.json()["usage"]["completion_tokens"] == 4
            os.killpg(server.pid, signal.SIGINT)
            server.communicate(timeout=60)
    weights = [name for name in fetched if name.endswith(".safetensors")]
    assert len(weights) == len(set(weights)) > 0
