"""What the whole run shares: one Ray cluster with one served model, and the skips by hardware."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import fast_interpreter

if TYPE_CHECKING:
    import openai
    import torch

    from cluster.text.tokenizer import Tokenizer
    from parallel.persistent_memory import Keeper
    from tests.helpers.rank_processes import Ranks
    from tests.helpers.scripted_engine import Run

if not Path("/dev/nvidiactl").exists():
    # The Triton kernels run in its interpreter, on CPU tensors. Triton reads this when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

SHARE_GPUS = "SHARE_GPUS"
"""Environment variable: set, ranks that have no GPU of their own share one, which is slow and goes over NCCL."""
ROOT = Path(__file__).resolve().parent.parent
Logits = Callable[[list[int]], "torch.Tensor"]
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 144,
    "intermediate_size": 1152,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
"""config.json of a Llama like SmolLM2 in what ranks cut: 9 query heads, 3 KV heads, 9 granules of MLP columns."""
SMOLLM2 = Path.home() / ".cache/lockstep/smollm2-135m"


def pytest_configure() -> None:
    # Of ten thousand items and the packages that they import nothing is garbage: to look at them all again took 5 s.
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The Ray cluster and the endpoint take memory and cores: they come last and stay to the end.
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    wanted = {mark for item in items for mark in ("gpu", "multi_gpu") if item.get_closest_marker(mark)}
    if not wanted:
        return
    import torch

    num_gpus = torch.cuda.device_count()
    for item in items:
        for mark, needed in (("gpu", 1), ("multi_gpu", 1 if SHARE_GPUS in os.environ else 2)):
            if item.get_closest_marker(mark) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_gpus}"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Once a test had set two threads, the draw of a row of 1,500 logits took 15 ms in place of 0.1 beside other work on
    # two cores: its calls wait for the slower thread.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if "worker.self_test" in sys.modules:
        from tests.helpers import known_chains

        known_chains.keep()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        fast_interpreter.speed_up()


@pytest.fixture
def interpreter() -> None:
    """For tests of kernels on CPU tensors: skips where kernels are compiled for a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels compiled for a GPU take no CPU tensors")
    pytest.importorskip("triton.runtime.interpreter", reason="a CPU install has no Triton")
    fast_interpreter.speed_up()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: interpreted on CPU tensors, or compiled for a GPU."""
    import torch

    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return torch.device(request.param)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter's products ascending chains, as a GPU's are."""
    from tests.helpers.chain_dot import use_chain_dot

    if os.environ.get("TRITON_INTERPRET") == "1":
        use_chain_dot(monkeypatch)


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of SMALL with random weights, which takes a hundredth of SmolLM2's time."""
    from benchmarks.make_checkpoint import write_checkpoint

    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(SMALL))
    write_checkpoint(path, path)
    return path


@pytest.fixture(scope="session")
def small_logits(small_path: Path) -> Logits:
    """The logits that transformers' small model has after each of some token ids: [num_tokens, vocab_size] fp32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(small_path, dtype=torch.float32)

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return logits


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose steps take a millisecond and whose requests, CONTEXT tokens long, take minutes."""
    from tests.whole.test_failure import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes for the ranks of a node's groups, one for each GPU or two on the CPU."""
    import torch

    from tests.helpers.rank_processes import Ranks

    pool = Ranks(min(torch.cuda.device_count(), 4) or 2)
    yield pool
    pool.close()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    """A node's keeper of the memory of its ranks."""
    from parallel.persistent_memory import Keeper

    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's directory; `make setup` makes it."""
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2} is not there; run `make setup`")
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    """The default model's tokenizer."""
    from cluster.text.tokenizer import Tokenizer

    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_logits(smollm2_path: Path) -> Logits:
    """The logits that transformers' default model has after each of some token ids: [num_tokens, vocab_size] fp32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return logits


@pytest.fixture
def run(smollm2: Tokenizer, tmp_path: Path) -> Run:
    """run(scenario, server=..., **script): a scenario against a scripted engine, without a model or Ray."""
    from tests.helpers.scripted_engine import runner

    return runner(smollm2, tmp_path)


@pytest.fixture(scope="session")
def node_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of tests/node and what they need."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("Node.js and npm are not installed")
    folder = tmp_path_factory.mktemp("node") / "package"
    shutil.copytree(ROOT / "tests" / "node", folder)
    installed = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install the package: {installed.stderr[-300:]}")
    return folder


@dataclass(frozen=True)
class Endpoint:
    """The default model served at tensor_parallel_size 2 on the run's own Ray cluster."""

    url: str
    """Base URL, without /v1."""
    app_name: str
    model: str

    def status(self) -> dict[str, Any]:
        """The coordinator's figures; raises when its pages do not add up."""
        import ray

        [name] = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == "lockstep" and actor["name"].startswith(f"{self.app_name}:")
            if ":tp" not in actor["name"]
        ]
        return ray.get(ray.get_actor(name, namespace="lockstep").status.remote(), timeout=60)

    def wait_idle(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The figures once nothing runs, waits or holds a page that is not cached."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if not (status["num_running"] or status["num_waiting"] or status["num_owned_pages"]):
                return status
            assert time.monotonic() < deadline, f"the engine is not idle after {timeout_s:g} s: {status}"
            time.sleep(0.05)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this run's own: one node, no GPUs, enough logical CPUs for every test's groups."""
    import ray

    from cluster.serve.session import prepare_own_cluster, remove_own_files

    os.environ["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] = "5"  # a test's patience
    prepare_own_cluster()  # as `cluster serve` does
    os.environ["PYTHONPATH"] = str(ROOT)  # the workers' way to this checkout
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 1024 * 1024,
    )
    yield
    ray.shutdown()
    remove_own_files()


@pytest.fixture
def ipv6_loopback() -> str:
    """The address ::1; skips where this host has none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error.strerror}")
    return "::1"


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago."""
    return unused_port()


def unused_port() -> int:
    """What the fixture `free_port` gives."""
    # Below the ports that the system deals out: Ray's processes, which start meanwhile, are given those.
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def endpoint(ray_cluster: None, smollm2_path: Path) -> Iterator[Endpoint]:
    """configs/smollm2-135m.yaml behind Ray Serve, shared by every test that asks."""
    from ray import serve

    from cluster.serve.app import build_app
    from configs.load import load_app_config

    app = load_app_config(ROOT / "configs" / "smollm2-135m.yaml", ["kv_cache.num_tokens=16384"])
    port = unused_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(app.engine.model_dump()), name="shared", route_prefix="/")
    yield Endpoint(f"http://127.0.0.1:{port}", "shared", "smollm2-135m-instruct")
    serve.shutdown()


@pytest.fixture
def client(endpoint: Endpoint) -> openai.OpenAI:
    """OpenAI's client of `endpoint`."""
    import openai

    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0, timeout=300)
