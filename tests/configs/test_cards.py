"""Every setting that is auto is decided by what the GPUs can do, and what they cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from configs.cards import CARDS, COMPILED, LEAST, Card, support
from configs.errors import ConfigError
from configs.load import parse_engine_config
from configs.quantization import WeightScales
from configs.resolve import HostFacts, ResolvedConfig, resolve
from configs.weight_dtypes import WeightDtypes, weight_dtypes
from tests.helpers.dense_model import dense_model


def resolved(card: Card | None, *, fp8: bool = False, **args: Any) -> ResolvedConfig:
    model = dense_model(num_hidden_layers=2, vocab_size=256, max_position_embeddings=2048, dtype="bfloat16")
    if fp8:
        model = replace(model, weight_scales=WeightScales(128, 128))
    return resolve(parse_engine_config({"model": "owner/tiny", **args}), model, HostFacts(64, 8, card))


@pytest.mark.parametrize(
    ("name", "prefill", "all_reduce"),
    [
        ("h200", "fa3", "symmetric_memory"),
        ("h20", "fa3", "symmetric_memory"),
        ("b200", "triton", "symmetric_memory"),
        ("a100-80gb", "triton", "symmetric_memory"),
        ("rtx-4090", "triton", "nccl"),
        ("rtx-5090", "triton", "nccl"),
        (None, "triton", "symmetric_memory"),
    ],
)
def test_backends_and_all_reduces_are_those_of_the_card(name: str | None, prefill: str, all_reduce: str) -> None:
    """A card that is not known is not taken for a Hopper."""
    config = resolved(CARDS[name] if name else None, tensor_parallel_size=2).config
    assert (config.attention.prefill_backend, config.attention.decode_backend) == (prefill, "triton")
    assert config.parallel.all_reduce == all_reduce


def test_a_backend_that_is_asked_for_is_left_to_the_ranks_where_the_card_is_not_known() -> None:
    assert resolved(None, attention={"backend": "fa3"}).config.attention.prefill_backend == "fa3"
    with pytest.raises(ConfigError, match=r"backend=fa3 needs compute capability 9\.0, and this is 8\.9"):
        resolved(CARDS["l40s"], attention={"backend": "fa3"})


def test_gpus_that_do_not_reach_each_other_say_so_and_refuse_symmetric_memory() -> None:
    card, asked = CARDS["rtx-4090"], {"parallel": {"all_reduce": "symmetric_memory"}}
    [why] = [str(it) for it in resolved(card).decisions if it.key == "parallel.all_reduce"]
    assert why.endswith("auto -> nccl (cuda, the node's RTX 4090 do not reach each other's memory)")
    with pytest.raises(ConfigError, match=r"all_reduce=symmetric_memory is impossible: .* do not reach .*; choose"):
        resolved(card, tensor_parallel_size=2, **asked)
    assert resolved(card, **asked).config.parallel.all_reduce == "symmetric_memory", "one rank has no peers"
    assert resolved(replace(card, has_peers=True), tensor_parallel_size=2, **asked)


@pytest.mark.parametrize(
    ("key", "args"),
    [("kv_cache.dtype=fp8_e4m3", {"kv_cache": {"dtype": "fp8_e4m3"}}), ("quantization=fp8", {"quantization": "fp8"})],
)
def test_fp8_is_refused_by_name_on_gpus_without_it(key: str, args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: FP8 needs compute capability 8\.9 or later, and A100 has 8\.0; ch"):
        resolved(CARDS["a100-80gb"], **args)
    assert resolved(CARDS["a100-80gb"], device="cpu", **args)
    assert resolved(CARDS["l40s"], **args).config.attention.prefill_backend == "triton"


def test_fp8_weights_are_read_and_counted_as_plain_ones_on_gpus_without_fp8() -> None:
    for name, fp8 in (("a100-80gb", False), ("l40s", True)):
        found = resolved(CARDS[name], fp8=True)
        model = replace(dense_model(), weight_scales=WeightScales(128, 128))
        assert weight_dtypes(found.config, model) == WeightDtypes(fp8=fp8)
        assert any(it.key == "quantization" for it in found.decisions) != fp8


def test_gpus_older_than_bf16_are_refused_and_every_card_says_how_far_it_was_tested() -> None:
    t4 = Card("Tesla T4", (7, 5), 64 << 10, 15360 << 20)
    with pytest.raises(ConfigError, match=r"device=cuda needs .* 8\.0 or later, and Tesla T4 has 7\.5; .*device=cpu"):
        resolved(t4)
    assert support(t4.compute_capability).startswith("refused")
    assert support((8, 6)).startswith("not tested")
    assert support((9, 0)).startswith("ran")
    for capability in COMPILED:
        assert capability >= LEAST
        assert support(capability).startswith("ran" if capability == (9, 0) else "compiles")


def test_exact_numerics_over_fp8_are_refused_where_they_do_not_compile() -> None:
    args = {"numerics": "exact", "quantization": "fp8"}
    with pytest.raises(ConfigError, match=r"quantization=fp8 with numerics=exact does not compile where B200"):
        resolved(CARDS["b200"], **args)
    for name in ("h200", "l40s", "rtx-5090"):
        assert resolved(CARDS[name], **args).config.is_exact
    assert resolved(CARDS["b200"], fp8=True, numerics="exact").config.is_exact, "FP8 checkpoints are read as bf16"
