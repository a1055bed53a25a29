"""Random weights: one model whatever the sharding, device or dtype, the same as in files, and fit to be served."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.registry import create_backend
from benchmarks import make_checkpoint
from benchmarks.make_checkpoint import write_checkpoint
from cluster.engine.preflight import check_checkpoint
from configs.checkpoint import resolve_model_path
from configs.errors import CheckpointError
from configs.load import load_app_config
from configs.model_config import ModelConfig
from configs.quantization import FP8_BLOCKS
from configs.read_config import read_model_config
from configs.schema import EngineConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import ShardPlan, Span
from tests.helpers.batches import batch_of
from tests.helpers.dense_model import dense_model
from worker.models.decoder import Decoder
from worker.tp_worker import TPWorker
from worker.weights import dummy_weights, uniform
from worker.weights.checkpoint import AnyCheckpoint, Checkpoint, expected_shapes
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.host_memory import tensors
from worker.weights.quantised_weights import QuantisedCheckpoint

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BIASED = dense_model(
    model_type="qwen2",
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=320,
    vocab_size=700,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
    dtype="bfloat16",
)


def _shape_dir(path: Path, **changes: Any) -> Path:
    """A directory with no more than config.json."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


def _whole(model: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in expected_shapes(model).items()}
    with DummyCheckpoint(model) as checkpoint:
        for name, tensor in tensors.items():
            checkpoint.read(name, tensor)
    return tensors


# ---- the values


def test_the_bits_are_those_of_the_first_release() -> None:
    tensors = _whole(BIASED, torch.bfloat16)
    sums = {
        name: zlib.crc32(tensors[name].view(torch.uint8).numpy().tobytes())
        for name in (
            "model.embed_tokens.weight",
            "model.layers.1.self_attn.q_proj.bias",
            "model.layers.1.self_attn.k_norm.weight",
            "model.layers.0.mlp.down_proj.weight",
        )
    }
    assert list(sums.values()) == [3137108937, 2658080467, 995082456, 881236904], (
        "committed measurements are of the model that these bits make"
    )


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 17])
def test_any_range_of_a_tensor_equals_that_range_of_the_whole(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    whole = _whole(BIASED, torch.float32)
    monkeypatch.setattr(uniform, "_CHUNK_ELEMENTS", chunk)
    checkpoint = DummyCheckpoint(BIASED)
    num_bytes = 0
    for name, rows, columns in (
        ("lm_head.weight", Span(13, 700), None),
        ("model.layers.0.self_attn.o_proj.weight", None, Span(16, 48)),
        ("model.layers.1.self_attn.v_proj.bias", Span(5, 17), None),
        ("model.layers.1.mlp.down_proj.weight", None, Span(0, 0)),
        ("model.norm.weight", None, None),
    ):
        index = tuple(slice(*span) if span else slice(None) for span in (rows, columns))[: whole[name].ndim]
        out = torch.empty_like(whole[name][index])
        checkpoint.read(name, out, rows=rows, columns=columns)
        assert torch.equal(out, whole[name][index]), name
        num_bytes += out.nbytes
    assert checkpoint.bytes_loaded == num_bytes


class Recorder:
    """A TensorSource that remembers which parts of which tensors were asked for."""

    def __init__(self, model: ModelConfig) -> None:
        self._checkpoint = DummyCheckpoint(model)
        self.parts: list[tuple[str, tuple[slice, ...], torch.Tensor]] = []

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        self._checkpoint.read(name, out, rows=rows, columns=columns)
        index = (slice(*rows) if rows else slice(None), *((slice(*columns),) if columns else ()))
        self.parts.append((name, index, out.clone()))


@pytest.mark.parametrize("tp_size", [1, 3, 5])
def test_the_shards_of_every_group_are_parts_of_one_model(tp_size: int) -> None:
    whole = _whole(BIASED, torch.float32)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    plan = ShardPlan.create(BIASED, tp_size)
    for rank in range(tp_size):
        group = TensorParallelGroup(rank=rank, size=tp_size, device=CPU, collectives=None)
        recorder = Recorder(BIASED)
        Decoder(BIASED, plan, group, dtype=torch.float32, device=CPU).load(recorder)
        for name, index, values in recorder.parts:
            assert torch.equal(values, whole[name][index]), name
            seen[name][index] = True
    assert all(mask.all() for mask in seen.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_hold_the_values_of_the_checkpoints_own(dtype: torch.dtype) -> None:
    stored, cast = _whole(BIASED, torch.bfloat16), _whole(BIASED, dtype)
    for name, tensor in stored.items():
        assert torch.equal(tensor.to(dtype), cast[name]), name


def test_values_have_the_mean_and_spread_of_their_kind() -> None:
    tensors = _whole(BIASED, torch.float32)
    roles = {tensor.name: tensor.role for tensor in BIASED.tensors()}
    for name, tensor in tensors.items():
        mean, std = dummy_weights._mean_and_std(roles[name], tensor.shape[1] if tensor.ndim > 1 else 1)
        error = 5 / tensor.numel() ** 0.5  # of estimates from so many values
        assert float(tensor.mean()) == pytest.approx(mean, abs=error * std), name
        assert float(tensor.std()) == pytest.approx(std, rel=error), name
        assert (float((tensor - mean).abs().max())) <= 1.75 * std, "values are uniform"


def test_no_two_rows_or_tensors_are_alike() -> None:
    tensors = _whole(BIASED, torch.float32)
    matrices = [tensor for tensor in tensors.values() if tensor.ndim > 1 and tensor.shape[1] == BIASED.hidden_size]
    rows = torch.nn.functional.normalize(torch.cat(matrices))
    alike = rows @ rows.T
    alike.fill_diagonal_(0.0)
    # 3 million pairs of random directions in 96 dimensions: sqrt(2 ln(3e6) / 96) is 0.56.
    assert float(alike.abs().max()) < 0.65


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_makes_the_same_bits_as_the_cpu(dtype: torch.dtype) -> None:
    ours, theirs = _whole(BIASED, dtype), _whole(BIASED, dtype, "cuda")
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].cpu()), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "in_fp8"), [("qwen3-8b", False), ("qwen3-8b", True), ("qwen3-30b-a3b", True), ("gpt-oss-20b", False)]
)
def test_loading_takes_the_memory_of_the_shard_and_a_gigabyte(name: str, in_fp8: bool) -> None:
    model = read_model_config(ROOT / "benchmarks/models" / name)
    model, device = replace(model, layers=model.layers[:4]), torch.device("cuda")
    source: AnyCheckpoint = DummyCheckpoint(model)
    if in_fp8:
        source = QuantisedCheckpoint(source, model)
        source.keeps_fp8 = True
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    group = TensorParallelGroup.single(device)
    decoder = Decoder(model, ShardPlan.create(model, 1), group, dtype=torch.bfloat16, device=device)
    decoder.load(source)
    num_bytes = sum(it.nbytes for it in tensors(decoder))
    assert num_bytes > 1 << 30
    assert torch.cuda.max_memory_allocated() - before <= num_bytes + (1 << 30)


def test_the_kernel_makes_the_same_bits(interpreter: None) -> None:
    from worker.weights.uniform_kernel import fill

    part = (Span(70_000, 70_030), Span(5, 72))
    for mean, dtype in ((0.0, torch.float32), (1.0, torch.float16), (1.0, torch.float32)):
        ours, kernels = torch.empty(30, 67), torch.empty(30, 80)[:, :67]
        dummy_weights._fill(ours, "seed", mean, 0.1, *part, dtype)
        seeds = struct.unpack_from("<2i", hashlib.sha256(b"seed").digest())
        fill(kernels, seeds, 0.1 * 3**0.5 / (1 << 23), mean, *part, dtype)
        assert torch.equal(ours, kernels)


# ---- as a model


def _logits(model: ModelConfig, source: TensorSource, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [len(ids), vocab_size], hidden states) of one prompt in fp32."""
    decoder = Decoder(model, ShardPlan.create(model, 1), TensorParallelGroup.single(), dtype=torch.float32, device=CPU)
    decoder.load(source)
    decoder.set_max_positions(len(ids))
    layers = decoder.attention_layers
    table = ReqToTokenPool(1, 1, CPU)
    table.page_table[1] = 1
    page_size = 1 << (len(ids) - 1).bit_length()
    pool = TokenToKVPool(layers, num_pages=1, page_size=page_size, dtype=torch.float32, device=CPU)
    backend = create_backend("torch_native", "torch_native", pool)
    batch = batch_of(table, [(1, 0, len(ids))], page_size, ids)
    batch = replace(batch, sample_indices=torch.arange(len(ids)))  # not only the last
    backend.init_forward_metadata(batch)
    hidden = decoder.forward(batch, backend)
    return decoder.local_logits(hidden), hidden


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_written_files_are_the_same_model_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(make_checkpoint, "_PIECE_BYTES", 10_000)
    source = _shape_dir(tmp_path / "shape", tie_word_embeddings=tied)
    write_checkpoint(source, tmp_path / "out", dtype=dtype, max_shard_bytes=400_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    model = read_model_config(tmp_path / "out")
    assert model.dtype == str(dtype).removeprefix("torch.")
    ids = torch.randint(0, 1000, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    with Checkpoint.open(tmp_path / "out", model) as checkpoint:
        ours, _ = _logits(model, checkpoint, ids)
    with DummyCheckpoint(model) as dummy:
        theirs, _ = _logits(model, dummy, ids)
    assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_transformers_loads_the_written_files_and_gives_the_same_logits(tmp_path: Path) -> None:
    import transformers

    write_checkpoint(_shape_dir(tmp_path / "shape"), tmp_path / "out")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["config.json", "model.safetensors"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    model = read_model_config(tmp_path / "out")
    ids = torch.randint(0, 1000, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, _ = _logits(model, DummyCheckpoint(model), ids)
    torch.testing.assert_close(ours, reference(torch.tensor([ids])).logits[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_deep_random_model_is_neither_flat_nor_stuck(tmp_path: Path) -> None:
    shape = _shape_dir(tmp_path, num_hidden_layers=24, vocab_size=5000)
    model = read_model_config(shape)
    ids = torch.randint(0, 5000, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, hidden = _logits(model, DummyCheckpoint(model), ids)
    assert hidden.isfinite().all()
    assert 1.0 < float(logits.std(dim=-1).mean()) < 3.0
    best = logits.argmax(dim=-1)
    assert len(best.unique()) > 64, "the same tokens are best everywhere"
    assert (best == torch.tensor(ids)).float().mean() < 0.2, "a tied model that repeats its input"
    # The last token sees its context, as a cache or a mask that is wrong must show.
    other, _ = _logits(model, DummyCheckpoint(model), [*reversed(ids[:-1]), ids[-1]])
    assert float(torch.corrcoef(torch.stack((logits[-1], other[-1])))[0, 1]) < 0.9


# ---- load_format


def test_only_config_json_is_needed(tmp_path: Path) -> None:
    path = _shape_dir(tmp_path)
    config = EngineConfig(
        model=str(path),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        attention={"prefill_backend": "torch_native", "decode_backend": "torch_native"},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 64},
    )
    check_checkpoint(config, serves_text=False)
    with pytest.raises(CheckpointError, match="holds no tokenizer; set `tokenizer`"):
        check_checkpoint(config)
    model = read_model_config(resolve_model_path(config.model, weights=False))
    plan = ShardPlan.create(model, 1)
    worker = TPWorker(config=config, model=model, model_path=path, plan=plan, group=TensorParallelGroup.single())
    progress: list[float] = []
    worker.shard.load(progress.append)
    assert worker.shard.num_bytes == 4 * plan.weight_elements(0)
    assert progress[-1] == 1.0
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors files"):
        check_checkpoint(config.model_copy(update={"load_format": "auto"}), serves_text=False)


@pytest.mark.parametrize("in_shape", [False, True])
def test_random_weights_are_those_of_fp8_where_settings_or_the_shape_ask_for_it(tmp_path: Path, in_shape: bool) -> None:
    path = _shape_dir(tmp_path)
    model = replace(read_model_config(path), weight_scales=FP8_BLOCKS if in_shape else None)
    config = EngineConfig(
        model=str(path),
        load_format="dummy",
        quantization="auto" if in_shape else "fp8",
        device="cpu",
        dtype="float32",
        attention={"prefill_backend": "torch_native", "decode_backend": "torch_native"},
    )
    plan, group = ShardPlan.create(model, 1), TensorParallelGroup.single()
    worker = TPWorker(config=config, model=model, model_path=path, plan=plan, group=group)
    worker.shard.load()
    assert worker.shard.num_bytes == 4 * plan.weight_elements(0)
    expected, plain = (Decoder(model, plan, group, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    expected.load(QuantisedCheckpoint(DummyCheckpoint(model), model))
    plain.load(DummyCheckpoint(model))
    bits, of_fp8, of_plain = ([it.tolist() for it in tensors(each)] for each in (worker.shard.decoder, expected, plain))
    assert bits == of_fp8 != of_plain


def test_a_directory_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="set `model` to where the weights are"):
        resolve_model_path(str(tmp_path), weights=False)


def test_a_hub_model_is_fetched_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(_shape_dir(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("owner/tiny", weights=False) == tmp_path
    assert "*.safetensors" in asked["ignore_patterns"]
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors files"):
        resolve_model_path("owner/tiny")
    assert "*.safetensors" not in asked["ignore_patterns"]


# ---- the shapes and files that come with it


@pytest.mark.parametrize(
    ("name", "num_parameters", "read_gb", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 15.01, 131_072),
        ("llama-3.1-70b", 70_553_706_496, 139.0, 327_680),
        ("qwen2.5-7b", 7_615_616_512, 14.14, 57_344),
        ("qwen3-0.6b", 596_049_920, 1.19, 114_688),
        ("qwen3-8b", 8_190_735_360, 15.14, 147_456),
        ("qwen3-32b", 32_762_123_264, 63.97, 262_144),
        ("qwen3-30b-a3b", 30_532_122_624, 60.44, 98_304),
        ("deepseek-v2-lite", 15_706_484_224, 30.99, 31_104),
        ("deepseek-v3", 671_026_419_200, 1340.2, 70_272),
        ("gemma-2-2b", 2_614_341_888, 5.23, 106_496),
        ("gemma-3-1b", 999_885_952, 2.0, 26_624),
    ],
)
def test_shapes_are_those_of_the_published_models(
    name: str, num_parameters: int, read_gb: float, kv_bytes: int
) -> None:
    model = read_model_config(ROOT / "benchmarks" / "models" / name)
    shapes = expected_shapes(model)
    assert sum(prod(shape) for shape in shapes.values()) == num_parameters
    # What a decode step of many rows reads: all but the input embedding, where the LM head is not the same tensor.
    skipped = 0 if model.tie_word_embeddings else prod(shapes["model.embed_tokens.weight"])
    assert 2 * (num_parameters - skipped) / 1e9 == pytest.approx(read_gb, rel=5e-3)
    assert 2 * ShardPlan.create(model, 1).kv_elements_per_token(0) == kv_bytes
    assert model.dtype == "bfloat16"
    assert model.eos_token_ids


WITHOUT_CONFIG = {
    *("deepseek-small", "deepseek-sparse-small", "qwen3.5-small", "nemotron-small"),  # for CPUs
    "deepseek-v3.2",  # no GPU has run its sparse attention
    *("qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"),  # no GPU runs their layers yet
}


def test_every_shape_has_a_config_file_that_says_what_its_name_promises() -> None:
    shapes = {path.name for path in (ROOT / "benchmarks" / "models").iterdir()}
    files = {path.stem: path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("smollm2")}
    assert shapes - WITHOUT_CONFIG == {stem.partition("-tp")[0] for stem in files}
    for stem, path in files.items():
        engine = load_app_config(path).engine
        assert engine.tensor_parallel_size == int(stem.partition("-tp")[2] or 1), stem
        assert not engine.is_local_model, stem
        assert (engine.kv_cache.page_size, engine.load_format) == (64, "auto"), stem
