"""Items: many texts behind one query in one row. Each must come out as it does alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from cluster.messages.engine import FinishReason, SamplingParams
from cluster.native.score import Group, grouped
from cluster.scheduling import chunks
from cluster.scheduling.limits import max_item_tokens
from configs.attention import Feature
from configs.errors import EngineError
from configs.layers import Axis
from configs.model_config import ModelConfig
from configs.schema import AttentionConfig, EngineConfig, SchedulerConfig
from tests.helpers.fake_engine import LIMITS, VOCAB, Engine, prompt_of
from tests.helpers.families import save
from tests.helpers.local_group import PAGE_SIZE, Limits, LocalGroup
from worker.frame_checks import FrameLimits, check_frame
from worker.protocol import ITEM_DTYPE, MAX_ITEMS, MAX_ROW_REQUESTED, RowFlag, StepFrame, StepResult
from worker.step.scoring import Items

# The scheduler: `Engine` checks every item's scores, and that no row is longer than it may be in the step with its
# items, nor has one of them from the cache.

WITH_ITEMS = replace(LIMITS, max_item_tokens=7)


def add(engine: Engine, query: Sequence[int], item_lens: Sequence[int], seed: int = 0, **sampling: Any) -> int:
    """A request for two labels after each of some random items."""
    items = prompt_of(sum(item_lens), 100 + seed)
    requested = {"max_tokens": 1, "num_logprobs": 0, "logprob_token_ids": (3, 1), "item_lens": tuple(item_lens)}
    return engine.add([*query, *items], **{**requested, **sampling})


@pytest.mark.parametrize("num_query_tokens", [1, 3, 4, 8, 9, 15, 30])
def test_items_come_in_one_step_behind_a_query_in_chunks_or_from_the_cache(num_query_tokens: int) -> None:
    engine = Engine(WITH_ITEMS)
    query = prompt_of(num_query_tokens)
    first = add(engine, query, [2, 1, 4])
    engine.run()
    second = add(engine, query, [3, 3], seed=1)
    engine.run()
    assert engine.answers[first].cached == 0
    assert engine.answers[second].cached == num_query_tokens // 4 * 4
    frames = [StepFrame.decode(frame) for frame in engine.log]
    assert [frame.items["len"].tolist() for frame in frames if len(frame.items)] == [[2, 1, 4], [3, 3]]


def test_nobody_finds_an_item_in_the_cache() -> None:
    engine = Engine(WITH_ITEMS)
    query, lens = prompt_of(10), [4, 3]
    packed = add(engine, query, lens)
    engine.run()
    for _ in range(2):
        same = engine.add(engine.answers[packed].prompt)
        engine.run()
    assert engine.answers[same].cached == 16, "a prompt of these tokens, once another has computed it"
    engine = Engine(WITH_ITEMS)
    packed = add(engine, query, lens)
    same = engine.add(engine.answers[packed].prompt)
    engine.run()
    assert engine.answers[same].cached == 8
    again = add(engine, query, lens)  # beside one that is in the cache by now
    twins = [add(engine, query, lens) for _ in range(2)]
    engine.run()
    assert [engine.answers[i].cached for i in (again, *twins)] == [8, 8, 8]


def test_a_step_takes_no_more_items_than_its_result_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_ITEMS", 3)
    engine = Engine(WITH_ITEMS)
    for seed in range(3):
        add(engine, prompt_of(1, seed), [1, 1], seed)
    engine.run()
    frames = [StepFrame.decode(frame) for frame in engine.log]
    assert [len(frame.items) for frame in frames] == [2, 2, 2]


def test_a_row_that_was_preempted_before_its_items_is_computed_again() -> None:
    engine = Engine(replace(WITH_ITEMS, num_pages=20, prefill_chunk_size=7, enable_prefix_caching=False))
    for seed in range(3):
        engine.add(prompt_of(4, 2 + seed), max_tokens=24)
    engine.step()
    packed = add(engine, prompt_of(37), [4, 3])
    engine.run()
    finished = engine.answers[packed].finished
    assert finished is not None
    assert finished.num_preemptions > 0


@pytest.mark.parametrize(("num_pages", "seed"), [(18, 0), (18, 1), (64, 2), (64, 3)])
def test_every_item_is_scored_under_random_load(num_pages: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(replace(WITH_ITEMS, num_pages=num_pages, steps_in_flight=1 + seed % 2))
    queries = [prompt_of(rng.randint(1, 25), i) for i in range(3)]
    for i in range(40):
        lens = [rng.randint(1, 3) for _ in range(rng.randint(2, 3))]
        request_id = add(engine, rng.choice(queries), lens[: 3 if sum(lens) <= 7 else 2], i)
        if rng.random() < 0.2:
            engine.abort(request_id)
        engine.add(prompt_of(rng.randint(1, 20), i), max_tokens=rng.randint(1, 30))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    assert (engine.scheduler.stats().total_preemptions > 0) == (num_pages == 18)


@pytest.mark.parametrize(
    ("lens", "changes"),
    [([4, 4], {}), ([0, 1], {}), ([2, 3], {"prompt_logprobs": 0}), ([1] * 7, {"max_item_tokens": 0})],
)
def test_items_that_no_step_takes_are_refused(lens: list[int], changes: dict[str, int]) -> None:
    limits = {key: changes.pop(key) for key in list(changes) if key == "max_item_tokens"}
    engine = Engine(replace(WITH_ITEMS, **limits))
    finished = engine.answers[add(engine, [1], lens, **changes)].finished
    assert finished is not None
    assert (finished.reason, finished.error_code) == (FinishReason.ERROR, "engine_error")
    whole = engine.add([1, 2, 3], max_tokens=1, item_lens=(1, 2))
    assert engine.answers[whole].finished is not None, "items without a query"


def test_a_result_without_the_items_it_owes_is_an_error() -> None:
    engine = Engine(WITH_ITEMS)
    add(engine, [1], [1, 1])
    assert engine.launch() is not None
    with pytest.raises(EngineError, match="items"):
        engine.scheduler.retire(StepResult(1, 1, np.zeros(1, np.int32)))


# The messages


def _frame(items: list[tuple[int, int]]) -> StepFrame:
    """Rows 3, 1 and 2: 6 tokens from position 4 on, the end of a prompt; 3 tokens in its middle; a decode."""
    flags = [RowFlag.HAS_TOKENS | RowFlag.SAMPLE, RowFlag.HAS_TOKENS, RowFlag.SAMPLE]
    fields = {"rows": [3, 1, 2], "starts": [4, 0, 9], "lens": [6, 3, 1], "flags": flags, "token_ids": [0] * 9}
    arrays = {name: np.array(values, np.int32) for name, values in fields.items()}
    return StepFrame(1, 1, items=np.array(items, ITEM_DTYPE), **arrays)


def test_items_travel_in_frames_and_say_where_they_are() -> None:
    frame = StepFrame.decode(_frame([(3, 2), (3, 1), (3, 2)]).encode())
    check_frame(frame, FrameLimits(num_rows=4, vocab_size=12, max_model_len=64))
    items = Items.of(frame)
    assert items.lasts.tolist() == [2, 3, 5]
    assert items.positions.tolist() == [4, 5, 6, 5, 5, 6, 0, 1, 2, 9]
    assert items.item_of.tolist() == [0, 1, 1, 2, 3, 3, 0, 0, 0, 0]
    result = StepResult(1, 1, np.zeros(2, np.int32), item_logprobs=np.ones((3, MAX_ROW_REQUESTED), np.float32))
    assert len(result.encode()) <= StepResult.max_bytes(2, 0)
    assert StepResult.decode(result.encode()).item_logprobs.shape == (3, MAX_ROW_REQUESTED)


@pytest.mark.parametrize(
    ("items", "wrong"),
    [
        ([(3, 0)], "an item without tokens"),
        ([(4, 1)], "without a row"),
        ([(3, 1)] * (MAX_ITEMS + 1), f"more than {MAX_ITEMS} items"),
        ([(3, 4), (3, 3)], "longer than a row"),
        ([(1, 1)], "without HAS_TOKENS and SAMPLE"),
        ([(2, 1)], "without HAS_TOKENS and SAMPLE"),
    ],
)
def test_items_that_do_not_fit_a_frame_are_refused(items: list[tuple[int, int]], wrong: str) -> None:
    with pytest.raises(EngineError, match=wrong):
        check_frame(_frame(items), FrameLimits(num_rows=4, vocab_size=12, max_model_len=64))


# The ranks

WINDOW = 40
LABELS = (3, 300, 17, 17)
COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "intermediate_size": 128,
    "initializer_range": 0.2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {"num_key_value_heads": 2}),
    "windows": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "latents": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    family, sizes = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**COMMON, **sizes)
    path = tmp_path_factory.mktemp(request.param)
    save(getattr(transformers, f"{family}ForCausalLM")(config), path)
    return path


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=lambda size: f"tp{size}")
def group(request: pytest.FixtureRequest, saved: Path) -> Iterator[LocalGroup]:
    windowed = "windows" in saved.name
    group = LocalGroup(saved, request.param, 400, num_window_pages=100 if windowed else None)
    yield group
    group.close()


def scores(group: LocalGroup, requests: Sequence[Any], limits: Limits, *, at_once: bool) -> tuple[torch.Tensor, Any]:
    """[num_items, len(LABELS)] of all `requests` together, and the scheduler's counts."""
    answers = group.generate(requests, limits, at_once=at_once)
    values = [value for of_one in answers.logprobs for logprob in of_one for _, value in logprob.top]
    return torch.tensor(values).view(-1, len(LABELS)), answers.stats


CASES = {
    "whole": (Limits(), True),
    # 33: queries end in the middle of pages, and with their last tokens come items.
    "query in chunks": (Limits(chunk=33), True),
    "prefix hit": (Limits(prefix_caching=True, chunk=70), False),
}


@pytest.mark.parametrize(
    "case", ["query in chunks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("whole", "prefix hit"))]
)
def test_items_of_a_row_are_scored_as_each_alone_beside_other_requests(group: LocalGroup, case: str) -> None:
    limits, at_once = CASES[case]
    limits = replace(limits, num_pages=400, max_item_tokens=33)
    if group.model.layers[-1].mixer.window is not None:
        limits = replace(limits, num_window_pages=100, window=WINDOW)
    rng = np.random.default_rng(7)
    other = rng.integers(0, 320, 30).tolist(), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    packed, alone = [other], [other]
    requested = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, num_logprobs=0, logprob_token_ids=LABELS)
    query, firsts = rng.integers(0, 320, 75).tolist(), iter(rng.permutation(320).tolist())
    for lens in ((1, 8, 3, 20), (33,), (7, 7, 7, 7), (1,) * 30):
        items = [[next(firsts), *rng.integers(0, 320, length - 1).tolist()] for length in lens]
        sampling = requested if len(lens) == 1 else SamplingParams(**{**_fields(requested), "item_lens": lens})
        packed.append(([*query, *itertools.chain(*items)], sampling))
        alone += [([*query, *item], requested) for item in items]
    ours, stats = scores(group, packed, limits, at_once=at_once)
    if case == "prefix hit":
        assert stats.total_prefix_hit_tokens == 3 * (75 // PAGE_SIZE * PAGE_SIZE)
    expected, _ = scores(group, alone, limits, at_once=True)
    assert ours.shape == expected.shape == (39, len(LABELS))
    assert len(expected.unique(dim=0)) == 39, "items that nothing tells apart"
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


# What a group takes, and how texts become prompts with items


def _taken(
    model: Any,
    prefill: str = "torch_native",
    decode: str = "torch_native",
    numerics: str = "fast",
    **scheduler: int,
) -> int:
    config = EngineConfig(
        model="m",
        device="cpu" if decode in ("cpu", "torch_native") else "cuda",
        dtype="bfloat16",
        numerics=numerics,
        attention=AttentionConfig(prefill_backend=prefill, decode_backend=decode),
        scheduler=SchedulerConfig(**scheduler),
    )
    return max_item_tokens(config, cast(ModelConfig, model))


def _layers(*windows: int | None, features: frozenset[Feature] = frozenset()) -> SimpleNamespace:
    mixers = [
        SimpleNamespace(window=window, chunk=None, features=features, head_dim=64, token_elements={Axis.KV_HEADS: 64})
        for window in windows
    ]
    layers = [SimpleNamespace(mixer=mixer) for mixer in mixers]
    return SimpleNamespace(layers=layers, all_layers=layers, has_states=False)


def test_a_group_takes_as_many_items_as_a_step_has_room_for_and_windows_and_backends_allow() -> None:
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "prefill_chunk_size": 512}
    assert _taken(_layers(None), **sizes) == 224
    assert _taken(_layers(None), **{**sizes, "prefill_chunk_size": 100}) == 100
    assert _taken(_layers(None), **{**sizes, "max_num_batched_tokens": 1 << 20, "prefill_chunk_size": 1 << 20}) == 2048
    assert _taken(_layers(None, 128, 200), **sizes) == 128
    assert _taken(_layers(None, features=frozenset({Feature.CHUNK})), **sizes) == 0
    assert _taken(_layers(None), "fa3", "fa3", **sizes) == 0
    assert _taken(_layers(None), "fa3", "triton", **sizes) == 224
    assert _taken(_layers(None), "cpu", "cpu", "exact", **sizes) == 224


def test_a_group_takes_no_items_where_its_numerics_or_its_layers_leave_no_backend_masks() -> None:
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "prefill_chunk_size": 512}
    assert _taken(_layers(None), "triton", "triton", "exact", **sizes) == 0
    latents = _layers(None, features=frozenset({Feature.LATENT}))
    assert _taken(latents, "triton", "flashinfer", **sizes) == 224
    assert _taken(latents, "flashinfer", "flashinfer", **sizes) == 0


@pytest.mark.parametrize(
    ("prompts", "most", "max_model_len", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4, 5]], 9, 99, [([1, 2, 3, 4, 5], (1, 2))]),
        ([[1, 2, 3], [1, 2, 4, 5], [1, 2, 6]], 3, 99, [([1, 2, 3, 4, 5], (1, 2)), ([1, 2, 6], ())]),
        ([[1, 2, 3], [1, 2, 4, 5], [1, 2, 6]], 9, 6, [([1, 2, 3, 4, 5], (1, 2)), ([1, 2, 6], ())]),
        # The query itself; and twice the same.
        ([[1, 2], [1, 2, 3], [1, 2]], 9, 99, [([1, 2, 2, 3, 2], (1, 2, 1))]),
        ([[1, 2, 3]], 9, 99, [([1, 2, 3], ())]),
        ([[1, 2], [3, 2]], 9, 99, [([1, 2], ()), ([3, 2], ())]),
        ([[1], [1, 2]], 9, 99, [([1], ()), ([1, 2], ())]),
        ([[1, 2], [1, 3, 4, 5]], 2, 99, [([1, 2], ()), ([1, 3, 4, 5], ())]),
        ([[1, 2], [1, 3]], 0, 99, [([1, 2], ()), ([1, 3], ())]),
    ],
)
def test_texts_that_begin_alike_become_one_prompt(
    prompts: list[list[int]], most: int, max_model_len: int, expected: list[tuple[list[int], tuple[int, ...]]]
) -> None:
    assert grouped(prompts, most, max_model_len) == [Group(*group) for group in expected]


def test_a_prompt_has_no_more_items_than_a_step() -> None:
    groups = grouped([[1, i] for i in range(VOCAB * 20)], 10_000, 100_000)
    assert [len(group.item_lens) for group in groups] == [MAX_ITEMS, VOCAB * 20 - MAX_ITEMS]
