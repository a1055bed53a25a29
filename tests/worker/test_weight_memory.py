"""Weights that outlive a rank's process are what the next one would read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.biased_mixture import BiasedMixture
from configs.errors import ConfigError, EngineError
from configs.model_config import ModelConfig
from configs.quantization import FP8_BLOCKS
from configs.schema import EngineConfig
from parallel.numerics.arithmetic import LayerContext
from parallel.persistent_memory import Keeper, PersistentMemory
from parallel.plan import ShardPlan
from tests.helpers.dense_model import dense_model
from tests.whole.test_weight_change import CPU, FAMILIES, family_decoder, family_model
from tests.worker.test_mxfp4_weights import four_bit_model
from worker.layers.experts import CudaExperts
from worker.models import decoder_layer
from worker.models.decoder import Decoder
from worker.weights import weight_memory
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.host_memory import tensors
from worker.weights.quantised_weights import QuantisedCheckpoint
from worker.weights.weight_memory import WeightMemory


@pytest.fixture
def persistent() -> Iterator[PersistentMemory]:
    keeper = Keeper()
    yield PersistentMemory(keeper.address, 1, CPU)
    keeper.close()


def bits(decoder: Decoder) -> list[bytes]:
    return [it.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for it in tensors(decoder)]


def new_decoder(model: ModelConfig, *, exact: bool = False) -> Decoder:
    return family_decoder(model, 2, 1, exact=exact, dtype=torch.float32 if exact else torch.bfloat16)


def addresses(decoder: Decoder) -> list[int]:
    return [it.untyped_storage().data_ptr() for it in tensors(decoder)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
@torch.inference_mode()
def test_weights_in_persistent_memory_are_those_that_were_read(
    tmp_path: Path, persistent: PersistentMemory, family: str, exact: bool
) -> None:
    model = family_model(tmp_path, family)
    plain, first, next_one = (new_decoder(model, exact=exact) for _ in range(3))
    plain.load(DummyCheckpoint(model))
    shares: list[float] = []
    weights = WeightMemory(next_one, persistent)
    assert not weights.find(DummyCheckpoint(model), "a"), "nothing is there yet"
    WeightMemory(first, persistent).load(source := DummyCheckpoint(model), "a", shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert bits(first) == bits(plain)
    assert len(set(addresses(first))) == len(first.layers) + 1, "a tensor was left behind"
    assert not weights.find(DummyCheckpoint(model), "b")
    assert weights.find(DummyCheckpoint(model), "a")
    assert weights.num_bytes == source.bytes_loaded
    assert bits(next_one) == bits(plain)
    tensors(first)[0].view(-1).view(torch.uint8)[0] ^= 1
    assert bits(next_one) == bits(first) != bits(plain), "both use one memory"


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_weights_that_waited_on_the_host_become_persistent_like_others(
    tmp_path: Path, persistent: PersistentMemory, family: str
) -> None:
    model = family_model(tmp_path, family)
    plain, first, next_one = (new_decoder(model) for _ in range(3))
    plain.load(DummyCheckpoint(model))
    weights = WeightMemory(first, persistent)
    weights.load(source := DummyCheckpoint(model), "a", on_host=True)
    assert not any(it.untyped_storage().nbytes() for it in tensors(first)), "the device has them"
    assert not WeightMemory(next_one, persistent).find(DummyCheckpoint(model), "a"), "they wait"
    weights.load_to_device()
    assert bits(first) == bits(plain)
    assert len(set(addresses(first))) == len(first.layers) + 1, "a tensor was left behind"
    assert (found := WeightMemory(next_one, persistent)).find(DummyCheckpoint(model), "a")
    assert found.num_bytes == source.bytes_loaded
    assert bits(next_one) == bits(plain)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_weights_that_were_moved_to_the_host_come_back_as_they_were(
    tmp_path: Path, persistent: PersistentMemory, family: str
) -> None:
    model = family_model(tmp_path, family)
    decoder, next_one = (new_decoder(model) for _ in range(2))
    weights = WeightMemory(decoder, persistent)
    weights.load(source := DummyCheckpoint(model), "a")
    before = bits(decoder)
    for _ in range(2):
        weights.move_to_host()
        assert not any(it.untyped_storage().nbytes() for it in tensors(decoder)), "the device has them"
        weights.load_to_device()
        assert bits(decoder) == before
    assert (found := WeightMemory(next_one, persistent)).find(DummyCheckpoint(model), "a")
    assert found.num_bytes == source.bytes_loaded
    assert bits(next_one) == before


@torch.inference_mode()
def test_weights_that_are_not_as_they_were_are_not_used(tmp_path: Path, persistent: PersistentMemory) -> None:
    model = family_model(tmp_path, "tied")
    first, next_one = (new_decoder(model) for _ in range(2))
    WeightMemory(first, persistent).load(DummyCheckpoint(model), "a")
    tensors(first)[-1].view(-1).view(torch.uint8)[0] ^= 1
    with pytest.raises(EngineError, match="has changed"):
        WeightMemory(next_one, persistent).find(DummyCheckpoint(model), "a")


@pytest.mark.parametrize("family", ["tied", "experts"])
@torch.inference_mode()
def test_weights_that_were_exchanged_are_persistent_in_the_place_of_the_old(
    tmp_path: Path, persistent: PersistentMemory, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = family_model(tmp_path, family)

    def failed(*_: object) -> None:
        raise RuntimeError

    live, staged, next_one = (new_decoder(model) for _ in range(3))
    weights = WeightMemory(live, persistent)
    weights.load(DummyCheckpoint(model), "a")
    new = weights.stage(staged, DummyCheckpoint(model, "b"), "b", on_host=False)
    with monkeypatch.context() as patched:
        patched.setattr(weight_memory, "copy", failed)
        with pytest.raises(RuntimeError):
            weights.take(new)
    assert not WeightMemory(next_one, persistent).find(DummyCheckpoint(model), "a"), "they are half old and half new"
    weights.take(new)
    assert WeightMemory(next_one, persistent).find(DummyCheckpoint(model), "b")
    assert bits(next_one) == bits(staged)


@torch.inference_mode()
def test_weights_in_fp8_are_persistent_exchanged_and_counted(
    persistent: PersistentMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerContext, "keeps_fp8", True)
    sizes = {"hidden_size": 960, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20}
    others = {"tie_word_embeddings": False, "dtype": "bfloat16", "weight_scales": FP8_BLOCKS}
    model = dense_model(**sizes, **others, num_hidden_layers=2, intermediate_size=448)
    first, staged, next_one = (new_decoder(model) for _ in range(3))
    weights = WeightMemory(first, persistent)
    weights.load(source := QuantisedCheckpoint(DummyCheckpoint(model), model), "a")
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", quantization="fp8")
    assert source.bytes_loaded == pytest.approx(ShardPlan.create(model, 2).weight_bytes(1, config), rel=0.01)
    weights.move_to_host()
    weights.load_to_device()
    other = QuantisedCheckpoint(DummyCheckpoint(model, "b"), model)
    weights.take(weights.stage(staged, other, "b", on_host=False))
    assert (found := WeightMemory(next_one, persistent)).find(source, "b")
    assert found.num_bytes == source.bytes_loaded
    assert bits(next_one) == bits(staged)
    with pytest.raises(ConfigError, match="FP8"):
        weights.stage(new_decoder(model), DummyCheckpoint(model), "c", on_host=False)


@torch.inference_mode()
def test_experts_in_four_bits_are_persistent_exchanged_and_counted(
    tmp_path: Path, persistent: PersistentMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerContext, "keeps_mxfp4", True)
    # Ranks on CPU hold what those on GPUs do.
    monkeypatch.setitem(decoder_layer._FEED_FORWARDS, BiasedMixture, CudaExperts)
    model, plain = four_bit_model(tmp_path), four_bit_model(tmp_path, quantization_config=None)
    first, staged, next_one = (new_decoder(model) for _ in range(3))
    weights = WeightMemory(first, persistent)
    weights.load(source := DummyCheckpoint(model), "a")
    assert torch.int16 in {it.dtype for it in tensors(first)}
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", numerics="fast")
    assert source.bytes_loaded == pytest.approx(ShardPlan.create(model, 2).weight_bytes(1, config), rel=0.01)
    weights.move_to_host()
    weights.load_to_device()
    weights.take(weights.stage(staged, DummyCheckpoint(model, "b"), "b", on_host=True))
    assert (found := WeightMemory(next_one, persistent)).find(source, "b")
    assert found.num_bytes == source.bytes_loaded
    assert bits(next_one) == bits(first)
    with pytest.raises(ConfigError, match="MXFP4"):
        weights.stage(new_decoder(plain), DummyCheckpoint(plain), "c", on_host=False)
