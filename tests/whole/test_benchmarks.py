"""The benchmarks: what they count and how they put it, and one small run of each on the default model."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from benchmarks import attention, engine, engine_report, first_token, make_tokenizer, step
from benchmarks.report import ROOT, Report, circumstances, table
from cluster.commands.bench import load_test
from cluster.commands.bench.stream_client import Sample, StreamReader
from cluster.commands.endpoint_client import EndpointClient
from configs.errors import ConfigError
from configs.load import load_app_config
from configs.rope import RopeConfig
from parallel.plan import ShardPlan
from tests.helpers.dense_model import dense_model

QWEN3_8B = dense_model(
    model_type="qwen3",
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    tie_word_embeddings=False,
    qk_norm=True,
)
SMALL = engine.Options(
    batches=(1, 2),
    prompt_tokens=8,
    new_tokens=(2, 26),
    requests=3,
    lengths=(4, 8),
    prefill=(2, 16),
    ttft=(4, 70),
    beside=(0, 1),
    rounds=1,
)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":  # a CPU install has none
            raise


# ---- the engine


def test_the_workload_is_that_of_the_published_figures() -> None:
    prompts, new_tokens = engine.workload(256, (100, 1024), 151936)
    assert sum(len(prompt) // 4 for prompt in prompts) == 142_827
    assert sum(new_tokens) == 133_966
    assert (prompts, new_tokens) == engine.workload(256, (100, 1024), 151936)


def test_a_decode_step_reads_weights_once_and_the_cache_of_every_row() -> None:
    whole = ShardPlan.create(QWEN3_8B, 1)
    [weights] = engine.step_bytes(whole, 2, 0, 0)
    assert weights / 1e9 == pytest.approx(15.14, abs=0.005)
    [with_rows] = engine.step_bytes(whole, 2, 64, 224)
    assert with_rows - weights == 64 * 224 * 147_456
    halves = engine.step_bytes(ShardPlan.create(QWEN3_8B, 2), 2, 64, 224)
    assert sum(halves) == pytest.approx(with_rows, rel=1e-3)
    assert max(halves) / min(halves) < 1.01


def test_a_tied_embedding_is_read_as_the_lm_head() -> None:
    tied = dataclasses.replace(QWEN3_8B, tie_word_embeddings=True)
    assert engine.step_bytes(ShardPlan.create(tied, 1), 2, 1, 1) == engine.step_bytes(
        ShardPlan.create(QWEN3_8B, 1), 2, 1, 1
    )


def test_every_backend_that_can_attends_to_the_same_step_and_autos_choice_is_marked() -> None:
    decode, extend = attention.Step(4, 2, 3, 1, 15), attention.Step(4, 2, 1, 5, 11)
    latent = [attention.Step(4, 1, 3, 1, 15, is_latent=True), attention.Step(4, 1, 1, 5, 11, is_latent=True)]
    for one in (decode, extend, *latent):
        times, auto, theirs = attention.measure(one, torch.device("cpu"), torch.float32)
        assert list(times) == ["cpu", "torch_native"]
        assert auto == next(iter(times))
        assert theirs == {}
        assert times[auto] > 0
    assert (decode.kv_bytes, extend.flops) == (4 * 3 * 16 * 2 * 128, 4 * (5 * 11 + 15) * 4 * 128)
    assert (latent[0].kv_bytes, latent[1].flops) == (2 * 3 * 16 * 576, 2 * (5 * 11 + 15) * 4 * (192 + 128))
    cells = attention.row_of(decode, {"fa3": 2.0, "triton": 1.6}, "fa3", {}, 100.0)
    assert cells == ["4/2  3 x 16", "2.0* (25 GB/s, 25 %)", "1.6 (31 GB/s, 31 %)", "-", "-", "-", "-", "1.25", "-"]
    cells = attention.row_of(decode, {"triton": 1.6, "flashinfer": 2.1}, "triton", {"paged": 2.0, "ragged": 3.0}, 50.0)
    assert cells[3:] == ["2.1 (23 GB/s, 47 %)", "-", "-", "-", "1.00", "paged 2.0 (1.05); ragged 3.0 (0.70)"]
    cells = attention.row_of(decode, {"triton": 2.0, "exact 512": 2.5}, "triton", {}, 50.0, [256, 512])
    assert cells[-4:] == ["-", "2.5 (1.25)", "1.00", "-"]
    every = list(attention.steps({"decode", "extend"}, 1))
    assert len(every) == len(set(every))
    shards = attention.steps({"decode"}, 1, of_heads=[(8, 2)])
    assert {(one.num_q_heads, one.num_kv_heads) for one in shards} == {(8, 2)}
    assert {one.new for one in attention.steps({"extend"}, 1)} == set(attention.NEW)


def test_a_faster_figure_than_the_peers_is_above_one_in_every_unit() -> None:
    peer = {"name": "theirs", "hardware": "2 GPUs", "method": "in process", "decode_ms": {"1": 3.74}}
    peer["prefill_tok_s"] = 72_213
    figures = {
        "decode": [
            {"batch": 1, "ms": 1.87, "tok_s": 534.8, "rounds_ms": [1.87], "floor_ms": 1.76, "of_floor": 0.941},
            {"batch": 3, "ms": 2.0, "tok_s": 1500.0, "rounds_ms": [2.0]},
            {"batch": 4, "skipped": "no room"},
        ],
        "prefill": {"prompts": 16, "tokens": 2048, "tok_s": 144_426.0, "rounds_tok_s": [144_426.0]},
        "ttft": [
            {"tokens": 2048, "beside": 0, "ms": 31.04, "most_ms": 40.0},
            {"tokens": 9999, "beside": 0, "skipped": "too long"},
            {"tokens": 512, "beside": 60, "ms": 12.3, "most_ms": 15.0},
        ],
        "peer": peer,
    }
    text = engine_report.render(figures)
    assert text.splitlines()[2].split() == ["1", "1.870", "535", "1.760", "94", "%", "3.74", "2.00"]
    assert text.splitlines()[3].split() == ["3", "2.000", "1,500", "-", "-", "-", "-"]
    assert "batch 4: skipped, no room" in text
    assert "72,213, speed / its 2.00" in text
    assert "idle engine: 2,048 tokens 31.0 ms; 9,999 tokens skipped, too long\n" in text
    assert "beside 60 that decode: 512 tokens 12.3 ms\n" in text


def test_peers_are_only_compared_at_the_same_number_of_ranks() -> None:
    assert engine_report.find_peer("Qwen3-8B", 2)
    assert engine_report.find_peer("Qwen3-8B", 3) is None
    assert engine_report.find_peer("SmolLM2-135M", 1) is None


@pytest.mark.parametrize(("change", "message"), [({"new_tokens": (8, 8)}, "new-tokens"), ({"skip": ("floo",)}, "floo")])
def test_options_that_measure_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.Options(**change)


def test_a_filled_tokenizer_has_text_for_every_id_and_encodes_as_before(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokens = {"a": 0, "b": 1, "<s>": 2, "ab": 3}
    model = {"type": "BPE", "vocab": tokens, "merges": [["a", "b"]]}
    added = {"id": 2, "content": "<s>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [added | flags], "decoder": decoder, "model": model}))
    make_tokenizer.fill(path, 6)
    filled = tokenizers.Tokenizer.from_file(str(path))
    assert filled.get_vocab_size() == 6
    assert filled.encode("abba").ids == [3, 1, 0]
    assert filled.decode([0, 4, 5]) == "a word4 word5"


def test_figures_are_on_disk_as_soon_as_they_are_known(tmp_path: Path) -> None:
    report = Report(tmp_path / "results" / "run.json", benchmark="x")
    report.add(decode=[{"batch": 1, "ms": 2.0}])
    assert json.loads((tmp_path / "results" / "run.json").read_text()) == {
        "benchmark": "x",
        "decode": [{"batch": 1, "ms": 2.0}],
    }


def test_circumstances_name_commit_machine_and_versions() -> None:
    found = circumstances("abc1234")
    assert found["commit"] == "abc1234"
    assert found["hardware"]["cores"] >= 1
    assert {"python", "torch", "ray"} <= set(found["versions"])
    assert table(["a", "bb"], [["100", "2"]]) == "  a  bb\n100   2"


@pytest.mark.slow
@pytest.mark.ray
def test_one_run_measures_every_part_of_the_engine(
    ray_cluster: None, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.bandwidth.measure_apart", lambda device: 10.0)
    monkeypatch.setattr(engine, "_NUM_TTFT_RUNS", 3)  # the one beside them has 56 new tokens
    config = load_app_config(
        ROOT / "configs" / "smollm2-135m.yaml",
        [
            f"model={smollm2_path}",
            "tensor_parallel_size=1",
            "parallel.threads_per_rank=1",
            "kv_cache.num_tokens=96",
            "max_model_len=64",
        ],
    ).engine
    report = Report(tmp_path / "run.json")
    for options, most in ((engine.Options(batches=(33,)), 33), (engine.Options(batches=(1,)), 61)):
        with pytest.raises(ConfigError, match=f"max_num_seqs=32 is less than the {most} requests"):
            asyncio.run(engine.benchmark(config, options, report))
    options = engine.Options(**{**vars(SMALL), "batches": (1, 2, 8)})
    asyncio.run(engine.benchmark(config, options, report))
    figures = json.loads((tmp_path / "run.json").read_text())
    assert [row["batch"] for row in figures["decode"]] == [1, 2, 8]
    # 135 million fp32 weights at 10 GB/s, and some KV.
    assert figures["decode"][0]["floor_ms"] == pytest.approx(54, abs=1)
    assert figures["decode"][1]["of_floor"] > 0
    assert "384 tokens exceed the KV pool's 96" in figures["decode"][2]["skipped"]
    assert figures["workload"]["output_tokens"] == sum(engine.workload(3, (4, 8), 49152)[1])
    longest = max(engine.workload(3, (4, 8), 49152)[1])
    assert figures["workload"]["num_steps"] >= longest
    assert figures["prefill"]["tok_s"] > 0
    alone, too_long, crowded, _ = figures["ttft"]
    assert 0 < alone["ms"] <= alone["most_ms"]
    assert "exceed max_model_len=64" in too_long["skipped"]
    assert crowded["beside"] == 1
    assert crowded.get("ms", 0) > 0 or "the other requests reached" in crowded["skipped"]
    assert figures["status"]["num_running"] == 0
    assert "of floor" in engine_report.render(figures)


# ---- first tokens


def test_shorter_steps_bring_the_first_tokens_of_a_burst_sooner_at_no_cost_in_output() -> None:
    device = first_token.Device(4.4e-3, 23e-6, 23e-6, overlaps=True, way_s=0.006, arrival_s=0.0005)
    means, gaps, seconds = [], [], []
    for tokens in (8192, 2048):
        limits = first_token.limits_of(tokens, max_model_len=1024)
        times, _ = first_token.simulate(limits, device, clients=16, waves=2, lengths=(512, 32))
        assert all(0 <= one.sent < one.first < one.last and one.longest_gap > 0 for one in times)
        means.append(statistics.mean(one.first - one.sent for one in times))
        gaps.append(max(one.longest_gap for one in times))
        seconds.append(max(one.last for one in times))
    assert 17 / 2 * 512 * 23e-6 < means[1] < 0.8 * means[0], "prompts one after the other come first"
    assert gaps[1] < 0.4 * gaps[0]
    assert seconds[1] < 1.02 * seconds[0]


# ---- online


@pytest.mark.slow
def test_a_step_is_measured_without_ray_and_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": 512}
    model = json.loads((ROOT / "benchmarks/models/qwen3-0.6b/config.json").read_text()) | small
    (tmp_path / "config.json").write_text(json.dumps(model))
    sets = [f"model={tmp_path}", "device=cpu", "tensor_parallel_size=2", "kv_cache.page_size=4"]
    arguments = ["--config", "benchmarks/dummy.yaml", *(part for item in sets for part in ("--set", item))]
    files = {name: tmp_path / f"{name}.json" for name in ("trace", "json")}
    arguments += ["--rows", "3", "--steps", "40", "--profile", *(f"--{name}={path}" for name, path in files.items())]
    monkeypatch.setattr("sys.argv", ["step", *arguments])
    step.main()
    report = json.loads(files["json"].read_text())
    assert report["tensor_parallel_size"] == 2
    assert report["rows"] == 3
    assert 0 < report["step_ms"] < 1e4
    assert "transformers_ms" not in report  # there are no weights that it could load
    assert "aten::index_select" in capfd.readouterr().out
    assert json.loads(files["trace"].read_text())["traceEvents"]


def completion_events(texts: list[str], usage: dict[str, Any]) -> bytes:
    """A streamed completion as an OpenAI server writes it."""
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": text}], "usage": None} for text in texts]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": None})
    events.append({"choices": [], "usage": usage})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_stream_is_read_the_same_however_it_is_cut(size: int, line_end: bytes) -> None:
    stream = completion_events(["a", "", "b"], USAGE).replace(b"\n", line_end)
    sample = Sample(sent=0.0)
    reader = StreamReader(sample)
    for i in range(0, len(stream), size):
        reader.feed(stream[i : i + size], now=1.0 + i)
    assert (sample.input_tokens, sample.output_tokens, sample.cached_tokens) == (7, 3, 2)
    assert len(sample.gaps) == 1, "between the two pieces that carry text"
    assert sample.first is not None
    assert 1.0 <= sample.first <= sample.last
    assert sample.error is None


def test_an_error_in_the_stream_is_the_requests_error() -> None:
    sample = Sample(sent=0.0)
    StreamReader(sample).feed(b'data: {"error": {"message": "the engine failed"}}\n\n', now=1.0)
    assert sample.error is not None
    assert "the engine failed" in sample.error


def test_failed_requests_are_counted_and_in_no_other_figure() -> None:
    good = [
        Sample(sent=t, first=t + 0.5, last=t + 2.5, gaps=[0.5] * 4, output_tokens=5, input_tokens=8) for t in (0, 1)
    ]
    failed = Sample(sent=0.0, first=90.0, last=100.0, output_tokens=1000, error="HTTP 503")
    summary = load_test.summarise([*good, failed])
    assert summary["errors"] == 1
    assert summary["first_error"] == "HTTP 503"
    assert summary["ttft_ms"] == {"median": 500.0, "p99": 500.0}
    assert summary["tpot_ms"] == {"median": 500.0, "p99": 500.0}
    assert summary["output_tok_s"] == pytest.approx(10 / 3.5, abs=0.05)
    assert load_test.summarise([failed]) == {"requests": 1, "errors": 1, "first_error": "HTTP 503"}


@pytest.fixture
def load() -> Callable[..., load_test.Traffic]:
    def make(url: str = "", model: str = "m", *, as_ids: bool = True) -> load_test.Traffic:
        return load_test.Traffic(url=url, model=model, input_tokens=6, output_tokens=4, as_ids=as_ids, seed="0")

    return make


def test_no_two_prompts_of_a_run_are_alike(load: Callable[..., load_test.Traffic]) -> None:
    bodies = [*load().bodies("16", 32), *load().bodies("64", 32)]
    assert len({tuple(json.loads(body)["prompt"]) for body in bodies}) == 64
    assert len(json.loads(load(as_ids=False).bodies("16", 1)[0])["prompt"].split()) == 6


@pytest.mark.slow
@pytest.mark.ray
def test_clients_measure_the_endpoint(endpoint: Any, load: Callable[..., load_test.Traffic]) -> None:
    url = f"{endpoint.url}/v1"
    assert EndpointClient(url).first_model() == endpoint.model
    assert load_test.takes_ids(EndpointClient(url), endpoint.model)
    with ThreadPoolExecutor(1) as lane:
        level = load_test.measure_level([lane], load(url, endpoint.model), "3", clients=3, requests=5)
        refused = load_test.measure_level([lane], load(url, "no-such-model"), "1", clients=1, requests=2)
    assert (level["requests"], level["errors"]) == (5, 0)
    assert level["mean_input_tokens"] == 6
    assert level["ttft_ms"]["median"] > 0
    assert level["tpot_ms"]["median"] > 0
    assert level["output_tok_s"] > 0
    assert refused["errors"] == 2
    assert "404" in refused["first_error"]
