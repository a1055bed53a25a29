"""Models with recurrent layers: their states over long prompts, however these are cut, and in the prefix cache.

tests/whole/test_family_answers.py compares the same small models with transformers over short prompts.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cluster.engine.resizing import Resized
from cluster.messages.engine import Miss, SamplingParams
from cluster.scheduling.drafter import StepTimes
from cluster.serve.running_engine import RunningEngine
from configs.recurrent import STATE_CHUNK, STATE_INTERVAL
from configs.schema import SpeculationConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import most_nodes
from parallel.plan import ShardPlan
from tests.helpers.families import FAMILIES, Case, case_of
from tests.helpers.family_checks import Rank
from tests.helpers.local_group import MAX_STATES, Answers, Limits, LocalGroup
from tests.helpers.rank_threads import on_ranks
from tests.helpers.streams import chunks_of
from tests.whole.test_failure import running as running_engine
from tests.whole.test_recovery import DRAWN, PROMPT, answer, answer_struck, drawn, status

RECURRENT = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "kimi_linear", "kimi_linear_recurrent"),
    *("granite_4", "granite_4_experts", "nemotron_h", "falcon_h1", "falcon_h1_norm"),
)
OF_KINDS = "qwen3_5", "kimi_linear", "granite_4", "lfm2"
"""A family of each kind of recurrent layer. The scheduler does not know the kinds: these are enough where it decides.
The others differ in what is around the layers, so they are in a test of each way through a layer."""
LONG = 200
NUM_PAGES = 640
NGRAMS = SpeculationConfig(method="ngram", num_speculative_tokens=5)


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, count).tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: case_of(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module", params=RECURRENT)
def case(request: pytest.FixtureRequest, made: Callable[[str], Case]) -> Case:
    return made(request.param)


of_kinds = pytest.mark.parametrize("case", OF_KINDS, indirect=True)


def _logits(
    case: Case, tp_size: int, tokens: list[int], cuts: list[int], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Every rank's logits [len(tokens), vocab] of a row that is computed in these pieces, beside another row, in exact
    numerics."""
    others = tokens_of(9, len(tokens))

    def body(group: TensorParallelGroup) -> torch.Tensor:
        rank, parts = Rank.create(case, group, dtype, exact=True, max_tokens=len(tokens) + 20), []
        for first, stop in itertools.pairwise(cuts):
            rows = [(2, first, others[first:stop]), (1, first, tokens[first:stop])]
            parts.append(rank.logits(rows if first % 2 else rows[::-1])[first % 2])
        return torch.cat(parts)

    return on_ranks(tp_size, body)


def _cuts(length: int, size: int) -> list[int]:
    return [*range(0, length, size), length]


@pytest.mark.parametrize(
    ("case", "length", "size"),
    [
        *((name, 1000, 1000) for name in OF_KINDS),
        # A token of each step is the slowest, and 140 tokens are two states and some.
        *((name, 140, 1) for name in OF_KINDS),
        *((name, LONG, size) for name in OF_KINDS for size in (63, 64)),
        *((name, LONG, size) for name in RECURRENT for size in (7, 65, LONG)),
        *(
            pytest.param(name, LONG, size, marks=pytest.mark.slow)
            for name in RECURRENT
            for size in (1, 63, 64)
            if name not in OF_KINDS
        ),
    ],
    indirect=["case"],
)
def test_logits_equal_transformers_however_a_prompt_is_cut(case: Case, length: int, size: int) -> None:
    tokens = tokens_of(1, length)
    with torch.inference_mode():
        expected = case.hf(torch.tensor([tokens])).logits[0]
    [ours] = _logits(case, 1, tokens, _cuts(length, size))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "tp_size", "dtype"),
    [
        *((name, 2, torch.bfloat16) for name in RECURRENT),
        *((name, 3, torch.float32) for name in RECURRENT),
        *((name, 3, torch.bfloat16) for name in OF_KINDS),
    ],
    indirect=["case"],
)
def test_bits_do_not_depend_on_ranks_and_cuts(case: Case, tp_size: int, dtype: torch.dtype) -> None:
    tokens = tokens_of(2, LONG)
    [expected] = _logits(case, 1, tokens, [0, LONG], dtype)
    for cuts in ([0, 1, 64, 100, 127, 129, LONG], _cuts(LONG, 50)):
        for ours in _logits(case, tp_size, tokens, cuts, dtype):
            assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


@contextmanager
def running(case: Case, tp_size: int = 1, speculation: SpeculationConfig | None = None) -> Iterator[LocalGroup]:
    more = {} if speculation is None else {"speculation": speculation}
    group = LocalGroup(case.path, tp_size, num_pages=NUM_PAGES, max_model_len=2048, **more)
    try:
        yield group
    finally:
        group.close()


@pytest.fixture(scope="module")
def group(case: Case) -> Iterator[LocalGroup]:
    """One rank with the case's model."""
    with running(case) as group:
        yield group


def answers(
    group: LocalGroup,
    prompts: list[list[int]],
    *,
    at_once: bool = True,
    bias: tuple[tuple[int, float], ...] = (),
    max_tokens: int = 6,
    **limits: object,
) -> Answers:
    """Greedy answers, or with a bias sampled ones, with their log probabilities."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=float(bool(bias)), ignore_eos=True, logit_bias=bias, num_logprobs=0
    )
    how = Limits(**{"num_pages": NUM_PAGES, **limits})  # type: ignore[arg-type]
    return group.generate([(prompt, sampling) for prompt in prompts], how, at_once=at_once)


def said(found: Answers) -> list[list[float]]:
    """The tokens of each answer, and then their log probabilities: a wrong state seldom changes a token."""
    return [[*of, *(it.logprob for it in logprobs)] for of, logprobs in zip(found.tokens, found.logprobs, strict=True)]


def alone(group: LocalGroup, prompts: list[list[int]], **how: object) -> list[Any]:
    """What `said` is for each of the prompts, when nothing else is computed."""
    found = [said(answers(group, [prompt], prefix_caching=False, **how))[0] for prompt in prompts]
    return [pytest.approx(one, abs=1e-4) for one in found]


@of_kinds
def test_preemptions_and_chunks_change_no_token(group: LocalGroup) -> None:
    prompts = [tokens_of(seed, length) for seed, length in enumerate((1, 60, 63, 64, 65, 129, 170))]
    expected = alone(group, prompts, max_tokens=20)
    assert said(answers(group, prompts, max_tokens=20, chunk=48)) == expected
    few_pages = answers(group, prompts, max_tokens=20, num_pages=24)
    assert said(few_pages) == expected
    assert few_pages.stats.total_preemptions


@of_kinds
def test_drafts_change_no_token(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of three tokens, mostly of one, repeat themselves: n-grams find drafts, which are right now and then, and
    wrong where a state is due."""
    # What steps take on a busy machine would choose for itself.
    monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))
    bias = ((5, 102.0), (6, 100.0), (7, 100.0))
    prompts = [[5, 6, 7, *tokens_of(seed, length)] for seed, length in enumerate((41, 45, 49, 53, 57, 120))]
    with running(case, 2, NGRAMS) as group:
        how = {"bias": bias, "max_tokens": 28}
        expected = alone(group, prompts, **how)
        num_rejected = 0
        for at_once in (True, False):
            times = 1 if at_once else 2
            sent = prompts * times
            drafted = answers(group, sent, at_once=at_once, speculation=NGRAMS, prefix_caching=True, **how)
            assert said(drafted) == expected * times
            assert drafted.stats.total_accepted
            num_rejected += drafted.stats.total_drafted - drafted.stats.total_accepted
        assert num_rejected


@pytest.mark.parametrize(
    ("case", "shared"),
    [
        *(("qwen3_5", shared) for shared in (64, 100, 127, 128, 200)),
        *((name, shared) for name in OF_KINDS[1:] for shared in (100, 128)),
    ],
    indirect=["case"],
)
def test_a_prompt_that_parts_from_a_cached_one_continues_from_its_state(group: LocalGroup, shared: int) -> None:
    """The second prompt finds no state where it parts from the first one. It leaves one there, for the third."""
    start = tokens_of(3, shared)
    prompts = [start + tokens_of(seed, 90) for seed in (4, 5, 6)]
    whole = shared // STATE_CHUNK * STATE_CHUNK
    expected = alone(group, prompts)
    found = answers(group, prompts, at_once=False, prefix_caching=True)
    assert said(found) == expected
    assert found.stats.total_prefix_hit_tokens >= whole
    # The second prompt found pages without a state after them, the third one found its state.
    assert found.stats.total_missed == {Miss.NO_STATE: whole}
    assert not found.stats.total_dropped_states
    assert said(answers(group, prompts, prefix_caching=True)) == expected
    few_states = answers(group, prompts, at_once=False, prefix_caching=True, num_states=1)
    assert said(few_states) == expected
    assert few_states.stats.total_dropped_states


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_a_long_prompt_leaves_states_inside_it_but_takes_no_others_place(group: LocalGroup) -> None:
    """The prompt has 15 chunks. When there is no room for the states of all, one for each 1,024 tokens stays."""
    short, long = tokens_of(10, 130), tokens_of(11, 1900)
    prompts = [short, long, short, long[:1500] + tokens_of(12, 90)]
    expected = alone(group, prompts)
    for count, num_hits in enumerate((0, 0, 128, 128 + STATE_INTERVAL), start=1):
        how = {"at_once": False, "prefix_caching": True, "num_states": 6, "chunk": 128}
        found = answers(group, prompts[:count], **how)
        assert said(found) == expected[:count]
        assert found.stats.total_prefix_hit_tokens == num_hits


@pytest.mark.parametrize(
    ("case", "length"),
    [
        *(("qwen3_5", length) for length in (64, 65, 127, 128, 130, 192)),
        *((name, length) for name in OF_KINDS[1:] for length in (65, 128)),
    ],
    indirect=["case"],
)
def test_the_same_prompt_finds_all_but_its_last_chunk(group: LocalGroup, length: int) -> None:
    prompt = tokens_of(7, length)
    found = answers(group, [prompt] * 2, at_once=False, prefix_caching=True)
    assert said(found) == alone(group, [prompt]) * 2
    assert found.stats.total_prefix_hit_tokens == (length - 1) // STATE_CHUNK * STATE_CHUNK


def test_equal_prompts_at_once_are_computed_once(group: LocalGroup) -> None:
    """All but the last chunk: the others wait for the first one's state."""
    prompt = tokens_of(7, 300)
    expected = alone(group, [prompt])
    found = answers(group, [prompt] * 4, prefix_caching=True, chunk=128)
    assert said(found) == expected * 4
    assert found.stats.total_prefix_hit_tokens == 3 * 256


@of_kinds
def test_the_turns_of_a_conversation_find_what_was_said_before(group: LocalGroup) -> None:
    """Answers too: a request that ends leaves its state."""
    prompt, sent = tokens_of(8, 70), list[list[int]]()
    for turn in range(4):
        sent.append(prompt)
        [answer] = answers(group, [prompt], max_tokens=20, prefix_caching=False).tokens
        prompt = prompt + answer + tokens_of(20 + turn, 30)
    found = answers(group, sent, max_tokens=20, at_once=False, prefix_caching=True)
    assert said(found) == alone(group, sent, max_tokens=20)
    # Each turn finds what whole chunks of the turn before allow, its answer without the last token.
    most = sum((len(prompt) + 19) // STATE_CHUNK * STATE_CHUNK for prompt in sent[:-1])
    assert found.stats.total_prefix_hit_tokens == most


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.exhaustive)], indirect=True)
def test_a_hundred_turns_of_agents_find_what_was_said_before(case: Case) -> None:
    """Five agents share a system prompt in part and take turns. With drafts and the prefix cache the answers are those
    without both. Every token that is found in the cache but not used is counted."""
    bias = ((5, 104.0), (6, 100.0), (7, 100.0))
    system = [5, 6, 7, *tokens_of(30, 500)]
    shared = (0, 100, 250, 400, 503)
    agents = [system[:count] + tokens_of(31 + agent, 60) for agent, count in enumerate(shared)]
    sent, said, possible = list[list[int]](), list[list[int]](), 0
    with running(case, 2, NGRAMS) as group:
        for turn in range(100):
            prompt = agents[agent := turn % len(agents)]
            [answer] = answers(group, [prompt], bias=bias, max_tokens=40, prefix_caching=False).tokens
            known = max((_num_equal(prompt[:-1], one) for one in said), default=0)
            possible += known // STATE_CHUNK * STATE_CHUNK
            sent.append(prompt)
            said.append(prompt + answer[:-1])
            agents[agent] = prompt + answer + tokens_of(50 + turn, 7 + turn % 30)
        how = {"bias": bias, "max_tokens": 40, "speculation": NGRAMS, "prefix_caching": True, "num_states": 16}
        found = answers(group, sent, at_once=False, **how)
        stats = found.stats
        assert [prompt + answer[:-1] for prompt, answer in zip(sent, found.tokens, strict=True)] == said
        assert 0 < stats.total_accepted < stats.total_drafted
        assert stats.total_prefix_hit_tokens >= 0.9 * possible
        assert stats.total_prefix_hit_tokens + stats.total_missed.get(Miss.NO_STATE, 0) == possible


def _num_equal(one: list[int], other: list[int]) -> int:
    """The number of leading tokens that two rows share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_request_continues_from_its_state_when_a_rank_is_replaced(
    ray_cluster: None, made: Callable[[str], Case], name: str
) -> None:
    """The state of whole chunks outlives a killed and a stopped process, so that few tokens are computed again."""
    path = made(name).path
    expected = drawn(path)

    async def main() -> None:
        async with running_engine(path, recovery={"max_rebuilds": 3}) as engine:
            for rebuilds, fault in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
                before = (await status(engine))["total_prefix_hit_tokens"]
                tokens, _ = await answer_struck(engine, 1, fault)
                assert tokens == expected
                after = await status(engine)
                assert after["num_rebuilds"] == rebuilds
                assert after["total_prefix_hit_tokens"] - before >= 3 * STATE_CHUNK
            size = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.3)
            assert (await engine.resize(3)).size == 3
            assert (await size)[0] == expected
            assert not (await status(engine))["num_owned_pages"]

    asyncio.run(main())


@pytest.mark.parametrize("case", ["qwen3_5", "granite_4", "lfm2"], indirect=True)
def test_states_take_the_bytes_that_the_plan_counts(case: Case) -> None:
    with running(case, 3) as group:
        assert answers(group, [[5]], prefix_caching=True).tokens
        for rank, worker in group.workers.items():
            assert worker._runner is not None
            pool = worker._runner.state_pool
            assert pool is not None
            of_rows = worker._plan.state_bytes(rank, worker._config)
            assert pool.num_bytes == of_rows + MAX_STATES * worker.kv_page_bytes().state


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "granite_4"])
def test_a_request_continues_from_its_state_with_more_and_with_fewer_ranks(
    ray_cluster: None, made: Callable[[str], Case], name: str
) -> None:
    """Only the tokens after the last stored state are computed again."""
    case, sampling = made(name), msgspec.structs.replace(DRAWN, num_logprobs=0)
    with running(case) as group:
        prompt = np.frombuffer(PROMPT, np.int32).tolist()
        [expected] = said(group.generate([(prompt, sampling)], Limits(NUM_PAGES), at_once=True))

    async def said_by(engine: RunningEngine) -> tuple[list[float], int]:
        """Returns an answer in the form of `said`, and how often its request was admitted again."""
        [stream] = engine.client.submit([PROMPT], [[sampling]])
        chunks = [chunk async for chunk in chunks_of(stream)]
        assert chunks[-1].finished is not None
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [it.logprob for chunk in chunks for it in chunk.logprobs or ()]
        return [*tokens, *logprobs], chunks[-1].finished.num_preemptions

    async def num_computed(engine: RunningEngine) -> int:
        """Prompt tokens that were computed so far, those of requests that were admitted again included."""
        now = await status(engine)
        return int(now["total_prompt_tokens"] - now["total_prefix_hit_tokens"])

    async def main() -> None:
        async with running_engine(case.path, tensor_parallel_size=2) as engine:
            for size in (3, 1):
                before, resizing = await num_computed(engine), asyncio.create_task(engine.resize(size))

                async def said_meanwhile(resizing: asyncio.Task[Resized] = resizing) -> list[int]:
                    nums_requeued = list[int]()
                    while not resizing.done():
                        found, num_requeued = await said_by(engine)
                        assert found == expected
                        nums_requeued.append(num_requeued)
                    return nums_requeued

                one, other = await asyncio.gather(said_meanwhile(), said_meanwhile())
                assert resizing.result().size == size
                assert sum(one + other) > 0, "no request ran during the resize"
                num_again = await num_computed(engine) - before - len(prompt) * len(one + other)
                assert 0 < num_again <= sum(one + other) * STATE_CHUNK

    asyncio.run(main())


def test_exact_sums_of_layers_without_attention_are_counted(case: Case) -> None:
    """Ranks ask for the largest number before they make their group."""
    assert most_nodes(ShardPlan.create(case.model, 3, exact=True)) > 1


def test_recurrent_families_are_all_here(made: Callable[[str], Case]) -> None:
    assert [name for name in FAMILIES if made(name).model.has_states] == list(RECURRENT)
