"""The commands that look at a config or an endpoint: check, bench, status, schema, completion."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.commands.fit import fits, parse_gpu, sizes_to_show
from cluster.commands.status import status_lines
from configs.cards import CARDS
from configs.errors import ConfigError
from configs.json_schema import config_file_schema
from configs.layers import DenseMLP, LayerSpec
from configs.load import load_app_config
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from tests.cluster.test_cli import CONFIG, assert_refused, run
from tests.conftest import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SHAPES = ROOT / "benchmarks" / "models"
H200 = CARDS["h200"]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("qwen3-*_bf16_h200_*.json"))


def _figures(path: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


# ---- check


_WITH_TOKENS = [pytest.param(it, id=it.stem) for it in RESULTS if "kv_tokens" in _figures(it)]


@pytest.mark.parametrize("path", _WITH_TOKENS)
def test_the_tokens_foretold_are_those_that_a_real_start_found(path: Path) -> None:
    figures = _figures(path)
    model_path = ROOT / next(it for it in figures["overrides"] if it.startswith("model=")).removeprefix("model=")
    size = figures["tensor_parallel_size"]
    model = read_model_config(model_path)
    step = f"scheduler.max_num_batched_tokens={figures['engine']['scheduler']['max_num_batched_tokens']}"
    app = load_app_config(ROOT / "benchmarks" / "dummy.yaml", [f"model={model_path}", "device=cuda", step])
    config = resolve(app.engine, model, HostFacts(64, size, H200)).config
    [fit] = fits(model, config, [size], H200.memory_bytes)
    assert fit.kv_tokens == pytest.approx(figures["kv_tokens"], rel=0.01)


def test_a_model_too_large_for_a_gpu_fits_on_enough_of_them() -> None:
    result = run("check", "configs/llama-3.1-70b-tp4.yaml", "--set", f"model={SHAPES / 'llama-3.1-70b'}", "--set",
                 "load_format=dummy", "--gpu", "h100")  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("GPUs"))
    rows = {line.split()[0]: line for line in lines[begin + 1 : begin + 10]}
    assert "does not fit" in rows["1"]
    assert "does not fit" not in rows["4"]
    assert rows["4"].endswith("<"), "the size that the file asks for"


def test_check_divides_a_budget_between_pages_and_cached_states() -> None:
    path = SHAPES / "qwen3.5-9b"
    for name, value, tokens, states in (("memory_bytes", 4 << 30, 51_200, 50), ("num_tokens", 100_000, 100_000, 98)):
        result = run("check", "configs/qwen3-8b.yaml", "--set", f"model={path}", "--set", "load_format=dummy",
                     "--set", "device=cpu", "--set", "dtype=bfloat16", "--set", f"kv_cache.{name}={value}")  # fmt: skip
        assert result.returncode == 0, result.stderr
        lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
        assert f"    {tokens} tokens, " in lines["KV"]
        assert f"; in the KV pool {states}, one of " in lines["states"]
        assert lines["requests"] == f"requests   {tokens // 4096} of 4096 tokens fit at once"


def test_check_says_how_much_of_a_mixture_a_token_uses_and_leaves_room_for_its_experts() -> None:
    path = SHAPES / "qwen3-30b-a3b"
    result = run("check", "configs/qwen3-30b-a3b-tp2.yaml", "--set", f"model={path}", "--set", "load_format=dummy",
                 "--gpu", "h200")  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    [weights] = [line for line in lines if line.startswith("weights ")]
    assert weights.endswith(" 58260 MiB in all, 29130 MiB on the fullest rank; a token uses 6420 MiB of them")
    ranks = lines[next(i for i, line in enumerate(lines) if line.startswith("rank ")) + 1 :][:2]
    assert [line.split()[3] for line in ranks] == ["384", "384"]
    model = read_model_config(path)
    mlp = DenseMLP(hidden_size=2048, intermediate_size=128 * 768)
    dense = replace(model, layers=(LayerSpec(2048, model.layers[0].mixer, mlp),) * 48)
    app = load_app_config(ROOT / "configs" / "qwen3-30b-a3b.yaml")
    config = resolve(app.engine, model, HostFacts(64, 1, H200)).config
    tokens = [fits(it, config, [1], H200.memory_bytes)[0].kv_tokens for it in (model, dense)]
    routers, outputs = 48 * 128 * 2048 * 2, 5120 * 8 * (2 * 768 + 2048) * 2
    assert (tokens[1] - tokens[0]) * 98304 / 0.9 == pytest.approx(routers + outputs, rel=0.02)


def test_memory_is_an_amount_or_a_gpus_name() -> None:
    assert parse_gpu("80GiB") == (80 << 30, None)
    assert parse_gpu("80 GB") == (80 * 10**9, None)
    assert parse_gpu("H200") == (H200.memory_bytes, H200)
    for wrong in ("80", "many", "80 parsecs", "-1GiB"):
        with pytest.raises(ConfigError, match="is no amount of memory"):
            parse_gpu(wrong)


@pytest.mark.parametrize(
    ("gpu", "facts", "support", "decided"),
    [
        ("h200", "H200, compute capability 9.0, 227 KiB of shared memory; ", "ran, on H100 and H200", "-> fa3"),
        ("rtx-4090", "RTX 4090, compute capability 8.9, 99 KiB of shared memory, cannot", "compiles: ", "auto -> nccl"),
        ("80GiB", "not known, and backends depend on it", "--gpu", "the GPUs' is not known"),
    ],
)
def test_check_says_what_a_gpu_can_do_and_how_far_it_was_tested(
    gpu: str, facts: str, support: str, decided: str
) -> None:
    model = f"model={SHAPES / 'qwen3-8b'}"
    result = run("check", "configs/qwen3-8b.yaml", "--set", model, "--set", "load_format=dummy", "--gpu", gpu)
    assert result.returncode == 0, result.stderr
    [line] = [line for line in result.stdout.splitlines() if line.startswith("GPU  ")]
    assert facts in line
    assert support in line
    assert decided in result.stdout


def test_sizes_end_at_the_models_query_heads() -> None:
    model = read_model_config(SHAPES / "qwen3-0.6b")
    assert sizes_to_show(model, 1) == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert sizes_to_show(model, 9) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]


def test_every_setting_says_where_its_value_comes_from(smollm2_path: Path) -> None:
    result = run("check", CONFIG, "--settings", "--set", "server.max_n=4")
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")}
    names = (ROOT / "tests" / "settings.txt").read_text().split()
    assert set(names) <= set(lines)
    assert lines["server.max_n"].split()[1:] == ["4", "--set"]
    assert "configs/smollm2-135m.yaml:" in lines["tensor_parallel_size"]
    assert "decided: no GPU found" in lines["device"]
    assert lines["server.max_stop"].endswith("default")


def test_layers_shows_each_kind_of_layer_once_and_how_its_tensors_are_cut() -> None:
    model = SHAPES / "gemma-3-1b"
    result = run("check", str(ROOT / "configs/gemma-3-1b.yaml"), "--layers", "--set", "load_format=dummy",
                 "--set", f"model={model}", "--set", "tensor_parallel_size=3", COLUMNS="150")  # fmt: skip
    assert result.returncode == 0, result.stderr
    local, full = re.split(r"^layers ", result.stdout, flags=re.MULTILINE)[1:]
    assert local.splitlines()[0] == "0-4, 6-10, 12-16, 18-22, 24-25"
    assert full.splitlines()[0] == "5, 11, 17, 23"
    assert "window=512" in local
    assert "window=" not in full
    for kind in local, full:
        lines = {line.split()[0]: line.split(None, 1)[1] for line in kind.splitlines() if ".weight" in line}
        assert re.search(r"dimension 1: query heads x 256 +256-512", lines["self_attn.o_proj.weight"])
        assert lines["input_layernorm.weight"].rstrip().endswith("all of it")
        assert "512 elements per KV head" in kind


# ---- schema and completion


def test_the_committed_schema_is_that_of_the_settings() -> None:
    assert json.loads((ROOT / "configs" / "schema.json").read_text()) == config_file_schema(), "run `make generate`"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_follows_the_schema_and_names_it(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.Draft202012Validator(config_file_schema()).validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "args", [{}, {"model": "m", "tensor_parallel_size": 0}, {"model": "m", "tensor_paralel_size": 2}]
)
def test_the_schema_refuses_what_the_settings_refuse(args: dict[str, Any]) -> None:
    document = {"applications": [{"import_path": "cluster.app:build_app", "args": args}]}
    assert list(jsonschema.Draft202012Validator(config_file_schema()).iter_errors(document))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_command(shell: str) -> None:
    result = run("completion", shell)
    assert result.returncode == 0, result.stderr
    assert "_LOCKSTEP_COMPLETE" in result.stdout


# ---- endpoints

LIVE = {
    "time": 1000.4,
    "model": "m",
    "state": "running",
    "is_preparing": False,
    "running": 3,
    "waiting": 1,
    "prompt_tokens": 200,
    "prefix_hit_tokens": 50,
    "pages": {"owned": 10, "cached": 20, "evictable": 15, "free": 70},
    "ranks": [{"device": "cuda:0", "heartbeat_age_s": 0.04}, {"device": "cuda:0", "heartbeat_age_s": None}],
    "seconds": [
        {"time": time, "generated": 50, "prefilled": 0, "first_tokens": 1, "ttft": 0.02} for time in range(985, 1001)
    ],
    "steps": [{"duration": 0.004, "gap": 0.0, "rows": 3, "prefill": 0, "flops": 4e9, "read_bytes": 6e9}] * 4,
    "peak_flops": 10e12,
    "peak_bandwidth": 2e12,
}


def test_status_sums_up_whole_seconds() -> None:
    first, requests, speed, hardware, pages, *ranks = status_lines(LIVE, "http://x/v1", "1.2")
    assert first == "m at http://x/v1, Lockstep 1.2: running"
    first, *_ = status_lines({**LIVE, "is_preparing": True}, "http://x/v1", "1.2")
    assert first == "m at http://x/v1, Lockstep 1.2: running, with CUDA graphs left to capture"
    assert requests.split(maxsplit=1)[1] == "3 running, 1 waiting"
    assert speed.split(maxsplit=1)[1] == "50 tokens/s over 10 s, first token after 20 ms, 4.0 ms a step"
    assert "use 75% of the memory bandwidth (2,000 GB/s) and 10.0% of the FLOP/s (10.00 T)" in hardware
    assert "15 in use, 15 cached for reuse, 70 free of 100; 25% of" in pages
    assert [line.split(maxsplit=2)[2] for line in ranks] == ["cuda:0, heard 0.0 s ago", "cuda:0, on another node"]
    assert status_lines({**LIVE, "state": "sleeping"}, "http://x/v1", "1.2")[-1].endswith("cuda:0, asleep")


@pytest.mark.ray
def test_status_shows_a_serving_endpoint(endpoint: Any) -> None:
    result = run("status", endpoint.url)
    assert result.returncode == 0, result.stderr
    assert f"{endpoint.model} at {endpoint.url}/v1" in result.stdout
    assert "rank 0" in result.stdout
    assert "of the memory bandwidth" in result.stdout
    figures = json.loads(run("status", endpoint.url, "--json").stdout)
    assert figures["state"] == "running"
    assert figures["pages"]["free"] > 0


@pytest.mark.slow
@pytest.mark.ray
def test_bench_measures_an_endpoint(endpoint: Any, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = run("bench", endpoint.url, "--clients", "1,2", "--requests", "2", "--input-len", "8", "--output-len", "4",
                 "--json", str(out))  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "TTFT ms" in result.stdout
    figures = json.loads(out.read_text())
    assert [level["clients"] for level in figures["levels"]] == [1, 2]
    assert all(level["errors"] == 0 and level["output_tok_s"] > 0 for level in figures["levels"])


def test_endpoints_that_are_none_are_named(free_port: int) -> None:
    for command in ("bench", "status"):
        assert_refused(run(command, f"127.0.0.1:{free_port}"), "nothing answers", str(free_port))
    assert_refused(run("bench", "127.0.0.1:1", "--clients", "1,none"), "--clients=1,none")
    assert_refused(run("bench", "127.0.0.1:1", "--json", "/none/figures"), "--json=/none/figures cannot be written")


# ---- what a command costs


def test_who_multiplies_nothing_loads_no_torch(smollm2_path: Path) -> None:
    """The command, the app's building, the replica and the coordinator: it would take seconds from each one's start."""
    script = (
        "import sys\n"
        "import cluster.app, cluster.commands.serve, cluster.serve.ingress\n"
        "import cluster.engine.coordinator_actor, cluster.structured.guides, cluster.ranks.rank_actor\n"
        "from cluster.engine.preflight import check_checkpoint, check_tokenizer\n"
        "from cluster.serve.running_engine import describe\n"
        "from configs.load import parse_engine_config\n"
        "config = parse_engine_config({'model': sys.argv[1]})\n"
        "describe(config, gpus=False), check_checkpoint(config), check_tokenizer(config)\n"
        "print('loaded:', sorted({'torch', 'triton'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(smollm2_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["", "serve", "check", "generate", "chat", "bench", "status", "resize", "weights"])
def test_help_and_completion_load_nothing_heavy(command: str) -> None:
    """A shell completes within a blink: what takes seconds to import is imported when it runs."""
    heavy = ("torch", "ray", "numpy", "transformers", "httpx")
    script = (
        "import runpy, sys\n"
        f"sys.argv = {['cluster', *filter(None, [command]), '--help']!r}\n"
        "try:\n    runpy.run_module('cluster', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"print('loaded:', [name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stdout + done.stderr
