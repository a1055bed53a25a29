"""The scheduler against a fake model: what every request gets, and what each step may cost."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.messages.engine import Finished, FinishReason, GenerateRequest, Miss, SamplingParams
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.pages import RowPages
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.request import Request
from cluster.scheduling.row_table import RowTable
from configs.errors import ConfigError, EngineError
from configs.schema import NO_SPECULATION, SpeculationConfig
from tests.helpers.fake_engine import EOS, LIMITS, VOCAB, Engine, prompt_of, prompt_stopping_at
from worker.protocol import RowFlag, StepResult

HEAD = SpeculationConfig(method="eagle3", model="head", num_speculative_tokens=3)


def run_random_load(
    seed: int,
    steps_in_flight: int,
    *,
    windows: bool = False,
    faults: float = 0.0,
    changes: float = 0.0,
    resizes: bool = False,
    speculation: SpeculationConfig = NO_SPECULATION,
) -> Engine:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    max_model_len = rng.choice([24, 48])
    limits = replace(
        LIMITS,
        page_size=page_size,
        num_pages=rng.choice([1, 2, 4]) * max_model_len // page_size,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 40]),
        prefill_chunk_size=rng.choice([1, 5, 8, 40]),
        max_model_len=max_model_len,
        max_prompt_logprobs=rng.choice([1, 7, 100]),
        steps_in_flight=steps_in_flight,
        enable_prefix_caching=rng.random() < 0.8,
    )
    if speculation.num_drafts:
        limits = replace(limits, max_num_batched_tokens=40, speculation=speculation)
    if windows:
        limits = replace(limits, window=rng.choice([1, 3, 8, 17]), num_window_pages=limits.num_pages)
        most, least = limits.num_pages, limits.max_window_pages_per_row
        limits = replace(limits, num_window_pages=min(most, least + rng.choice([0, 1, 4, most // 3])))
    engine = Engine(limits)
    stems = [prompt_of(rng.randrange(1, max_model_len - 2), stem) for stem in range(3)]
    for _ in range(150):
        event = rng.random()
        if event < 0.25:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, len(stem) + 1)] + prompt_of(rng.randrange(3), rng.randrange(4))
            salt = rng.choice([b"", b"", b"", b"a"])
            for _ in range(rng.choice([1, 1, 3])):
                fields: dict[str, Any] = dict(  # noqa: C408
                    cache_salt=salt,
                    level=len(engine.answers) % 4 // 3,
                    priority=rng.choice([0, 0, 0, 1, -1]),
                    deadline_s=rng.choice([0, 0, 0, 0, 0, 0, 0, 0, 0, 0.2]),
                    client=rng.choice("abc"),
                    max_tokens=rng.choice([1, 2, 3, 10, 100]),
                    ignore_eos=rng.random() < 0.5,
                    stop_token_ids=rng.choice([(), (), (3, 5)]),
                    prompt_logprobs=rng.choice([-1, -1, -1, 0, 2]),
                    grammar=rng.choice([None, None, None, "rule"]),
                    seed=rng.randrange(2),
                )
                if speculation.num_drafts:
                    fields["num_logprobs"] = rng.choice([-1, 0])
                    fields["min_tokens"] = 0 if fields["grammar"] else rng.choice([0, 3])
                engine.add(prompt[: max_model_len - 1], **fields)
        elif event < 0.32 and engine.answers:
            engine.abort(*rng.choices(range(1, len(engine.answers) + 3), k=rng.randrange(1, 4)))
        elif event < 0.35:
            engine.take(engine.scheduler.drain_finished())
        elif event < 0.36:
            engine.scheduler.flush_cache()
        elif event < 0.7:
            engine.launch()
        elif engine.frames:
            engine.retire()
        if faults and rng.random() < faults:
            if resizes:
                engine.requeue_all(other_pools(limits, rng))
            else:
                engine.requeue_all(keeps_kv=rng.random() < 0.7)
        if changes and rng.random() < changes:
            engine.change_weights(rng.choice(["continue", "continue", "finish", "recompute"]))
    engine.run()
    return engine


def other_pools(limits: SchedulerLimits, rng: random.Random) -> SchedulerLimits:
    """Limits with other numbers of pages, each at least what a single request may need."""
    num_pages = rng.choice([1, 2, 4]) * limits.max_model_len // limits.page_size
    if limits.num_window_pages is None:
        return replace(limits, num_pages=num_pages)
    least = limits.max_window_pages_per_row
    return replace(limits, num_pages=num_pages, num_window_pages=rng.randint(least, max(least, num_pages)))


random_load = functools.cache(run_random_load)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_one_request_gets_the_reference_answer(steps_in_flight: int) -> None:
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight))
    engine.add(prompt_of(21), max_tokens=9)
    engine.run()


@pytest.mark.parametrize(("seed", "steps_in_flight"), [*((seed, 2) for seed in range(12)), (12, 1), (13, 1), (14, 1)])
def test_every_answer_equals_the_reference_under_random_load(seed: int, steps_in_flight: int) -> None:
    random_load(seed, steps_in_flight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "steps_in_flight"),
    [
        *((seed, 1 + seed % 3) for seed in range(1000, 1025)),
        *(pytest.param(seed, steps, marks=pytest.mark.exhaustive) for seed in range(1025, 1150) for steps in (1, 2, 3)),
    ],
)
def test_every_answer_equals_the_reference_under_more_random_load(seed: int, steps_in_flight: int) -> None:
    run_random_load(seed, steps_in_flight)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("steps_in_flight", "speculation", "windows"),
    [(1, NO_SPECULATION, False), (2, NO_SPECULATION, False), (2, HEAD, False), (2, NO_SPECULATION, True)],
)
def test_every_answer_equals_the_reference_though_the_ranks_are_lost(
    seed: int, steps_in_flight: int, speculation: SpeculationConfig, windows: bool
) -> None:
    run_random_load(seed, steps_in_flight, speculation=speculation, windows=windows, faults=0.1)


def test_random_faults_leave_pages_that_others_go_on_with() -> None:
    assert sum(run_random_load(seed, 2, faults=0.1).num_kept_pages for seed in range(3)) > 50


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_ranks_that_keep_their_kv_compute_again_what_was_in_flight_alone(steps_in_flight: int) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=64, prefill_chunk_size=64, steps_in_flight=steps_in_flight)
    engine = Engine(limits)
    for seed in range(3):
        engine.add(prompt_of(16, seed), max_tokens=20, seed=seed)
    for _ in range(10):
        engine.step()
    while engine.launch() is not None:
        pass
    num_known = [len(it.prompt) + len(it.tokens) for it in engine.answers.values()]
    engine.requeue_all(keeps_kv=True)
    frame = engine.launch()
    assert frame is not None
    # The last known token has no KV yet, and a page that is not full is not kept.
    assert frame.starts.tolist() == [(num - 1) // limits.page_size * limits.page_size for num in num_known]
    assert (frame.starts + frame.lens).tolist() == num_known
    engine.run()


def test_pages_that_a_lost_step_was_computing_are_found_by_nobody() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=64, prefill_chunk_size=16))
    engine.add(prompt_of(40), max_tokens=2)
    engine.step()
    engine.launch()  # its whole pages are in the cache from now on
    engine.requeue_all(keeps_kv=True)
    assert engine.num_kept_pages == 4
    engine.run()


@pytest.mark.parametrize(("seed", "windows"), [(0, False), (1, False), (2, True)])
def test_every_answer_equals_the_reference_though_pools_of_other_sizes_take_over(seed: int, windows: bool) -> None:
    run_random_load(seed, 2, windows=windows, faults=0.1, resizes=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(1000, 1012), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1012, 1060))]
)
def test_every_answer_equals_the_reference_though_the_ranks_are_lost_often(seed: int) -> None:
    run_random_load(seed, 2, windows=seed % 2 == 1, faults=0.3)


@pytest.mark.parametrize("salt", [b"", b"a"])
def test_nothing_that_was_computed_before_a_change_of_weights_is_found_after_it(salt: bytes) -> None:
    engine = Engine(LIMITS)
    first = engine.add(prompt_of(12), max_tokens=30, cache_salt=salt)
    begun = engine.add(prompt_of(3), max_tokens=30, cache_salt=salt)  # it has no whole page yet
    for _ in range(3):
        engine.step()
    engine.change_weights("continue")
    assert engine.scheduler.stats().num_running == 2
    second = engine.add(prompt_of(12), max_tokens=30, cache_salt=salt)
    for _ in range(15):
        engine.step()
    third = engine.add(prompt_of(12), cache_salt=salt)
    fourth = engine.add([*prompt_of(3), *engine.answers[begun].tokens[:9]], cache_salt=salt)
    engine.run()
    assert [engine.answers[it].cached for it in (first, second, third, fourth)] == [0, 0, 8, 0]


@pytest.mark.parametrize("seed", range(2000, 2006))
def test_every_answer_equals_the_reference_though_weights_change_often(seed: int) -> None:
    engine = run_random_load(seed, 2, speculation=(NO_SPECULATION, HEAD)[seed % 2], windows=seed % 3 == 1, changes=0.1)
    assert engine.num_changes > 5


def test_requests_of_lost_ranks_go_on_in_their_order_before_those_that_waited() -> None:
    engine = Engine(replace(LIMITS, num_pages=48, max_num_seqs=3, max_num_batched_tokens=64, prefill_chunk_size=16))
    for seed in range(5):
        engine.add(prompt_of(16, seed), max_tokens=20, seed=seed)
    for _ in range(3):
        engine.launch()
        engine.retire()
    engine.launch()
    engine.requeue_all()
    frame = engine.launch()
    assert frame is not None
    assert (frame.generation, frame.step) == (2, 5)
    assert frame.params["seed"].tolist() == [0, 1, 2]
    assert frame.lens.tolist() == [16, 16, 16]  # and the tokens told since come with the next chunk
    engine.run()


def test_random_load_reaches_preemption_eviction_hits_and_every_finish() -> None:
    engines = [random_load(seed, 2) for seed in range(12)]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(stat.total_preemptions for stat in stats) > 10
    assert sum(stat.total_prefix_hit_tokens for stat in stats) > 500
    reasons = {answer.finished.reason for engine in engines for answer in engine.answers.values() if answer.finished}
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR} <= reasons
    assert sum(stat.total_expired for stat in stats) > 10
    assert sum(len(answer.scores) for engine in engines for answer in engine.answers.values()) > 1000
    guided = [answer for engine in engines for answer in engine.answers.values() if answer.sampling.grammar]
    ends = [answer.finished for answer in guided if answer.finished]
    assert sum(end.reason is FinishReason.STOP and end.stop_token_id is None for end in ends) > 10
    assert sum(end.error_code == "grammar_error" for end in ends) > 3
    assert sum(end.num_preemptions for end in ends) > 3


def test_the_same_calls_give_the_same_bytes() -> None:
    assert run_random_load(3, 2).log == random_load(3, 2).log


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_eos_ends_a_request_at_any_place(index: int, steps_in_flight: int) -> None:
    prompt, seed = prompt_stopping_at(index)
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight))
    # The last EOS also uses up max_tokens: the token is the reason given.
    for max_tokens in (index + 1, index + 2, 20):
        engine.add(prompt, max_tokens=max_tokens, seed=seed, ignore_eos=False)
    engine.run()
    for answer in engine.answers.values():
        assert len(answer.tokens) == index + 1
        assert answer.finished == Finished(id=answer.finished.id, reason=FinishReason.STOP, stop_token_id=EOS)  # type: ignore[union-attr]


def test_ignore_eos_and_stop_token_ids_are_per_request() -> None:
    prompt, seed = prompt_stopping_at(1)
    engine = Engine(LIMITS)
    goes_on = engine.add(prompt, max_tokens=4, seed=seed, ignore_eos=True)
    asked = engine.add(prompt, max_tokens=4, seed=seed, ignore_eos=True, stop_token_ids=(EOS,))
    engine.run()
    assert len(engine.answers[goes_on].tokens) == 4
    assert len(engine.answers[asked].tokens) == 2


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_max_tokens_one_takes_one_step_and_wastes_none(steps_in_flight: int) -> None:
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight))
    request_id = engine.add(prompt_of(5), max_tokens=1)
    engine.run()
    assert len(engine.answers[request_id].tokens) == 1
    assert engine.scheduler.last_step == 1


def test_length_finishes_waste_no_step_and_token_finishes_at_most_one() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(6), max_tokens=5)
    engine.run()
    assert engine.scheduler.last_step == 5
    prompt, seed = prompt_stopping_at(2)
    engine = Engine(LIMITS)
    engine.add(prompt, max_tokens=20, seed=seed, ignore_eos=False)
    engine.run()
    assert engine.scheduler.last_step == 4


def test_a_full_context_ends_with_length() -> None:
    engine = Engine(LIMITS)
    request_id = engine.add(prompt_of(LIMITS.max_model_len - 3), max_tokens=100)
    engine.run()
    assert len(engine.answers[request_id].tokens) == 3


def test_the_pipeline_never_stalls_between_prefill_and_decode() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(12), max_tokens=6)
    for _ in range(7):  # 8 + 4 prompt tokens, then five decodes
        assert engine.launch() is not None
        if len(engine.frames) == 2:
            engine.retire()
    engine.run()
    assert engine.scheduler.last_step == 7


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=9, steps_in_flight=1))
    running = engine.add(prompt_of(4), max_tokens=20)
    engine.step()
    engine.add(prompt_of(40, 1), max_tokens=2)
    for num_tokens in range(2, 7):
        engine.step()
        assert len(engine.answers[running].tokens) == num_tokens
    engine.run()


def test_a_chunk_that_is_not_the_last_is_not_sampled() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=64))
    engine.add(prompt_of(20), max_tokens=2)
    frames = [engine.launch(), engine.launch()]
    engine.retire()
    frames.append(engine.launch())
    assert [(f.starts.tolist(), f.lens.tolist(), f.flags.tolist()) for f in frames if f] == [
        ([0], [8], [RowFlag.HAS_TOKENS]),
        ([8], [8], [RowFlag.HAS_TOKENS]),
        ([16], [4], [RowFlag.HAS_TOKENS | RowFlag.SAMPLE]),
    ]
    engine.run()


def test_steps_are_halved_down_to_what_rows_need_at_once() -> None:
    engine = Engine(
        replace(LIMITS, max_num_batched_tokens=64, prefill_chunk_size=64, max_num_seqs=4, max_item_tokens=5)
    )
    assert [engine.scheduler.halve_steps() for _ in range(4)] == [32, 16, 9, 9]
    engine.add(prompt_of(40), max_tokens=2)
    frame = engine.launch()
    assert frame is not None
    assert frame.lens.tolist() == [8], "two whole pages"
    engine.run()
    engine = Engine(replace(LIMITS, max_num_batched_tokens=3, max_num_seqs=4))
    assert engine.scheduler.halve_steps() == 3, "no more than it was"


def test_several_prompts_are_prefilled_in_one_step() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=24))
    for seed in range(3):
        engine.add(prompt_of(8, seed), max_tokens=2)
    frame = engine.launch()
    assert frame is not None
    assert frame.lens.tolist() == [8, 8, 8]
    assert len(frame.params) == 3
    engine.run()


def test_more_running_requests_than_the_token_budget_are_never_admitted() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=3))
    for seed in range(6):
        engine.add(prompt_of(5, seed), max_tokens=8)
    while engine.step():
        assert engine.scheduler.stats().num_running <= 3
    engine.check_idle()


def test_two_cold_twins_in_one_step_keep_apart_and_free_their_duplicates() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=64, prefill_chunk_size=32))
    # Alike in two pages of five: too little for the second one to wait for the first.
    twins = [engine.add(prompt_of(8) + prompt_of(10, seed), max_tokens=6) for seed in (1, 2)]
    frame = engine.launch()
    assert frame is not None
    assert frame.lens.tolist() == [18, 18]
    assert len(np.unique(frame.page_deltas[:, 2])) == len(frame.page_deltas) == 10
    engine.run()
    assert [engine.answers[twin].cached for twin in twins] == [0, 0]
    # 18 + 6 tokens each, of which 23 were computed: five whole pages, the first two once.
    assert engine.scheduler.stats().num_cached_pages == 8


@pytest.mark.parametrize(("num_prompt_tokens", "num_steps"), [(18, 3), (40, 5)])
def test_siblings_wait_for_the_first_one_and_compute_only_their_last_page(
    num_prompt_tokens: int, num_steps: int
) -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=40, prefill_chunk_size=16))
    ids = [engine.add(prompt_of(num_prompt_tokens), max_tokens=2, seed=seed) for seed in range(5)]
    engine.run()
    assert [engine.answers[i].cached for i in ids] == [0] + 4 * [(num_prompt_tokens - 1) // 4 * 4]
    # All of them follow at once, as soon as the pages they may share are computed; then comes one decode.
    assert engine.scheduler.last_step == num_steps


@pytest.mark.parametrize(("num_prompt_tokens", "num_shared"), [(500, 31), (520, 32)])
def test_eight_answers_to_one_prompt_keep_its_whole_pages_once(num_prompt_tokens: int, num_shared: int) -> None:
    limits = {"page_size": 16, "num_pages": 600, "max_num_batched_tokens": 1024, "max_model_len": 1024}
    engine = Engine(replace(LIMITS, **limits, prefill_chunk_size=1024))  # type: ignore[arg-type]
    ids = [engine.add(prompt_of(num_prompt_tokens), max_tokens=20, seed=seed) for seed in range(8)]
    while not all(engine.answers[i].tokens for i in ids):
        engine.step()
    # The page that the prompt ends in is each answer's own.
    assert limits["num_pages"] - engine.scheduler.stats().num_free_pages == num_shared + 8
    engine.run()


def test_a_prompt_that_parts_later_takes_over_what_another_prefill_has_computed_so_far() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=24, prefill_chunk_size=8, steps_in_flight=1))
    first = engine.add(prompt_of(40), max_tokens=2)
    engine.step()
    second = engine.add(prompt_of(32) + prompt_of(8, 1), max_tokens=2)
    engine.run()
    assert (engine.answers[first].cached, engine.answers[second].cached) == (0, 32)


def test_a_repeated_prompt_computes_only_its_last_page() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(24), max_tokens=3)
    engine.run()
    again = engine.add(prompt_of(24), max_tokens=3)
    longer = engine.add(prompt_of(30), max_tokens=3)
    engine.run()
    # At least one token is computed: the sixth page would be the whole prompt.
    assert engine.answers[again].cached == 20
    assert engine.answers[longer].cached == 24


def test_prompts_of_different_salts_share_no_page() -> None:
    engine = Engine(LIMITS)
    prompt = prompt_of(24)
    cached: list[int | None] = []
    for salt in (b"", b"mine", b"", b"mine", b"yours"):
        request_id = engine.add(prompt, max_tokens=3, cache_salt=salt)
        engine.run()
        cached.append(engine.answers[request_id].cached)
    assert cached == [0, 0, 20, 20, 0]
    # In one step too, where a prompt waits for one that computes the same.
    ids = [engine.add(prompt_of(24, 1), max_tokens=3, cache_salt=salt) for salt in (b"", b"mine", b"mine")]
    engine.run()
    assert [engine.answers[i].cached for i in ids] == [0, 0, 20]


def test_tokens_that_the_cache_has_or_had_are_counted_where_they_are_not_used() -> None:
    engine = Engine(LIMITS)
    prompt = prompt_of(24)
    for salt in (b"", b"mine", b""):
        engine.add(prompt, max_tokens=3, cache_salt=salt)
        engine.run()
    assert engine.scheduler.stats().total_missed == {Miss.OTHER_SALT: 20}
    while engine.scheduler.stats().num_free_pages > 4:
        engine.add(prompt_of(40, len(engine.answers)), max_tokens=3)
        engine.run()
    for seed in range(100, 102):
        engine.add(prompt_of(56, seed), max_tokens=3)
        engine.run()
    again = engine.add(prompt, max_tokens=3)
    missed = list[dict[Miss, int]]()
    while engine.scheduler.has_work:
        engine.launch()
        missed += [it.missed for it in engine.retire().prefilled]
    cached = engine.answers[again].cached
    assert cached is not None
    assert cached < 20
    assert missed == [{Miss.EVICTED: 20 - cached}], "a client is not told of other salts"
    assert engine.scheduler.stats().total_missed == {Miss.OTHER_SALT: 20, Miss.EVICTED: 20 - cached}


def test_a_second_turn_reuses_the_first_turns_answer() -> None:
    engine = Engine(LIMITS)
    first = engine.add(prompt_of(10), max_tokens=12)
    engine.run()
    second = engine.add([*prompt_of(10), *engine.answers[first].tokens, 1, 2], max_tokens=3)
    engine.run()
    assert engine.answers[second].cached == 20  # 21 of the 22 tokens were computed


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = Engine(replace(LIMITS, enable_prefix_caching=False))
    for _ in range(3):
        engine.add(prompt_of(24), max_tokens=3)
        engine.run()
    stats = engine.scheduler.stats()
    assert (stats.num_cached_pages, stats.total_prefix_hit_tokens) == (0, 0)
    assert stats.num_free_pages == LIMITS.num_pages


def test_a_flush_forgets_what_no_running_request_uses() -> None:
    engine = Engine(LIMITS)
    ended = engine.add(prompt_of(33, 1), max_tokens=1)
    engine.run()
    running = engine.add(prompt_of(33, 2), max_tokens=20)
    engine.launch()
    engine.scheduler.flush_cache()
    engine.scheduler.check_integrity()
    assert engine.scheduler.stats().num_evictable_pages == 0
    engine.run()
    again, after = engine.add(prompt_of(33, 1), max_tokens=1), engine.add(prompt_of(33, 2), max_tokens=1)
    engine.run()
    assert [engine.answers[i].cached for i in (ended, running, again, after)] == [0, 0, 0, 32]


def test_eviction_spares_the_prefix_of_running_requests() -> None:
    engine = Engine(replace(LIMITS, num_pages=16, max_num_seqs=2))
    shared = prompt_of(16)
    engine.add(shared, max_tokens=2)
    engine.run()
    holder = engine.add([*shared, 1], max_tokens=30)
    engine.launch()
    for seed in range(1, 6):
        engine.add(prompt_of(16, seed), max_tokens=2)
    engine.run()
    assert engine.answers[holder].cached == 16


def test_a_pool_too_small_for_all_preempts_the_newest_and_loses_nothing() -> None:
    engine = Engine(replace(LIMITS, num_pages=14, max_num_batched_tokens=64))
    ids = [engine.add(prompt_of(8, seed), max_tokens=30, seed=seed) for seed in range(4)]
    finished: list[int] = []
    while engine.step():
        finished += [i for i in ids if engine.answers[i].finished and i not in finished]
    engine.check_idle()
    assert engine.scheduler.stats().total_preemptions > 0
    assert finished == ids[: len(finished)], "the oldest must finish first"


def test_a_preempted_request_is_admitted_before_those_that_wait() -> None:
    engine = Engine(replace(LIMITS, num_pages=12, max_num_seqs=2, max_num_batched_tokens=64, steps_in_flight=1))
    for seed, max_tokens in enumerate((20, 20, 2)):
        engine.add(prompt_of(16, seed), max_tokens=max_tokens, seed=seed)
    admitted: list[int] = []
    while engine.launch() is not None:
        admitted += engine.frames[-1].params["seed"].tolist()
        engine.retire()
    engine.check_idle()
    assert admitted == [0, 1, 1, 2]


def test_pages_that_a_prefill_still_needs_are_not_given_to_the_next_request() -> None:
    engine = Engine(replace(LIMITS, num_pages=16, max_num_batched_tokens=64))
    for seed in range(2):
        engine.add(prompt_of(40, seed), max_tokens=4)
    engine.run()
    assert engine.scheduler.stats().total_preemptions == 0


def test_a_head_that_lacks_pages_is_let_in_when_a_siblings_prefill_brings_them() -> None:
    engine = Engine(replace(LIMITS, num_pages=16, max_num_batched_tokens=64, steps_in_flight=1))
    first, second = engine.add(prompt_of(40), max_tokens=12), engine.add(prompt_of(40), max_tokens=4)
    while not engine.answers[second].tokens:
        engine.step()
    assert engine.answers[first].finished is None
    engine.run()


def test_a_prefill_that_lacks_pages_takes_no_prefix_it_could_not_announce() -> None:
    limits = replace(LIMITS, num_pages=6, prefill_chunk_size=4)
    rows, pages = RowTable(limits), RowPages(limits)
    queue = PrefillQueue(limits, rows, pages)
    tokens = np.array(prompt_of(20), np.int32)
    sampling = SamplingParams(max_tokens=2)
    queue.push(Request.create(GenerateRequest(id=1, prompt=tokens.tobytes(), sampling=sampling), limits))
    queue.commit(queue.plan(4, 0.0), FrameBuilder())
    # Row 8 computes what comes next, and ends; then row 7 takes all but these two pages.
    assert pages.grow(8, 12) is not None
    pages.publish(8, tokens, 12)
    pages.release(8)
    assert pages.grow(7, 12) is not None
    pages.check_integrity()
    plan = queue.plan(8, 0.0)
    assert not plan.deltas or plan.rows
    assert pages.num_row_pages(1) == (2 if plan.rows else 1)


def test_a_duplicate_of_a_cold_twin_cannot_starve_a_request_that_fits_alone() -> None:
    engine = Engine(replace(LIMITS, num_pages=15, max_num_batched_tokens=64, prefill_chunk_size=64))
    twins = [engine.add(prompt_of(12) + prompt_of(13, seed), max_tokens=30) for seed in range(2)]
    engine.run()
    assert all(len(engine.answers[twin].tokens) == 30 for twin in twins)


def test_abort_while_queued_takes_no_step() -> None:
    engine = Engine(LIMITS)
    request_id = engine.add(prompt_of(5))
    engine.abort(request_id, request_id, 99)
    assert engine.launch() is None
    engine.take(engine.scheduler.drain_finished())
    assert engine.scheduler.drain_finished() is None
    engine.check_idle()


@pytest.mark.parametrize("num_launches", [1, 2])
def test_abort_while_prefilling_frees_everything(num_launches: int) -> None:
    engine = Engine(LIMITS)
    request_id = engine.add(prompt_of(40))
    for _ in range(num_launches):
        engine.launch()
    engine.abort(request_id)
    engine.run()
    assert engine.answers[request_id].tokens == []
    assert engine.scheduler.last_step == num_launches


def test_abort_while_decoding_frees_the_pages_once_no_step_names_them() -> None:
    engine = Engine(replace(LIMITS, enable_prefix_caching=False))
    request_id = engine.add(prompt_of(8), max_tokens=30)
    for _ in range(4):
        engine.step()
    engine.launch()
    engine.launch()
    engine.abort(request_id)
    engine.retire()
    assert engine.scheduler.stats().num_owned_pages > 0
    assert engine.scheduler.stats().num_running == 0
    engine.retire()
    engine.check_idle()


def test_a_page_that_ends_with_a_dropped_token_is_not_kept() -> None:
    engine = Engine(LIMITS)
    request_id = engine.add(prompt_of(5), max_tokens=30)
    for _ in range(4):
        engine.launch()
        if len(engine.frames) == 2 and engine.scheduler.last_step < 4:
            engine.retire()
    # Eight tokens are computed, but the host knows seven.
    engine.abort(request_id)
    engine.run()
    assert len(engine.answers[request_id].tokens) == 2
    assert engine.scheduler.stats().num_cached_pages == 1


def test_abort_in_the_wasted_step_after_a_stop_is_ignored() -> None:
    prompt, seed = prompt_stopping_at(0)
    engine = Engine(LIMITS)
    request_id = engine.add(prompt, max_tokens=9, seed=seed, ignore_eos=False)
    engine.launch()
    engine.launch()
    engine.retire()
    finished = engine.answers[request_id].finished
    assert finished is not None
    assert finished.reason is FinishReason.STOP
    engine.abort(request_id)
    engine.run()


def test_abort_of_a_request_whose_last_token_is_in_flight_drops_the_token() -> None:
    engine = Engine(LIMITS)
    request_id = engine.add(prompt_of(5), max_tokens=1)
    engine.launch()
    engine.abort(request_id)
    engine.run()
    assert engine.answers[request_id].tokens == []


def test_queue_limits_refuse_at_once_with_the_overload_code() -> None:
    engine = Engine(replace(LIMITS, max_num_queued_requests=2))
    ids = [engine.add(prompt_of(5, seed)) for seed in range(3)]
    refusal = engine.answers[ids[2]].finished
    assert refusal is not None
    assert (refusal.reason, refusal.error_code) == (FinishReason.ERROR, "engine_overloaded")
    assert "max_num_queued_requests=2" in (refusal.error or "")
    engine.run()
    engine = Engine(replace(LIMITS, max_num_queued_tokens=12))
    ids = [engine.add(prompt_of(length)) for length in (20, 5)]  # a long prompt may wait alone
    refusal = engine.answers[ids[1]].finished
    assert refusal is not None
    assert "max_num_queued_tokens=12" in (refusal.error or "")
    engine.run()
    assert engine.add(prompt_of(5)) == 3
    assert engine.answers[3].finished is None


def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = Engine(replace(LIMITS, num_pages=8))
    for prompt, max_tokens in (
        (prompt_of(30), 10),
        (prompt_of(64), 1),
        ([], 1),
        (prompt_of(3), 0),
        ([3, VOCAB], 1),
        ([-1], 1),
    ):
        finished = engine.answers[engine.add(prompt, max_tokens=max_tokens)].finished
        assert finished is not None
        assert finished.reason is FinishReason.ERROR
        assert finished.error
    # 32 places and one token that is never fed back.
    fits = engine.add(prompt_of(23), max_tokens=10)
    engine.run()
    assert len(engine.answers[fits].tokens) == 10


def test_fail_all_ends_every_request_once_and_leaves_a_usable_scheduler() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=2))
    ids = [engine.add(prompt_of(20, seed), max_tokens=9) for seed in range(4)]
    engine.step()
    engine.launch()
    engine.abort(ids[1])
    engine.take(engine.scheduler.fail_all("rank 1 died"))
    engine.frames.clear()
    engine.results.clear()
    engine.scheduler.check_integrity()
    endings = [engine.answers[i].finished for i in ids]
    assert [e.reason for e in endings if e] == ["error", "abort", "error", "error"]
    assert {(e.error, e.error_code) for e in endings if e and e.error} == {("rank 1 died", "engine_error")}
    engine.check_idle()
    assert engine.scheduler.stats().num_free_pages == LIMITS.num_pages
    engine.add(prompt_of(20), max_tokens=3)
    engine.run()


def test_a_result_out_of_order_is_an_error() -> None:
    engine = Engine(LIMITS)
    with pytest.raises(EngineError, match="no step is in flight"):
        engine.scheduler.retire(StepResult(1, 1, np.zeros(1, np.int32)))
    engine.add(prompt_of(4))
    engine.launch()
    for wrong in (
        StepResult(1, 2, np.zeros(1, np.int32)),
        StepResult(2, 1, np.zeros(1, np.int32)),
        StepResult(1, 1, np.zeros(2, np.int32)),
    ):
        with pytest.raises(EngineError, match="expected"):
            engine.scheduler.retire(wrong)
    engine.run()


def test_an_id_in_use_is_an_error() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(4))
    request = GenerateRequest(id=1, prompt=bytes(4), sampling=SamplingParams(max_tokens=1))
    with pytest.raises(EngineError, match="in use"):
        engine.scheduler.add([request])


def test_logprobs_reach_only_those_who_asked_each_with_its_own_width() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=64))
    ids = [engine.add(prompt_of(6, k), max_tokens=3, num_logprobs=k) for k in (-1, 0, 2, 5)]
    engine.run()
    for request_id, width in zip(ids, (None, 0, 2, 5), strict=True):
        answer = engine.answers[request_id]
        assert len(answer.logprobs) == (0 if width is None else 3)
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=False):
            assert logprob.logprob == -token
            assert len(logprob.top) == width


def test_sampling_parameters_travel_once_per_admission() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(20), max_tokens=3, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=1 << 40)
    frame = engine.launch()
    assert frame is not None
    assert frame.params.tolist() == [(1, 3, -1, 0.5, 0.25, 0.125, 1 << 40, 1.0, 0.0, 0.0)]
    while engine.step():
        assert not any(len(later.params) for later in engine.frames)


def test_limits_that_allow_no_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=1"):
        replace(LIMITS, max_model_len=1)
