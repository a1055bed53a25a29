"""The step loop on GPUs: sampling, aborts, memory, failures. Random weights, small real shapes."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.make_checkpoint import write_checkpoint
from cluster.messages.engine import FinishReason
from configs.read_config import read_model_config
from tests.helpers.gpu_engine import GpuEngine, write_shape
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.quantised_weights import QuantisedCheckpoint

ROOT = Path(__file__).resolve().parents[2]
NUM_PAGES = 300


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shape"))


def _engine(shape: Path, size: int = 1, **changes: Any) -> GpuEngine:
    settings = {"scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 512}, **changes}
    return GpuEngine(shape, num_pages=NUM_PAGES, load_format="dummy", tensor_parallel_size=size, **settings)


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(150_000) for _ in range(generator.randint(1, 300))] for _ in range(count)]


SIZES = [
    pytest.param(1, marks=pytest.mark.gpu, id="tp1"),
    *(pytest.param(size, marks=pytest.mark.multi_gpu, id=f"tp{size}") for size in (2, 3, 4)),
]


@pytest.mark.parametrize("size", SIZES)
def test_sampled_rows_get_their_own_tokens_with_and_without_filters(shape: Path, size: int) -> None:
    prompts = _prompts(1)
    # A prompt found in the prefix cache is attended to by other kernels, whose rounding may decide a near tie.
    with _engine(shape, size, kv_cache={"enable_prefix_caching": False}) as engine:

        def tokens(**sampling: Any) -> list[int]:
            [answer] = engine.generate(prompts, max_tokens=24, **sampling)
            assert len(answer.tokens) == 24
            assert answer.reason is FinishReason.LENGTH
            return answer.tokens

        greedy = tokens()
        assert [tokens() for _ in range(5)] == [greedy] * 5
        assert tokens(temperature=1.0, top_k=1, seed=5) == greedy, "only the likeliest token is left"
        sampled = tokens(temperature=1.0, seed=5)
        assert sampled != greedy
        assert tokens(temperature=1.0, seed=5) == sampled
        assert tokens(temperature=1.0, seed=6) != sampled
        # A filter that keeps everything takes another way through the code to the same tokens.
        assert tokens(temperature=1.0, seed=5, top_k=151_935) == sampled
        assert tokens(temperature=1.0, seed=5, num_logprobs=3) == sampled


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("size", SIZES[:2])
def test_other_weights_that_came_beside_the_steps_answer_as_a_start_with_them_does(
    tmp_path: Path, size: int, numerics: str, model: str
) -> None:
    shape = write_shape(tmp_path, model)
    prompts = _prompts(6)
    settings = {"numerics": numerics, "kv_cache": {"enable_prefix_caching": False}}

    def tokens(engine: GpuEngine) -> list[list[int]]:
        answers = engine.generate(prompts, max_tokens=40)
        assert all(len(answer.tokens) == 40 for answer in answers)
        return [answer.tokens for answer in answers]

    with _engine(shape, size, revision="second", **settings) as cold:
        second = tokens(cold)
    with _engine(shape, size, **settings) as engine:
        first = tokens(engine)
        assert first != second
        # There and back, from the device's memory and from the host's.
        for on_host in (False, True):
            for revision, before, after in (("second", first, second), (None, second, first)):
                engine.stage(revision, on_host=on_host)
                assert tokens(engine) == before, "the steps beside it have other weights"
                engine.take_staged()
                assert tokens(engine) == after, (on_host, revision)
        # With requests under way, some of whose tokens are told.
        for recompute in (False, True):
            for index, prompt in enumerate(prompts):
                engine.add(index + 1, prompt, max_tokens=60)
            engine.stage("second" if recompute else None, on_host=recompute)
            for _ in range(20):
                engine.step()
            engine.take_staged(recompute=recompute)
            assert all(len(answer.tokens) == 60 for answer in engine.run().values())
        assert tokens(engine) == second
        engine.stats()


@pytest.mark.parametrize("size", SIZES)
def test_logprobs_are_descending_and_hold_the_greedy_token_first(shape: Path, size: int) -> None:
    with _engine(shape, size) as engine:
        answers = engine.generate(_prompts(5), max_tokens=6, num_logprobs=4)
    for answer in answers:
        assert len(answer.top) == 6
        for token, top in zip(answer.tokens, answer.top, strict=True):
            assert next(iter(top)) == token
            values = list(top.values())
            assert values == sorted(values, reverse=True)
            assert len(values) == 4
            assert values[0] < 0


@pytest.mark.parametrize("size", SIZES)
def test_a_prompts_scores_are_the_logprobs_its_tokens_had_as_an_answer(shape: Path, size: int) -> None:
    [prompt] = _prompts(1)
    prompt = prompt[:9]
    with _engine(shape, size, dtype="float32") as engine:
        # Long enough for two steps of scores.
        [answer] = engine.generate([prompt], max_tokens=700, num_logprobs=0, temperature=1.0, seed=3)
        whole = [*prompt, *answer.tokens]
        others = _prompts(4, seed=5)
        for index, other in enumerate(others):
            engine.add(10 + index, other, max_tokens=20)
        engine.add(1, whole, max_tokens=2, prompt_logprobs=3)
        engine.add(2, whole, max_tokens=2, prompt_logprobs=0)
        answers = engine.run()
    for request_id in (1, 2):
        scores = answers[request_id].prompt_logprobs
        assert len(scores) == len(whole) - 1
        assert scores[len(prompt) - 1 :] == pytest.approx(answer.logprobs, abs=2e-3)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("size", SIZES)
def test_items_of_a_row_are_scored_as_each_alone(shape: Path, size: int, dtype: str, most: float) -> None:
    """By the kernels of the backend that serves masks, beside other rows; alone, in bf16, by those of `auto`."""
    generator = random.Random(3)
    query, *items = ([generator.randrange(150_000) for _ in range(length)] for length in (133, 1, 8, 30, 64, 5, 40))
    asked = {"max_tokens": 1, "num_logprobs": 0, "logprob_token_ids": (5, 70, 100_000)}
    with _engine(shape, size, dtype=dtype) as engine:
        for index, other in enumerate(_prompts(4, seed=5)):
            engine.add(10 + index, other, max_tokens=20)
        for index in (1, 2):  # the second finds the query in the cache, if the first has computed it by then
            engine.add(index, itertools.chain(query, *items), **asked, item_lens=tuple(map(len, items)))
        packed = engine.run()
        alone = engine.generate([[*query, *item] for item in items], **asked)
    expected = [value for answer in alone for value in answer.top_logprobs[0]]
    for index in (1, 2):
        assert packed[index].top_logprobs[0] == pytest.approx(expected, abs=most)


@pytest.mark.parametrize("size", SIZES)
def test_two_hundred_cycles_with_aborts_leave_memory_and_pages_as_they_were(shape: Path, size: int) -> None:
    generator = random.Random(1)
    with _engine(shape, size, kv_cache={"enable_prefix_caching": False}) as engine:
        in_use: set[tuple[int, ...]] = set()
        for cycle in range(200):
            for index, prompt in enumerate(_prompts(8, seed=cycle)):
                sampling: dict[str, Any] = {"max_tokens": generator.randint(1, 12)}
                if index % 3 == 0:
                    sampling.update(temperature=0.8, top_p=0.9, seed=index, num_logprobs=2)
                engine.add(index + 1, prompt, **sampling)
            for _ in range(generator.randint(0, 6)):
                engine.step()
            engine.scheduler.abort(generator.sample(range(1, 9), 3))
            answers = engine.run()
            assert all(answer.reason is not None for answer in answers.values())
            stats = engine.stats()
            assert (stats.num_owned_pages, stats.num_free_pages) == (0, NUM_PAGES)
            memory = tuple(engine.restart_loops())
            if cycle >= 20:
                in_use.add(memory)
        assert len(in_use) == 1, f"bytes in use changed: {sorted(in_use)}"


@pytest.mark.gpu
def test_a_prompt_of_one_token_and_a_full_batch_of_decodes_run(shape: Path) -> None:
    with _engine(shape) as engine:
        answers = engine.generate([[7]] * 16, max_tokens=5)
        assert {tuple(answer.tokens) for answer in answers} == {tuple(answers[0].tokens)}
        [alone] = engine.generate([[7]], max_tokens=5)
        assert alone.tokens[0] == answers[0].tokens[0]


@pytest.mark.parametrize("size", SIZES)
def test_graphs_of_large_steps_fit_the_profile_run_and_say_what_eager_steps_say(shape: Path, size: int) -> None:
    """Each rank compares as it starts what its graphs took with what its profile run said."""
    prompts = _prompts(20)
    assert sum(len(prompt) for prompt in prompts) > 2048
    settings = {
        "scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
        "kv_cache": {"enable_prefix_caching": False},
    }
    with _engine(shape, size, max_model_len=8192, **settings) as engine:
        captured = engine.generate(prompts, max_tokens=1)
        # Steps that score prompts have no graph.
        eager = engine.generate(prompts, max_tokens=1, prompt_logprobs=0)
    tokens, eager_tokens = ([answer.tokens[0] for answer in answers] for answers in (captured, eager))
    assert len(set(tokens)) > 10
    alike = sum(token == other for token, other in zip(tokens, eager_tokens, strict=True))
    assert alike >= 16, "more than near ties, which other kernels may decide otherwise"


@pytest.mark.gpu
def test_too_little_memory_names_the_rank_and_the_setting(shape: Path) -> None:
    from configs.errors import EngineError

    with pytest.raises(EngineError, match=r"rank 0 on cuda:0 failed in .*OutOfMemoryError.*kv_cache.memory_fraction"):
        GpuEngine(shape, num_pages=1 << 24, load_format="dummy")


@pytest.mark.gpu
def test_a_fault_on_the_device_names_the_rank_and_what_to_do(shape: Path) -> None:
    import subprocess
    import sys

    script = (
        "import torch\n"
        "from worker.weights.shard import naming_the_rank\n"
        "with naming_the_rank(3, torch.device('cuda:0'), 'a step'):\n"
        "    torch._assert_async(torch.zeros(1, device='cuda'))\n"
        "    torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "EngineError: rank 3 on cuda:0 failed in a step" in done.stderr, done.stderr
    assert "CUDA_LAUNCH_BLOCKING=1" in done.stderr


@pytest.mark.parametrize("size", SIZES)
def test_penalties_biases_and_masks_rule_what_is_drawn(shape: Path, size: int) -> None:
    prompts = _prompts(1)
    with _engine(shape, size, kv_cache={"enable_prefix_caching": False}) as engine:

        def tokens(**sampling: Any) -> list[int]:
            [answer] = engine.generate(prompts, max_tokens=24, **sampling)
            return answer.tokens

        greedy, sampled = tokens(), tokens(temperature=1.0, seed=5)
        # What changes nothing takes another way through the code to the same tokens.
        nothing = {"logit_bias": ((7, 0.0),), "allowed_token_ids": tuple(range(151_936))}
        assert tokens(**nothing) == greedy
        assert tokens(temperature=1.0, seed=5, **nothing) == sampled
        banned = tuple((token, -100.0) for token in set(greedy))
        assert not set(tokens(logit_bias=banned)) & set(greedy)
        assert len(set(tokens(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=20.0))) == 24
        allowed = tuple(range(3, 151_936, 977))
        drawn = tokens(temperature=1.0, seed=5, top_p=0.9, allowed_token_ids=allowed)
        assert set(drawn) <= set(allowed)
        [answer] = engine.generate(prompts, max_tokens=2, num_logprobs=1, logprob_token_ids=(5, greedy[0]))
        assert list(answer.top[0]) == [greedy[0], 5]


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("size", SIZES[:3])
def test_weights_in_fp8_answer_to_the_bit_as_the_same_ones_in_bf16(tmp_path: Path, size: int, model: str) -> None:
    import torch

    config = json.loads((write_shape(tmp_path, model) / "config.json").read_text())
    config |= {"num_experts": 16} if "num_experts" in config else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_config(tmp_path)
    source, plain = QuantisedCheckpoint(DummyCheckpoint(shape), shape), {}
    for name, tensor in shape.stored_tensors().items():
        made = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda")
        source.read(name, made)
        plain[name] = made.cpu()
    save_file(plain, tmp_path / "model.safetensors")
    settings = {"numerics": "exact", "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 512}}

    def answers(**changes: Any) -> list[tuple[list[int], list[float]]]:
        sizes = {"num_pages": NUM_PAGES, "tensor_parallel_size": size}
        with GpuEngine(tmp_path, **sizes, **settings, **changes) as engine:
            found = engine.generate(_prompts(6), max_tokens=40, num_logprobs=1)
            return [(it.tokens, it.logprobs) for it in found]

    assert answers(load_format="dummy", quantization="fp8") == answers()


@pytest.mark.parametrize("size", SIZES)
def test_a_request_with_a_nan_ends_alone_in_captured_steps_too(tmp_path: Path, size: int) -> None:
    config = json.loads((write_shape(tmp_path) / "config.json").read_text())
    config |= {"vocab_size": 4096, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_checkpoint(tmp_path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][4000, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = [[token % 3000 for token in prompt] for prompt in _prompts(5)]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}]
    settings = {"scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 512}, "numerics": "exact"}
    with GpuEngine(tmp_path, num_pages=NUM_PAGES, tensor_parallel_size=size, **settings) as engine:
        expected = [answer.tokens for answer in engine.generate(prompts, max_tokens=16)]
        for index, prompt in enumerate(prompts):
            engine.add(index, prompt, max_tokens=16)
        for index, way in enumerate(ways):  # in a step with prompts, and in one of decodes
            engine.add(100 + index, [*prompts[0], 4000], max_tokens=16, **way)
            engine.add(200 + index, prompts[1], max_tokens=16, logit_bias=((4000, 1e6),), **way)
        answers = engine.run()
        assert [answers[index].tokens for index in range(len(prompts))] == expected
        for index, tokens in itertools.product(range(len(ways)), ([], [4000])):
            answer = answers[(200 if tokens else 100) + index]
            assert (answer.tokens, answer.reason) == (tokens, FinishReason.ERROR)
        assert engine.stats().num_owned_pages == 0
