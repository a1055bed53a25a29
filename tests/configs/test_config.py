"""Settings: the config file, overrides, errors a person can act on, and every auto value decided once."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.cards import CARDS
from configs.checkpoint import is_local, model_name, resolve_model_path, resolve_tokenizer_path
from configs.errors import CheckpointError, ConfigError
from configs.kv_pages import PageBytes, PoolRule, WindowPool, cut_max_model_len, num_kv_pages, pool_bytes
from configs.layers import Axis
from configs.load import all_settings, load_app_config, parse_engine_config
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.resolve import HostFacts, ResolvedConfig, resolve
from configs.schema import EngineConfig, GenerationDefaults, KVCacheConfig
from parallel.plan import ShardPlan
from tests.helpers.dense_model import dense_model

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
LAPTOP = HostFacts(num_cores=8, num_gpus=0)
GPU_NODE = HostFacts(num_cores=64, num_gpus=8, card=CARDS["h200"])

FILE = """\
http_options:
  port: 8123
applications:
  - name: tiny
    import_path: cluster.app:build_app
    args:
      model: /models/tiny
      kv_cache:
        page_size: 32
    runtime_env: {env_vars: {A: "1"}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def _model(**changes: Any) -> ModelConfig:
    values = {"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 2048, "dtype": "bfloat16"}
    return dense_model(**{**values, **changes})


def _resolved(host: HostFacts = LAPTOP, **args: Any) -> ResolvedConfig:
    return resolve(parse_engine_config({"model": "owner/tiny", **args}), _model(), host)


# ---- the list of settings


def test_settings_are_those_of_the_committed_list() -> None:
    committed = (ROOT / "tests" / "settings.txt").read_text().split()
    assert all_settings() == committed, "a setting came or went: change tests/settings.txt with it"
    # The last three: host_names, since a server without keys answers its own names only, special_tokens_in_text, for
    # clients whose texts hold special tokens on purpose, and images, since agents paste them into their sessions.
    assert len(committed) <= 64


def test_every_setting_says_what_it_does() -> None:
    def check(section: Any, prefix: str) -> None:
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                check(field.annotation, f"{prefix}{name}.")
            else:
                assert field.description, f"{prefix}{name} has no docstring"

    check(EngineConfig, "")


def test_importing_configs_and_plan_loads_neither_torch_nor_ray_nor_transformers() -> None:
    code = (
        "import sys, configs.schema, configs.load, configs.resolve, configs.checkpoint, parallel.plan\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


# ---- the file


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_load_and_are_valid_for_ray_serve(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    app = load_app_config(path)
    assert app.route_prefix == "/"
    ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    ServeDeploySchema.model_validate(dict(app.document))


@pytest.mark.parametrize("path", [path for path in SHIPPED if "smollm2" in path.name], ids=lambda path: path.name)
def test_the_default_model_is_sampled_as_its_authors_recommend(path: Path) -> None:
    given = load_app_config(path).engine.server.generation_config
    assert given == GenerationDefaults(temperature=0.2, top_p=0.9)


def test_the_quickstart_file_says_what_it_promises() -> None:
    app = load_app_config(ROOT / "configs" / "smollm2-135m.yaml")
    assert (app.name, app.host, app.port) == ("smollm2-135m", "127.0.0.1", 8000)
    engine = app.engine
    assert (engine.tensor_parallel_size, engine.dtype, engine.served_model_name) == (
        2,
        "float32",
        "smollm2-135m-instruct",
    )
    assert (engine.scheduler.max_num_seqs, engine.kv_cache.num_tokens) == (32, 32768)


def test_a_file_becomes_an_app_config_and_keeps_what_is_not_ours(file: Path) -> None:
    app = load_app_config(file)
    assert (app.name, app.route_prefix, app.host, app.port) == ("tiny", "/", "127.0.0.1", 8123)
    assert app.engine == EngineConfig(model="/models/tiny", kv_cache=KVCacheConfig(page_size=32))
    assert app.served_model_name == "tiny"
    assert app.document["applications"][0]["runtime_env"] == {"env_vars": {"A": "1"}}


def test_overrides_change_args_and_the_document_that_is_passed_on(file: Path) -> None:
    app = load_app_config(file, ["tensor-parallel-size=3", "kv_cache.num_tokens=4096", "http_options.port=9000"])
    assert app.engine.tensor_parallel_size == 3
    assert app.engine.kv_cache == KVCacheConfig(page_size=32, num_tokens=4096)
    assert app.port == 9000
    assert app.document["applications"][0]["args"] == {
        "model": "/models/tiny",
        "kv_cache": {"page_size": 32, "num_tokens": 4096},
        "tensor_parallel_size": 3,
    }
    assert load_app_config(file, ["kv-cache.page-size=null", "kv_cache.page_size=8"]).engine.kv_cache.page_size == 8


def test_the_arguments_of_build_app_may_use_dashes_and_survive_a_round_trip() -> None:
    config = parse_engine_config({"model": "a/b", "tensor-parallel-size": 2, "kv-cache": {"page-size": 8}})
    assert (config.tensor_parallel_size, config.kv_cache.page_size) == (2, 8)
    assert parse_engine_config(config.model_dump(mode="python")) == config
    assert parse_engine_config(config.model_dump(mode="json")) == config


# ---- mistakes


def _fails(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_app_config(file, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("tensor_parallel=2", "tensor_parallel_size"),
        ("kv_cache.pagesize=2", "kv_cache.page_size"),
        ("page_size=2", "kv_cache.page_size"),
        ("kv_cahce.page_size=2", "kv_cache"),
        ("max_num_seq=2", "scheduler.max_num_seqs"),
        ("server.max_num_seqs=2", "scheduler.max_num_seqs"),
    ],
)
def test_an_unknown_setting_names_the_nearest_one(file: Path, override: str, nearest: str) -> None:
    message = _fails(file, override)
    assert message.startswith("unknown setting ")
    assert message.endswith(f"did you mean {nearest}?")


def test_an_unknown_setting_like_no_other_names_none(file: Path) -> None:
    assert _fails(file, "qqq=2") == "unknown setting qqq"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tensor_parallel_size=two", "tensor_parallel_size='two': must be a valid integer"),
        ("tensor_parallel_size=true", "tensor_parallel_size=True: must be a valid integer"),
        ("tensor_parallel_size=0", "tensor_parallel_size=0: must be greater than or equal to 1"),
        ("kv_cache.memory_fraction=2", "kv_cache.memory_fraction=2: must be less than or equal to 1"),
        ("dtype=int8", "dtype='int8': must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("kv_cache=7", "kv_cache=7: must be a mapping of settings"),
        ("model=null", "model=None: must be a valid string"),
    ],
)
def test_a_wrong_value_names_key_value_and_rule(file: Path, override: str, message: str) -> None:
    assert _fails(file, override) == message


def test_problems_of_the_file_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE.replace("page_size: 32", "page_size: 0").replace("model: /models/tiny", "modle: x"))
    lines = _fails(path).split("\n")
    assert lines == [
        "model is missing; it has no default",
        f"{path}:9: kv_cache.page_size=0: must be greater than or equal to 1",
        f"{path}:7: unknown setting modle; did you mean model?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is no YAML"),
        ("", "holds no mapping"),
        ("applications: []", "must be a list of one application"),
        ("applications: [{import_path: other:app}]", "it must be cluster.app:build_app"),
        ("applications: [{import_path: 'cluster.app:build_app', args: [1]}]", "args is a list"),
        (FILE + "http_options: {port: 1}\n", ":11: http_options is given twice, first on line 1"),
        (FILE.replace("8123", "eighty"), "http_options.port='eighty': must be an integer from 1 to 65535"),
        (FILE.replace("8123", "0"), "http_options.port=0: must be an integer from 1 to 65535"),
        (FILE.replace("name: tiny", "route_prefix: v1"), "route_prefix='v1' must begin with /"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert message in _fails(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no.yaml cannot be read: No such file" in _fails(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tensor_parallel_size", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("kv_cache..page_size=3", "is not of the form key=value"),
        ("seed=[", "is no YAML"),
        ("model.name=x", "model='/models/tiny' is a value and has no settings inside"),
        ("http_options.root=x", "http_options.host and http_options.port can be set"),
        ("http_options.host=::", 'must be an address or a name; put "::" in quotes'),
    ],
)
def test_a_malformed_override_is_refused_with_the_reason(file: Path, override: str, message: str) -> None:
    assert message in _fails(file, override)


# ---- auto values


def _decisions(resolved: ResolvedConfig) -> list[str]:
    return [str(decision) for decision in resolved.decisions]


def test_every_auto_value_is_decided_once_and_says_why() -> None:
    resolved = _resolved(tensor_parallel_size=4, kv_cache={"num_tokens": 1024})
    assert _decisions(resolved) == [
        "device: auto -> cpu (no GPU found)",
        "dtype: auto -> float32 (cpu)",
        "numerics: auto -> exact (cpu)",
        "attention.prefill_backend: auto -> cpu (cpu, float32)",
        "attention.decode_backend: auto -> cpu (cpu, float32)",
        "served_model_name: auto -> owner/tiny (from model)",
        "parallel.all_reduce: auto -> shared_memory (cpu, ranks of one node)",
        "parallel.threads_per_rank: auto -> 2 (8 cores, 4 ranks a node)",
        "parallel.spin_us: auto -> 1000 (8 cores, 4 ranks a node)",
        "placement.cpus_per_rank: auto -> 0.1 (cpu)",
        "placement.cpus_for_engine: auto -> 0.1 (cpu)",
        "recovery.warm_spares: auto -> 0 (cpu)",
        "scheduler.max_num_seqs: auto -> 64 (cpu)",
        "scheduler.max_num_batched_tokens: auto -> 512 (cpu)",
        "scheduler.prefill_chunk_size: auto -> 512 (the step's tokens)",
        "max_model_len: auto -> 1024 (what kv_cache.num_tokens holds)",
    ]
    config = resolved.config
    assert (config.device, config.dtype, config.parallel.threads_per_rank, config.max_model_len) == (
        "cpu",
        "float32",
        2,
        1024,
    )
    assert resolve(config, _model(), LAPTOP).decisions == ()


def test_gpus_bring_the_checkpoints_dtype_fa3_symmetric_memory_and_large_steps() -> None:
    config = _resolved(GPU_NODE, tensor_parallel_size=4).config
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert (config.attention.prefill_backend, config.attention.decode_backend) == ("fa3", "triton")
    assert config.parallel.all_reduce == "symmetric_memory"
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
    assert (config.scheduler.prefill_chunk_size, config.kv_cache.memory_fraction) == (8192, 0.9)
    assert (config.placement.cpus_per_rank, config.placement.cpus_for_engine) == (1.0, 1.0)
    assert config.recovery.warm_spares == 1
    assert config.max_model_len is None, "known once the KV pool is"


def test_float32_on_gpus_attends_by_triton_alone() -> None:
    attention = _resolved(GPU_NODE, dtype="float32").config.attention
    assert (attention.prefill_backend, attention.decode_backend) == ("triton", "triton")
    with pytest.raises(ConfigError, match=r"backend=fa3 serves bfloat16 and float16, .*float32; .*auto or triton or"):
        _resolved(GPU_NODE, dtype="float32", attention={"backend": "fa3"})


def test_keys_and_values_may_be_of_another_type_than_the_activations() -> None:
    in_fp8 = {"kv_cache": {"dtype": "fp8_e4m3"}}
    config = _resolved(GPU_NODE, **in_fp8).config
    assert (config.dtype, config.kv_dtype, config.attention.prefill_backend) == ("bfloat16", "fp8_e4m3", "triton")
    assert _resolved(GPU_NODE).config.kv_dtype == "bfloat16"
    assert _resolved(**in_fp8).config.attention.decode_backend == "cpu"
    with pytest.raises(
        ConfigError, match=r"fa3 has no FP8 KV cache \(it would round queries .*auto or triton or torch"
    ):
        _resolved(GPU_NODE, attention={"backend": "fa3"}, **in_fp8)
    with pytest.raises(ConfigError, match=r"kv_cache\.dtype.*'auto' or 'fp8_e4m3'"):
        _resolved(kv_cache={"dtype": "fp8_e5m2"})


def test_more_logprobs_than_the_model_has_tokens_are_refused() -> None:
    assert _resolved(server={"max_logprobs": 256}).config.server.max_logprobs == 256
    with pytest.raises(ConfigError, match=r"server\.max_logprobs=257 exceeds the model's vocab_size=256"):
        _resolved(server={"max_logprobs": 257})


def test_what_is_set_is_not_decided() -> None:
    given = {"device": "cpu", "dtype": "bfloat16", "served_model_name": "mine", "parallel": {"spin_us": 0}}
    resolved = _resolved(GPU_NODE, **given)
    assert {decision.key for decision in resolved.decisions}.isdisjoint([*given, "parallel.spin_us"])
    assert (resolved.config.device, resolved.config.dtype) == ("cpu", "bfloat16")


def test_ranks_without_a_core_of_their_own_do_not_spin() -> None:
    for host, replicas, expected in (
        (HostFacts(num_cores=1, num_gpus=0), 1, (1, 0)),
        (HostFacts(num_cores=2, num_gpus=0), 1, (1, 1000)),
        (HostFacts(num_cores=3, num_gpus=0), 2, (1, 0)),
    ):
        parallel = _resolved(host, tensor_parallel_size=2, num_replicas=replicas).config.parallel
        assert (parallel.threads_per_rank, parallel.spin_us) == expected, (host, replicas)


def test_ranks_that_may_be_spread_over_nodes_use_gloo_or_nccl() -> None:
    assert _resolved(placement={"strategy": "PACK"}).config.parallel.all_reduce == "gloo"
    assert _resolved(GPU_NODE, placement={"strategy": "PACK"}).config.parallel.all_reduce == "nccl"


def test_the_requests_of_a_step_fit_its_tokens_whichever_is_set() -> None:
    few = _resolved(GPU_NODE, scheduler={"max_num_batched_tokens": 100}).config.scheduler
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (100, 100)
    many = _resolved(GPU_NODE, scheduler={"max_num_seqs": 4096}).config.scheduler
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (4096, 8192)


def test_a_step_on_gpus_has_fewer_tokens_of_a_larger_model() -> None:
    def tokens(size: int, num_hidden_layers: int) -> int | None:
        shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        model = _model(**shape, intermediate_size=12288, num_hidden_layers=num_hidden_layers)
        config = parse_engine_config({"model": "owner/qwen3-8b", "tensor_parallel_size": size})
        return resolve(config, model, GPU_NODE).config.scheduler.max_num_batched_tokens

    assert [tokens(size, 36) for size in (1, 2, 3, 4, 8)] == [2048, 4096, 6144, 8192, 8192]
    assert [tokens(1, layers) for layers in (9, 18, 80)] == [8192, 4096, 2048]


def test_a_prefill_chunk_above_the_token_budget_is_cut_to_it() -> None:
    resolved = _resolved(scheduler={"max_num_batched_tokens": 128, "prefill_chunk_size": 512})
    assert resolved.config.scheduler.prefill_chunk_size == 128
    assert "scheduler.prefill_chunk_size: 512 -> 128 (scheduler.max_num_batched_tokens)" in _decisions(resolved)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 exceeds num_attention_heads=4.*choose 1 to 4"),
        ({"kv_cache": {"page_size": 24}}, "page_size=24 is not a power of two; choose 16 or 32"),
        (
            {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 64}},
            "max_num_batched_tokens=8 is less than .*max_num_seqs=64",
        ),
        ({"device": "cuda"}, "device=cuda, but no GPU was found"),
        ({"parallel": {"all_reduce": "nccl"}}, "all_reduce=nccl does not work on device=cpu; choose auto or"),
        ({"attention": {"backend": "fa3"}}, r"attention\.backend=fa3 needs GPUs; choose auto or cpu or torch_native"),
        ({"attention": {"decode_backend": "triton"}}, r"attention\.decode_backend=triton needs GPUs"),
        ({"device": "cpu", "parallel": {"all_reduce": "nccl"}}, "all_reduce=nccl needs GPUs, but device=cpu"),
        (
            {"parallel": {"all_reduce": "shared_memory"}, "placement": {"strategy": "SPREAD"}},
            "all_reduce=shared_memory needs all ranks on one node, but placement.strategy=SPREAD",
        ),
        (
            {"speculation": {"method": "eagle3"}},
            r"speculation\.method=eagle3 and speculation\.model=None: eagle3 needs the directory",
        ),
        (
            {
                "speculation": {"method": "ngram", "num_speculative_tokens": 4},
                "scheduler": {"max_num_batched_tokens": 4},
            },
            r"num_speculative_tokens=4 and the token before them do not fit .*max_num_batched_tokens=4; choose fewer",
        ),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's context of 2048 tokens"),
        (
            {"max_model_len": 2048, "kv_cache": {"num_tokens": 1000}},
            "max_model_len=2048 exceeds the 1008 tokens that the KV pool holds; choose at most 1008",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_or_the_model_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolved(**args)


# ---- the KV pool


def test_the_pool_is_the_same_on_every_rank_and_fits_the_fullest() -> None:
    page, half = PageBytes(4096), PageBytes(1024, 1024)
    # A third of 30 pages, and of 60 pages of half the size; one page of each is padding.
    assert num_kv_pages(KVCacheConfig(memory_fraction=1 / 3), [page, half], [31 * 4096, 31 * 4096]) == 9
    assert num_kv_pages(KVCacheConfig(memory_bytes=10 * 4096), [page, half], [1, 1]) == 9
    assert num_kv_pages(KVCacheConfig(num_tokens=100), [page], [8 * 4096]) == 7


def test_a_plan_counts_the_bytes_of_layers_with_a_window_apart() -> None:
    plan = ShardPlan.create(_model(num_hidden_layers=4, layer_windows=(512, 512, None, 512)), 3)
    for rank in range(3):
        full, windowed, _ = plan.kv_page_bytes(rank, EngineConfig(model="a/b", dtype="bfloat16"))
        assert full + windowed == plan.kv_elements_per_token(rank) * 16 * 2
        per_layer = [layer[rank][Axis.KV_HEADS].size * 2 * 16 * 16 * 2 for layer in plan.layers]
        assert (full, windowed) == (per_layer[2], sum(per_layer) - per_layer[2])


def _window_pool(*windows: int | None, **args: Any) -> WindowPool | None:
    args = {"model": "a/b", "max_model_len": 8192, "scheduler": {"max_num_batched_tokens": 512}, **args}
    config = EngineConfig.model_validate(args)
    return WindowPool.of(config, _model(num_hidden_layers=len(windows), layer_windows=windows))


def test_windowed_layers_get_a_pool_where_it_saves_enough() -> None:
    pool = _window_pool(None, 512, 128)
    assert pool == WindowPool(window=512, share=Fraction(512 + 32, 4096), extra=32 + 32 + 1)
    assert pool.num_pages(1000) == 133 + 65
    assert pool.num_pages(60) == 60
    assert _window_pool(None, None) is None
    assert _window_pool(None, 512, max_model_len=700) is None
    assert _window_pool(4096, 4096) is None
    assert _window_pool(None, 512, max_model_len=1024).share == Fraction(544, 1024)  # type: ignore[union-attr]
    assert _window_pool(None, 512, kv_cache={"typical_tokens": 2048}).share == Fraction(544, 2048)  # type: ignore[union-attr]
    assert _window_pool(None, 512, kv_cache={"typical_tokens": 600}) is None


def test_five_windowed_layers_of_six_save_three_fifths_of_a_pool_of_8k_tokens() -> None:
    # Gemma 3's pattern.
    pool, page = _window_pool(*[512] * 5, None), PageBytes(full=1000, windowed=5000)
    assert pool is not None
    rule, plain = PoolRule(pool), PoolRule()
    assert pool_bytes(8192 // 16, page, rule) <= 0.4 * pool_bytes(8192 // 16, page, plain)
    assert pool_bytes(10**6 // 16, page, rule) <= 0.29 * pool_bytes(10**6 // 16, page, plain)


@pytest.mark.parametrize("page", [PageBytes(1000, 5000), PageBytes(0, 6000, 9000), PageBytes(3000, 1, 100)])
@pytest.mark.parametrize("budget", [30_000, 600_000, 654_321, 98_765_432_101])
def test_a_budget_is_used_to_the_last_page(page: PageBytes, budget: int) -> None:
    rule = PoolRule(_window_pool(512, None), pages_per_state=64)
    num_pages = num_kv_pages(KVCacheConfig(memory_bytes=budget), [page], [1], rule)
    assert pool_bytes(num_pages, page, rule) <= budget < pool_bytes(num_pages + 8, page, rule)
    assert num_kv_pages(KVCacheConfig(memory_bytes=budget), [page, PageBytes(1, 1)], [1, 1], rule) == num_pages
    with pytest.raises(ConfigError, match=f"choose at most {num_pages * 16} "):
        num_kv_pages(KVCacheConfig(num_tokens=2 * num_pages * 16 + 160), [page], [budget], rule)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_pages_and_cached_states_share_one_budget_after_the_states_of_running_requests(tp_size: int) -> None:
    """Neither starves, and the fullest rank decides for all."""
    model = read_model_config(ROOT / "benchmarks" / "models" / "qwen3.5-9b")
    config = EngineConfig(model="a/b", dtype="bfloat16")
    plan, rule = ShardPlan.create(model, tp_size), PoolRule.of(config, model)
    pages = [plan.kv_page_bytes(rank, config) for rank in range(tp_size)]
    budgets = [24 << 30, 20 << 30, 22 << 30][:tp_size]
    num_pages = num_kv_pages(KVCacheConfig(memory_fraction=1.0), pages, budgets, rule)
    num_states = rule.num_states(num_pages)
    assert num_states == -(-num_pages * 16 // 1024)
    for page, budget in zip(pages, budgets, strict=True):
        assert pool_bytes(num_pages, page, rule) <= budget
        assert num_states * page.state > budget / 4
        assert num_pages * page.full > budget / 4
    full = [pool_bytes(num_pages + 64, page, rule) for page in pages]
    assert any(taken > budget for taken, budget in zip(full, budgets, strict=True))
    without = config.model_copy(update={"kv_cache": KVCacheConfig(enable_prefix_caching=False)})
    assert not PoolRule.of(without, model).num_states(num_pages)


def test_a_pool_without_room_says_how_much_there_is() -> None:
    with pytest.raises(ConfigError, match=r"memory_bytes=100 holds no KV page: one of 16 tokens takes 4096 bytes"):
        num_kv_pages(KVCacheConfig(memory_bytes=100), [PageBytes(4096)], [1 << 30])
    with pytest.raises(ConfigError, match=r"memory_fraction=0.3 of 4096 free bytes holds no KV page"):
        num_kv_pages(KVCacheConfig(memory_fraction=0.3), [PageBytes(4096)], [4096])
    with pytest.raises(ConfigError, match=r"num_tokens=100 takes 32768 bytes on rank 1, .* choose at most 96"):
        num_kv_pages(KVCacheConfig(num_tokens=100), [PageBytes(4096), PageBytes(4096)], [1 << 30, 7 * 4096])


def test_the_context_is_cut_to_what_the_pool_holds_unless_it_was_asked_for() -> None:
    auto = EngineConfig(model="a/b")
    assert cut_max_model_len(auto, _model(), num_pages=1000) == 2048
    assert cut_max_model_len(auto, _model(), num_pages=10) == 160
    asked = EngineConfig(model="a/b", max_model_len=100)
    assert cut_max_model_len(asked, _model(), num_pages=10) == 100
    with pytest.raises(ConfigError, match="max_model_len=100 exceeds the 96 tokens"):
        cut_max_model_len(asked, _model(), num_pages=6)


# ---- where the model is


def test_a_directory_with_safetensors_is_taken(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "pytorch_model.bin").touch()
    assert resolve_model_path(str(tmp_path)) == tmp_path


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").touch()
    assert resolve_model_path("~/a") == tmp_path / "a"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin", "config.json"], "opening a pickle can run code; use a checkpoint in safetensors"),
        (["model.pth"], "opening a pickle can run code"),
        (["config.json", "a.gguf"], "holds no .safetensors files"),
    ],
)
def test_a_directory_without_safe_weights_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        resolve_model_path(str(tmp_path))


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(CheckpointError, match=r"model.pt is a pickle, and opening a pickle can run code"):
        resolve_model_path(str(tmp_path / "model.pt"))


@pytest.mark.parametrize("name", ["m.gguf", "/nowhere/m.GGUF", "owner/tiny-GGUF", "owner/tiny/m.gguf"])
def test_gguf_is_refused_with_what_to_do_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    message = f"={name} is in GGUF format.* convert the GGUF file to a directory of safetensors with transformers"
    with pytest.raises(CheckpointError, match=f"model{message}"):
        resolve_model_path(name)
    with pytest.raises(CheckpointError, match=f"tokenizer{message}"):
        resolve_tokenizer_path(name, "owner/tiny")


def test_a_directory_may_be_called_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny-GGUF"
    path.mkdir()
    (path / "model.safetensors").touch()
    assert resolve_model_path(str(path)) == path


@pytest.mark.parametrize("model", ["/no/such/model", "~/no-such-model", "./no/such", "no-such", "a/b/c/d"])
def test_a_local_path_that_does_not_exist_is_said_so_and_not_looked_for_on_the_hub(model: str) -> None:
    assert is_local(model)
    with pytest.raises(CheckpointError, match=f"model={model} does not exist"):
        resolve_model_path(model)


def test_a_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # public, but not in __all__

    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("owner/tiny", "abc") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/tiny", "abc")
    names = ["model.safetensors", "config.json", "tokenizer.model", "pytorch_model.bin", "original/a.safetensors"]
    wanted = list(
        filter_repo_objects(names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    )
    assert wanted == names[:3]


def test_a_hub_that_cannot_be_reached_is_a_checkpoint_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(*_: object, **__: object) -> str:
        raise OSError("connection refused\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        CheckpointError, match=r"model=owner/tiny at revision=v1 .*: connection refused; check the name"
    ):
        resolve_model_path("owner/tiny", "v1")


def test_the_served_name_follows_from_the_model(tmp_path: Path) -> None:
    assert model_name("owner/tiny") == "owner/tiny"
    assert model_name(str(tmp_path / "tiny.Q4_1")) == "tiny.Q4_1"
    assert model_name("/models/tiny/") == "tiny"


def test_a_model_has_one_name_or_several() -> None:
    assert _resolved().config.model_names == ["owner/tiny"]
    assert _resolved(served_model_name="mine").config.model_names == ["mine"]
    assert _resolved(served_model_name=["mine", "claude-*"]).config.model_names == ["mine", "claude-*"]
    for wrong in (7, ["mine", 7], [], "claude-*", ["claude-*", "mine"], ["mine", "a*b*"]):
        with pytest.raises(ConfigError, match="served_model_name"):
            _resolved(served_model_name=wrong)
