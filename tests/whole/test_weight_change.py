"""Other weights for an engine that serves: they compute what a start with them would, and one that fails changes
nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.make_checkpoint import write_checkpoint
from cluster.engine.changes import WeightChange
from cluster.engine.weight_change import starter_with
from cluster.messages.engine import SamplingParams, Weights
from cluster.ranks.rank import RankStarter
from cluster.ranks.rank_actor import RankActor, RankSpec
from configs.errors import CheckpointError, ConfigError, EngineError
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.schema import EngineConfig, SpeculationConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, ExactArithmetic
from parallel.plan import ShardPlan
from tests.cluster.test_cli import wait_for
from tests.helpers.families import FAMILIES as MODELS
from tests.helpers.families import GROUPED
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.odd_ranks import use_ranks
from tests.helpers.streams import next_chunk
from tests.helpers.tiny_engine import MODEL, TinyEngine, tiny_engine, write_tiny_checkpoint
from tests.whole.test_failure import running, write_tiny
from tests.whole.test_recovery import LONG, PROMPT, answer, answer_struck, drawn
from worker.models.decoder import Decoder
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.host_memory import by_memory, bytes_of
from worker.weights.weight_memory import WeightMemory

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "tied": ("llama", {**GROUPED, "tie_word_embeddings": True}),
    "untied_with_biases": ("qwen2", {**GROUPED, "tie_word_embeddings": False}),
    "head_norms": ("qwen3", {**GROUPED, "vocab_size": 333}),
    "norm_offsets": ("gemma3_text", MODELS["gemma3_text"].config),
    "sinks": ("gpt_oss", MODELS["gpt_oss"].config),
    "experts": ("qwen2_moe", MODELS["qwen2_moe"].config),
    "latents": ("deepseek_v2", MODELS["lite"].config),
    "sparse": ("glm_moe_dsa", MODELS["glm_5"].config),
    "draft_head": ("llama", GROUPED),
    "mtp": ("glm4_moe", MODELS["glm4_moe"].config),
}


def family_model(path: Path, family: str) -> ModelConfig:
    kind, settings = FAMILIES[family]
    transformers.CONFIG_MAPPING[kind](**settings).save_pretrained(path)
    model = read_model_config(path)
    if family == "mtp":
        return with_draft_head(model, EngineConfig(model=str(path), speculation=SpeculationConfig(method="mtp")))
    if family != "draft_head":
        return model
    (path / "head").mkdir()
    head = json.loads((path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    head |= {"num_hidden_layers": 1, "draft_vocab_size": 100, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]}}
    (path / "head/config.json").write_text(json.dumps(head))
    speculation = SpeculationConfig(method="eagle3", model=str(path / "head"))
    return with_draft_head(model, EngineConfig(model=str(path), load_format="dummy", speculation=speculation))


def family_decoder(model: ModelConfig, size: int, rank: int, *, exact: bool, dtype: torch.dtype) -> Decoder:
    plan = ShardPlan.create(model, size, exact=exact)
    group = TensorParallelGroup(rank=rank, size=size, device=CPU, collectives=None)
    arithmetic = ExactArithmetic(CPU) if exact else FAST
    return Decoder(model, plan, group, arithmetic=arithmetic, dtype=dtype, device=CPU)


def _memory(decoder: Decoder) -> list[torch.UntypedStorage]:
    return [held[0].untyped_storage() for held in by_memory(decoder)]


def _bits(decoder: Decoder) -> list[bytes]:
    return [bytes_of(memory).numpy().tobytes() for memory in _memory(decoder)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("size", "exact", "dtype", "on_host"), [(1, False, torch.bfloat16, True), (2, True, torch.float32, False)]
)
def test_each_weight_of_each_family_becomes_the_new_one(
    tmp_path: Path, family: str, size: int, exact: bool, dtype: torch.dtype, on_host: bool
) -> None:
    model = family_model(tmp_path, family)
    for rank in range(size):
        live, staged, cold = (family_decoder(model, size, rank, exact=exact, dtype=dtype) for _ in range(3))
        second = DummyCheckpoint(model, "second")
        weights = WeightMemory(live)
        weights.load(DummyCheckpoint(model))
        cold.load(second)
        before, addresses = _bits(live), [memory.data_ptr() for memory in _memory(live)]
        new = weights.stage(staged, DummyCheckpoint(model, "second"), "", on_host=on_host)
        assert _bits(live) == before, "live weights changed before they were to"
        weights.take(new)
        assert _bits(live) == _bits(cold)
        assert _bits(live) != before
        assert [memory.data_ptr() for memory in _memory(live)] == addresses
        # None of the weights is somewhere that is not looked at.
        assert sum(memory.nbytes() for memory in _memory(live)) >= second.bytes_loaded


def _other(path: Path, out: Path, factor: float = 1.25) -> Path:
    """A checkpoint of the model at `path` with other weights."""
    (out / "config.json").write_text((path / "config.json").read_text())
    random = torch.Generator().manual_seed(1)
    save_file(
        {
            name: tensor * (1 + factor * torch.rand(tensor.shape, generator=random))
            for name, tensor in load_file(path / "model.safetensors").items()
        },
        out / "model.safetensors",
    )
    return out


def _in_fp8(path: Path, out: Path) -> Path:
    """The checkpoint at `path` with its layers' matrices in FP8 by blocks."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and "layers" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full([-(-it // 16) for it in tensor.shape], 0.75)
    save_file(tensors, out / "model.safetensors")
    return out


def _tokens(group: LocalGroup) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6, 7], [*range(3, 60)], [900, 2]]
    return group.generate([(prompt, sampling) for prompt in prompts], Limits(64), at_once=True).tokens


@pytest.mark.parametrize(
    ("size", "numerics", "kind"),
    [(1, "fast", "files"), (2, "auto", "files"), (2, "fast", "fp8"), (1, "auto", "fp8"), (2, "auto", "memory")],
)
def test_ranks_that_serve_answer_as_a_start_with_the_new_weights_would(
    small_path: Path, tmp_path: Path, size: int, numerics: Any, kind: str
) -> None:
    other = (_in_fp8 if kind == "fp8" else _other)(small_path, tmp_path)
    cold = LocalGroup(other, size, 64, numerics=numerics)
    expected = _tokens(cold)
    cold.close()
    group = LocalGroup(small_path, size, 64, numerics=numerics)
    before = _tokens(group)
    assert before != expected
    model = replace(read_model_config(other), dtype=group.model.dtype)
    for worker in group.workers.values():
        checkpoint = load_file(other / "model.safetensors") if kind == "memory" else other
        assert not worker.shard.stage(model, checkpoint), "a CPU has but one memory"
    assert _tokens(group) == before
    for worker in group.workers.values():
        worker.shard.take_staged()
    assert _tokens(group) == expected
    group.close()


def test_weights_that_cannot_be_read_change_nothing(small_path: Path, tmp_path: Path) -> None:
    other = _other(small_path, tmp_path)
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-8])
    group = LocalGroup(small_path, 1, 64)
    before = _tokens(group)
    with pytest.raises(CheckpointError, match="truncated"):
        group.workers[0].shard.stage(group.model, other, None)
    assert _tokens(group) == before
    group.close()


def test_other_factors_of_a_kv_cache_in_fp8_are_refused(small_path: Path, tmp_path: Path) -> None:
    other = _other(small_path, tmp_path)
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "model.layers.1.self_attn.k_scale": torch.tensor(0.5)}, other / "model.safetensors")
    group = LocalGroup(small_path, 1, 64, kv_dtype="fp8_e4m3", numerics="fast")
    _tokens(group)
    with pytest.raises(ConfigError, match="FP8 factors of keys and values differ"):
        group.workers[0].shard.stage(group.model, other, None)
    group.close()


def _ask(engine: TinyEngine, prompt: list[int], max_tokens: int = 40) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return cast("dict[str, Any]", engine.post("/v1/completions", {"model": MODEL, **body}).json())


def _ids(answered: dict[str, Any]) -> list[int]:
    return cast("list[int]", answered["choices"][0]["token_ids"])


def _change(engine: TinyEngine, path: Path, running: Any, generation: int = 1) -> Future[float]:
    """Has the one rank of `engine` serve with the checkpoint at `path`."""
    [worker] = engine.coordinator.ranks._group.workers.values()  # type: ignore[attr-defined]  # fake ranks
    worker.shard.stage(read_model_config(path), path, None)
    return engine.coordinator.change(
        WeightChange(Weights("new", "print"), running, generation, worker.shard.take_staged)
    )


@pytest.fixture(scope="module")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for a tiny engine."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path)
    return _other(path, tmp_path_factory.mktemp("other"), 3.0)


@pytest.mark.parametrize("how", ["continue", "finish", "recompute"])
def test_streams_under_way_go_on_as_they_were_asked_to(tmp_path: Path, other_tiny: Path, how: str) -> None:
    prompts = [[5, 6, 7, 40 + i] * 5 for i in range(3)]
    with tiny_engine(tmp_path) as engine, ThreadPoolExecutor() as pool:
        old = [_ids(_ask(engine, prompt)) for prompt in prompts]
        ranks, all_run, go_on = engine.coordinator.ranks, threading.Event(), threading.Event()
        receive = ranks.recv

        def recv(timeout_s: float) -> bytes:
            """The engine stands still until all have come, and when they run until their weights are to change."""
            if not go_on.is_set():
                wait_for(lambda: engine.model.engine.num_open == 3, 20, "three requests")
                if engine.coordinator.inspect(lambda it: it.stats().num_running == 3):
                    all_run.set()
                    assert go_on.wait(20)
            return receive(timeout_s)

        ranks.recv = recv  # type: ignore[method-assign]
        asked = [pool.submit(_ask, engine, prompt) for prompt in prompts]
        assert all_run.wait(20)
        changed = _change(engine, other_tiny, how)
        go_on.set()
        late = _ids(_ask(engine, prompts[0]))
        assert 0 < changed.result(20) < 5
        met = [_ids(it.result(20)) for it in asked]
        last = [_ask(engine, prompt) for prompt in prompts]
        new = [_ids(it) for it in last]
        engine.check()
        assert all(before != after for before, after in zip(old, new, strict=True))
        assert late == new[0], "a request that came after the change met what was before"
        assert last[0]["system_fingerprint"] == "print"
        assert engine.model.weights_version == "new"
        if how == "finish":
            assert met == old
            return
        assert all(len(it) == 40 for it in met)
        for prompt, before, it in zip(prompts, old, met, strict=True):
            num_old = next(i for i in range(41) if it[: i + 1] != before[: i + 1])
            if how == "recompute" and num_old < 40:
                # It goes on as if all that it had been given were its prompt.
                assert it[num_old:] == _ids(_ask(engine, prompt + it[:num_old], 40 - num_old))


def test_weights_that_ranks_read_before_one_was_replaced_do_not_serve(tmp_path: Path, other_tiny: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        before = _ids(_ask(engine, [5, 6, 7]))
        with pytest.raises(EngineError, match="ranks were replaced while the weights were read; try again"):
            _change(engine, other_tiny, "finish", generation=0).result(20)
        assert _ids(_ask(engine, [5, 6, 7])) == before
        assert engine.model.weights_version is None


class BrokenRank(RankActor):
    """A rank that fails when it is to take weights of revision `broken`, as rank 1."""

    @ray.method(concurrency_group="ctl")
    def take_staged(self) -> None:
        if self._spec.rank == 1 and self._is_to_break:
            raise EngineError("no power")
        super().take_staged()

    @ray.method(concurrency_group="ctl")
    def stage(self, spec: RankSpec) -> bool:
        self._is_to_break = spec.config.revision == "broken" and not spec.is_in_memory
        return super().stage(spec)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_serves_other_weights_from_then_on_whatever_becomes_of_its_ranks(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranks(monkeypatch, BrokenRank)
    paths = [tmp_path / name for name in ("first", "second", "cut", "unlike")]
    for path in paths:
        path.mkdir()
    first, second, cut, unlike = paths
    write_tiny(first)
    for path in (second, cut):
        _other(first, path, 0.5)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-8])
    (unlike / "config.json").write_text(
        (first / "config.json").read_text().replace('"vocab_size": 300', '"vocab_size": 301')
    )
    write_checkpoint(unlike, unlike)

    before, expected = drawn(first), drawn(second)
    assert before != expected

    async def main() -> None:
        async with running(first, recovery={"max_rebuilds": 3}) as engine:
            for path, wrong in ((cut, "truncated"), (unlike, "vocab_size is 301, not 300"), (tmp_path / "no", "exist")):
                with pytest.raises(ConfigError, match=wrong):
                    await engine.update_weights(str(path))
            assert (await answer(engine))[0] == before
            met = asyncio.create_task(answer(engine))
            [endless] = engine.client.submit([PROMPT], [[LONG]])
            await next_chunk(endless)
            changing = asyncio.create_task(engine.update_weights(str(second), version="step-2", running="finish"))
            await asyncio.sleep(1)  # calls of an actor's threads may overtake one another
            for other in (engine.update_weights(str(first)), engine.resize(1)):
                with pytest.raises(ConfigError, match="another resize or change of weights is under way"):
                    await other
            assert not changing.done()
            assert (await met)[0] == before
            endless.abort()
            changed = await changing
            assert changed is not None
            assert (changed.version, changed.staged_in) == ("step-2", "device")
            assert 0 < changed.pause_s < 5
            assert (await answer(engine))[0] == expected
            # A rank that is replaced, and a group of another size, have the new ones too.
            tokens, _ = await answer_struck(engine, 1, signal.SIGKILL)
            assert tokens == expected
            await engine.resize(1)
            await engine.resize(2)
            assert (await answer(engine))[0] == expected
            # So has a group one of whose ranks fails in the exchange.
            with pytest.raises(EngineError, match="rebuilt with the new weights: rank 1 failed: no power"):
                await engine.update_weights(str(first), revision="broken")
            assert (await answer(engine))[0] == before
            # A trainer's tensors come in parts, and no file has them.
            names = sorted(tensors := load_file(second / "model.safetensors"))
            for part, is_last in ((names[:5], False), (names[5:], True)):
                given = [ray.put({name: tensors[name] for name in part})]
                done = await engine.update_weights(tensors=given, version="step-3", last=is_last)
                assert (done is None) is not is_last
                assert (await answer(engine))[0] == (expected if is_last else before)
            tokens, _ = await answer_struck(engine, 0, signal.SIGKILL)
            assert tokens == expected, "the new process has not what the trainer gave the old one"
            with pytest.raises(ConfigError, match="new ranks cannot read weights that came from memory"):
                await engine.resize(1)
            with pytest.raises(ConfigError, match="missing tensors"):
                await engine.update_weights(tensors=[ray.put({})], version="step-4")
            await engine.update_weights(str(first), revision="broken-no-more")
            assert (await answer(engine))[0] == before
            await engine.resize(1)
            stats = engine.client.board.latest
            assert stats is not None
            assert stats.weights is not None
            assert (stats.num_rebuilds, stats.weights.version) == (3, "first@broken-no-more")

    asyncio.run(main())


def test_what_the_model_is_may_not_change(small_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((small_path / "config.json").read_text()), "rope_theta": 5e5, "vocab_size": 1001})
    )
    write_checkpoint(tmp_path, tmp_path)
    config = EngineConfig(model=str(small_path), device="cpu", dtype="float32")
    placement: Any = SimpleNamespace(bundle_count=3)
    starter = RankStarter(
        config=config, model=read_model_config(small_path), model_path=small_path, placement_group=placement, name="x"
    )
    differ = r"differs .* vocab_size is 1001, not 1000; layers\.0\.mixer\.rope\.theta is 500000\.0, not 10000\.0;"
    with pytest.raises(ConfigError, match=differ):
        starter_with(starter, str(tmp_path), None)
    same = starter_with(starter, str(small_path), "main")
    assert (same.model, same.config.revision, same.spec(1).model_path) == (starter.model, "main", str(small_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_staged_weights_go_as_soon_as_nobody_has_them(tmp_path: Path, family: str) -> None:
    model = family_model(tmp_path, family)
    live, staged = (family_decoder(model, 1, 0, exact=False, dtype=torch.float32) for _ in range(2))
    weights = WeightMemory(live)
    weights.load(DummyCheckpoint(model))
    gone = weakref.ref(staged)
    new = weights.stage(staged, DummyCheckpoint(model, "second"), "", on_host=False)
    weights.take(new)
    gc.disable()
    try:
        del staged, new
        assert gone() is None, "a cycle keeps them until a collection"
    finally:
        gc.enable()
