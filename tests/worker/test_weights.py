"""Checkpoints: each rank reads its own ranges, and nothing that does not fit is loaded."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from configs.errors import CheckpointError
from configs.model_config import ModelConfig
from configs.quantization import WeightScales
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan, Span
from tests.helpers.dense_model import dense_model
from worker.models.decoder import Decoder
from worker.weights import range_reader
from worker.weights import safetensors_file as safetensors_weights
from worker.weights.checkpoint import Checkpoint, expected_shapes, with_own_lm_head
from worker.weights.range_reader import RangeReader
from worker.weights.safetensors_file import SafetensorsFile

CPU = torch.device("cpu")


def _model(**changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 40, "num_hidden_layers": 2, "intermediate_size": 1280, "vocab_size": 700}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    return dense_model(**{**sizes, "tie_word_embeddings": False, "qkv_bias": True, "qk_norm": True, **changes})


def _tensors(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in expected_shapes(model).items()}


class Recorder:
    """A TensorSource that remembers what was asked of a checkpoint and what came."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.reads: list[tuple[str, Span | None, Span | None, torch.Tensor]] = []

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        self._checkpoint.read(name, out, rows=rows, columns=columns)
        self.reads.append((name, rows, columns, out.clone()))


def _load_ranks(
    path: Path, model: ModelConfig, tp_size: int, dtype: torch.dtype = torch.float32
) -> list[tuple[Recorder, int]]:
    """What each rank of `tp_size` read, and how many bytes."""
    plan = ShardPlan.create(model, tp_size)
    ranks = []
    for rank in range(tp_size):
        group = TensorParallelGroup(rank=rank, size=tp_size, device=CPU, collectives=None)
        with Checkpoint.open(path, model) as checkpoint:
            recorder = Recorder(checkpoint)
            Decoder(model, plan, group, dtype=dtype, device=CPU).load(recorder)
            ranks.append((recorder, checkpoint.bytes_read))
    return ranks


@pytest.mark.parametrize("tp_size", range(1, 10))
def test_ranks_read_exactly_their_ranges_and_together_the_whole_model(tmp_path: Path, tp_size: int) -> None:
    model = _model()
    tensors = _tensors(model)
    save_file(tensors, tmp_path / "model.safetensors")
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for recorder, bytes_read in _load_ranks(tmp_path, model, tp_size):
        for name, rows, columns, values in recorder.reads:
            index: tuple[slice, ...] = (slice(*rows) if rows else slice(None),)
            index += (slice(*columns),) if columns else ()
            assert torch.equal(values, tensors[name][index]), name
            seen[name][index] = True
        assert bytes_read == sum(4 * values.numel() for *_, values in recorder.reads)
    assert all(mask.all() for mask in seen.values())


def test_tied_embeddings_are_read_once(tmp_path: Path) -> None:
    model = _model(tie_word_embeddings=True)
    tensors = _tensors(model)
    # Some checkpoints store the copy all the same.
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, tmp_path / "model.safetensors")
    assert with_own_lm_head(model, tmp_path) is model
    ((recorder, _),) = _load_ranks(tmp_path, model, 1)
    assert [name for name, *_ in recorder.reads if "embed" in name or "lm_head" in name] == [
        "model.embed_tokens.weight"
    ]


def test_an_lm_head_that_differs_from_the_embedding_is_used_though_the_config_ties_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(tie_word_embeddings=True)
    head = _tensors(model)["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file({**_tensors(model), "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="another lm_head"):
        Checkpoint.open(tmp_path, model)
    own = with_own_lm_head(model, tmp_path)
    assert not own.tie_word_embeddings
    assert "lm_head.weight is not the embedding" in caplog.text
    with Checkpoint.open(tmp_path, own) as checkpoint:
        checkpoint.read("lm_head.weight", out := torch.empty(700, 40))
    assert torch.equal(out, head)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_types_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    model = _model()
    tensors = _tensors(model, dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path, model) as checkpoint:
        out = torch.empty(700, 40)
        checkpoint.read("lm_head.weight", out)
    assert torch.equal(out, tensors["lm_head.weight"].float())


BLOCKS = WeightScales(16, 12)  # no span's multiple


def _in_fp8(tensors: dict[str, torch.Tensor], kind: WeightScales) -> dict[str, torch.Tensor]:
    """The matrices of a checkpoint in FP8, but for the embedding and LM head, and their scales."""
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor
        if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name:
            height, width = kind.block(tuple(tensor.shape))
            scales = torch.rand(-(-tensor.shape[0] // height), -(-tensor.shape[1] // width)) + 0.01
            made |= {name: tensor.to(torch.float8_e4m3fn), name + kind.suffix: scales}
    return made


def _whole(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize(
    ("tp_size", "dtype", "kind"),
    [
        (1, torch.float32, BLOCKS),
        (2, torch.bfloat16, BLOCKS),
        (3, torch.float32, BLOCKS),
        (5, torch.bfloat16, BLOCKS),
        (3, torch.bfloat16, WeightScales(1, 0, "_scale")),
        (2, torch.float32, WeightScales(0, 0, "_scale")),
    ],
)
def test_weights_in_fp8_are_multiplied_by_their_scales_wherever_ranks_cut_them(
    tmp_path: Path, tp_size: int, dtype: torch.dtype, kind: WeightScales
) -> None:
    model = _model(weight_scales=kind)
    stored = _in_fp8(_tensors(model, torch.bfloat16), kind)
    whole = {
        name: (tensor.float() * _whole(stored[name + kind.suffix], kind.block(tuple(tensor.shape)), tensor.shape)).to(
            dtype
        )
        for name, tensor in stored.items()
        if name + kind.suffix in stored
    }
    if kind.height == 0:  # a scale of the whole is a vector of one or a number, and inputs may have one too
        for i, name in enumerate(whole):
            stored[name + kind.suffix] = stored[name + kind.suffix].view((1,) if i % 2 else ())
        stored["model.layers.0.mlp.down_proj.input_scale"] = torch.ones(1)
    # Scales may be in another file than what they scale.
    save_file({k: v for k, v in stored.items() if "scale" not in k}, tmp_path / "model-1.safetensors")
    save_file({k: v for k, v in stored.items() if "scale" in k}, tmp_path / "model-2.safetensors")
    num_checked = 0
    for recorder, _ in _load_ranks(tmp_path, model, tp_size, dtype):
        for name, rows, columns, values in recorder.reads:
            if name in whole:
                index = (slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None))
                assert torch.equal(values, whole[name][index]), name
                num_checked += 1
    assert num_checked == tp_size * len(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda it: it.pop("model.layers.0.mlp.down_proj.weight_scale_inv"),
            "without scales.*: model.layers.0.mlp.down",
        ),
        (
            lambda it: it.update({"lm_head.weight_scale_inv": torch.ones(44, 4)}),
            "or scales of other tensors: lm_head.weight;",
        ),
        (lambda it: it.update({"model.layers.0.mlp.down_proj.weight_scale_inv": torch.ones(1, 1)}), "has shape .1, 1."),
    ],
)
def test_fp8_and_scales_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    model = _model(weight_scales=BLOCKS)
    stored = _in_fp8(_tensors(model), BLOCKS)
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path, model)


def test_fp8_whose_blocks_nobody_names_is_refused(tmp_path: Path) -> None:
    model = _model()
    tensors = _tensors(model)
    down = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, down: tensors[down].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="without scales"):
        Checkpoint.open(tmp_path, model)


def test_reads_through_an_index_and_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_weights, "_CHUNK_BYTES", 1000)
    model = _model()
    tensors = _tensors(model)
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
        weight_map.update(dict.fromkeys(part, f"part-{i}.safetensors"))
    # A stray file beside the index is not the model's.
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ((recorder, _),) = _load_ranks(tmp_path, model, 1)
    for name, rows, columns, values in recorder.reads:
        index = (slice(*rows) if rows else slice(None), *((slice(*columns),) if columns else ()))
        assert torch.equal(values, tensors[name][index])
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks files its index names: part-1\.safetensors"):
        Checkpoint.open(tmp_path, model)


def test_names_missing_surplus_and_misshapen_tensors(tmp_path: Path) -> None:
    model = _model()
    tensors = _tensors(model)

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path, model)

    without = {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"}
    refused(without, r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight; download the rest")
    renamed = {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.up"): it for name, it in tensors.items()}
    refused(renamed, r"mlp\.up_proj\.weight; the files have model\.layers\.1\.mlp\.up\.weight instead")
    refused({**tensors, "model.layers.0.mlp.extra": torch.zeros(1)}, r"does not use: model\.layers\.0\.mlp\.extra")
    refused({**tensors, "model.norm.weight": torch.zeros(41)}, r"model\.norm\.weight has shape \[41\].*\[40\]")
    refused({**tensors, "model.norm.weight": torch.zeros(40, dtype=torch.int32)}, "is of type I32")
    # Known leftovers of old checkpoints are fine.
    leftovers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file({**tensors, **leftovers}, tmp_path / "model.safetensors")
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    Checkpoint.open(tmp_path, model).close()


@pytest.mark.parametrize("stride", [40, 96, 5000])
@pytest.mark.parametrize("length", [1, 32])
def test_pieces_of_rows_are_joined_across_small_and_large_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int, length: int
) -> None:
    monkeypatch.setattr(range_reader, "_BLOCK_BYTES", 300)
    rows = np.random.default_rng(0).integers(0, 256, (17, stride), np.uint8)
    (tmp_path / "file").write_bytes(rows.tobytes()[: 16 * stride + 3 + length])  # it ends with the last piece
    reader = RangeReader(tmp_path / "file")
    assert reader.read_strided(3, stride, 17, length) == rows[:, 3 : 3 + length].tobytes()
    assert reader.bytes_read == 17 * length
    with pytest.raises(CheckpointError, match="file ends at byte"):
        reader.read_strided(3, stride, 18, length)
    reader.close()


def test_refuses_truncated_foreign_and_pickled_files(tmp_path: Path) -> None:
    model = _model()
    file = tmp_path / "model.safetensors"
    save_file(_tensors(model), file)
    whole = file.read_bytes()
    for kept in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=r"truncated|too short"):
            Checkpoint.open(tmp_path, model)
    file.write_bytes((10).to_bytes(8, "little") + b"not json..")
    with pytest.raises(CheckpointError, match="not JSON"):
        Checkpoint.open(tmp_path, model)
    for entry in (
        "7",
        "{}",
        '{"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}',
        '{"dtype": "F32", "shape": "ab"}',
    ):
        header = f'{{"lm_head.weight": {entry}}}'.encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            Checkpoint.open(tmp_path, model)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        Checkpoint.open(tmp_path, model)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        Checkpoint.open(tmp_path, model)
    with pytest.raises(CheckpointError, match="is no directory"):
        Checkpoint.open(tmp_path / "nowhere", model)


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, file)
    opened = SafetensorsFile.open(file)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="download it again"):
        opened.read("a", torch.empty(1000), Span(0, 1000), None)
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 3])
def test_loading_takes_little_more_than_the_shard(tmp_path: Path, tp_size: int) -> None:
    # 150 M parameters of random bf16, loaded as fp32 on the last rank.
    model = _model(hidden_size=1024, num_hidden_layers=6, intermediate_size=4096, vocab_size=50048, head_dim=64)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected_shapes(model).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    pickled = tmp_path / "model.pickle"
    pickled.write_bytes(pickle.dumps(model))
    script = f"""
import pickle, sys, torch
from pathlib import Path
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.models.decoder import Decoder
from worker.weights.checkpoint import Checkpoint, with_own_lm_head
model = pickle.loads(Path({str(pickled)!r}).read_bytes())
group = TensorParallelGroup(rank={tp_size - 1}, size={tp_size}, device=torch.device("cpu"), collectives=None)
def memory(kind):
    return int(Path("/proc/self/status").read_text().split(kind)[1].split()[0]) * 1024
with torch.inference_mode(), Checkpoint.open(Path({str(tmp_path)!r}), model) as checkpoint:
    plan = ShardPlan.create(model, {tp_size})
    decoder = Decoder(model, plan, group, dtype=torch.float32, device=torch.device("cpu"))
    before = memory("VmRSS:")
    decoder.load(checkpoint)
    print(checkpoint.bytes_read, memory("VmHWM:") - before)
assert "transformers" not in sys.modules
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    bytes_read, peak = map(int, done.stdout.split())
    shard = 2 * bytes_read
    assert peak < shard + 64e6, f"a shard of {shard / 1e6:.0f} MB peaked at {peak / 1e6:.0f} MB"
