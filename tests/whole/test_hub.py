"""Models of the Hugging Face Hub: fetched once a node by the ranks, with news of how far it is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.make_checkpoint import write_checkpoint
from tests.cluster.test_cli import CONFIG as EXAMPLE
from tests.cluster.test_cli import ROOT, read_until_ready, run, run_apart, served
from tests.conftest import SMALL
from tests.helpers.fake_hub import COMMIT, REPO, hub
from tests.helpers.tiny_engine import VOCAB_SIZE, make_tokenizer

CONFIG = {
    **SMALL,
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
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


FETCH_ONTO_A_FULL_DISK = """
import subprocess
from pathlib import Path
from configs.checkpoint import resolve_model_path
from configs.errors import CheckpointError

try:
    resolve_model_path("owner/tiny")
except CheckpointError as error:
    print(error)
subprocess.run(["mount", "-o", "remount,size=64m", "home"], check=True)
print(sum(file.stat().st_size for file in resolve_model_path("owner/tiny").iterdir()))
"""


def test_a_disk_that_is_full_while_weights_are_fetched_is_named_and_fetching_goes_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    files, home = tmp_path / "files", tmp_path / "home"
    for folder in (files, home):
        folder.mkdir()
    (files / "config.json").write_text(json.dumps(CONFIG))
    (files / "model.safetensors").write_bytes(os.urandom(8 << 20))
    with hub(files) as (url, _):
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
        on_a_small_disk = ["unshare", "--user", "--map-root-user", "--mount"]
        if subprocess.run([*on_a_small_disk, "true"], capture_output=True).returncode:
            pytest.skip("this machine lets nobody mount in a namespace of their own")
        script = 'mount -t tmpfs -o size=2m tmpfs home && exec "$0" -c "$1"'
        command = [*on_a_small_disk, "sh", "-c", script, sys.executable, FETCH_ONTO_A_FULL_DISK]
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    error, size = result.stdout.splitlines()
    assert error.startswith("model=owner/tiny does not fit on the disk to which it is downloaded: "), error
    assert "No space left on device; set HF_HOME to a directory with room" in error
    assert int(size) == sum(file.stat().st_size for file in files.iterdir())


FIND = """
import sys
from configs.checkpoint import resolve_tokenizer_path

resolve_tokenizer_path(*sys.argv[1:], "v1")
"""


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A model of random weights, without a tokenizer."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def tokenizer_files(tmp_path: Path) -> Path:
    """The files of a repository that holds a tokenizer."""
    folder = tmp_path / "tokenizer"
    make_tokenizer()._fast.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not wanted")
    return folder


def settings_of(**settings: object) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.slow
def test_a_tokenizer_of_the_hub_is_read_before_anything_starts(
    shape: Path, tokenizer_files: Path, tmp_path: Path
) -> None:
    with hub(tokenizer_files) as (url, fetched):
        options = settings_of(model=shape, load_format="dummy", tokenizer=REPO, max_model_len=512)
        checked = run_apart("check", EXAMPLE, *options, HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"))
    assert checked.returncode == 0, checked.stderr
    assert "tokenizer.json" in fetched
    assert "model.safetensors" not in fetched


@pytest.mark.slow
def test_check_warns_of_tokens_that_the_model_does_not_have(shape: Path, tokenizer_files: Path) -> None:
    (shape / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": VOCAB_SIZE}))
    options = settings_of(model=shape, load_format="dummy", tokenizer=tokenizer_files, max_model_len=512)
    checked = run_apart("check", EXAMPLE, *options)
    assert checked.returncode == 0, checked.stderr
    [warning] = [line for line in checked.stderr.splitlines() if line.startswith("WARNING")]
    assert f"has embeddings for 0 to {VOCAB_SIZE - 1}: texts with one of the other tokens, 'lock' the first" in warning


@pytest.mark.parametrize("command", ["check", pytest.param("serve", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("owner/none", "cannot be fetched from the Hugging Face Hub"),
        ("/nowhere/tokenizer", "does not exist; set it to a directory"),
        ("shape", "holds no tokenizer.json"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused_before_anything_starts(
    shape: Path, tokenizer_files: Path, tmp_path: Path, command: str, tokenizer: str, words: str
) -> None:
    named = str(shape) if tokenizer == "shape" else tokenizer
    with hub(tokenizer_files) as (url, _):
        options = settings_of(model=shape, load_format="dummy", tokenizer=named, max_model_len=512)
        address = ("--address", "local") if command == "serve" else ()
        # huggingface_hub reads its settings when it is imported.
        runner = run_apart if tokenizer == "owner/none" else run
        refused = runner(command, EXAMPLE, *options, *address, HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"))
    assert refused.returncode != 0
    assert f"tokenizer={named}" in refused.stderr
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "starting Ray" not in refused.stdout


@pytest.mark.parametrize(("model", "branch"), [(REPO, "v1"), ("other/model", "main")])
def test_the_revision_is_of_the_models_repository(
    tokenizer_files: Path, tmp_path: Path, model: str, branch: str
) -> None:
    home = tmp_path / "home"
    with hub(tokenizer_files) as (url, _):
        settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", FIND, REPO, model]
        subprocess.run(command, env={**os.environ, **settings}, check=True, capture_output=True, timeout=120)
    [asked] = (home / "hub" / "models--owner--tiny" / "refs").iterdir()
    assert asked.name == branch


@pytest.mark.exhaustive
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
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_path / name, files)
    settings = [f"model={REPO}", "served_model_name=tiny", "max_model_len=512", "tensor_parallel_size=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    with hub(files, pause_s=0.5) as (url, fetched):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        checked = run_apart("check", EXAMPLE, *options)
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
