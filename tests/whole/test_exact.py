"""Exact numerics: every logit has the same bits, however many ranks there are and whatever else runs; greedy tokens are
those of transformers."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import random
import re
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention.cpu_backend import CpuBackend
from attention.registry import create_backend
from attention.sparse import SparseStep
from benchmarks.exactness import GPU_WAYS, Frames, Way, hash_rows, plant, requests, rows_of_logits, ways_on
from benchmarks.exactness import WAYS as WAYS_ON_CPUS
from cluster.messages.engine import SamplingParams
from configs.errors import EngineError
from configs.numerics import CONTRACT
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.layers.linear import ColumnParallelLinear
from parallel.numerics.arithmetic import ExactArithmetic
from parallel.numerics.kernels import cpu_products
from parallel.numerics.rank_sum import CudaExactSum
from parallel.plan import ShardPlan, Span
from parallel.tree import SumTree
from tests.conftest import Logits
from tests.helpers.families import FAMILIES, case_of
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.rank_threads import on_ranks
from tests.whole.test_answers import Answer, assert_greedy, make_prompts
from worker import self_test, tp_worker
from worker.device.card import node_card
from worker.device.platform import platform_of
from worker.layers.experts import CpuExperts
from worker.models.decoder import Decoder
from worker.protocol import StepFrame, StepResult
from worker.self_test import check_exactness
from worker.step.model_runner import ModelRunner
from worker.tp_worker import TPWorker

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
NUM_NEW_TOKENS = 6
LENGTHS = [1, 2, 17, 40, 130, 300]
WAYS = {
    "together": (Limits(), True),
    "chunks": (Limits(chunk=16), True),
    "alone, and again with its prefix": (Limits(prefix_caching=True), False),
    "preempted": (Limits(num_pages=40), True),
}


class Watch:
    """Hashes the logits of the ranks of one LocalGroup."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[tuple[int, int]] = []
        self.hashes: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        local_logits = Decoder.local_logits

        def watched(decoder: Any, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            logits = local_logits(decoder, hidden, out)
            head = decoder._lm_head
            self.hashes[head._group.rank].append(hash_rows(logits, head._plan.vocab[head._group.rank]))
            return logits

        monkeypatch.setattr(Decoder, "local_logits", watched)

    def rows(self) -> dict[tuple[int, int], int]:
        """By request and tokens before it, the hash of each row since the last call."""
        total = sum(torch.cat(hashes) for hashes in self.hashes.values())
        assert isinstance(total, torch.Tensor)
        rows = dict(zip(self.keys, total.tolist(), strict=True))
        self.keys.clear()
        self.hashes.clear()
        return rows


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What the first group gave, by the activations' type or the family."""
    return {}


def _num_tokens(name: str) -> int:
    """Of each answer; so many that pages run out, where some are to be preempted."""
    return 24 if name == "preempted" else NUM_NEW_TOKENS


def _answers(group: LocalGroup, watch: Watch, name: str) -> tuple[list[Answer], dict[tuple[int, int], int]]:
    """Prompts with their greedy answers, and hashes of the logits of all requests, of which some are sampled."""
    limits, at_once = WAYS[name]
    num_tokens = _num_tokens(name)
    prompts = make_prompts(LENGTHS, group.model.vocab_size)
    requests = [
        (prompt, SamplingParams(max_tokens=num_tokens, temperature=float(i % 2), seed=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    if limits.prefix_caching:
        requests = requests + requests
    else:
        greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        requests += [(prompt, greedy) for prompt in prompts[1::2]]
    answers = group.generate(requests, limits, at_once=at_once)
    rows, count = watch.rows(), len(prompts)
    if limits.prefix_caching:
        assert answers.stats.total_prefix_hit_tokens > 0
        assert answers.tokens[:count] == answers.tokens[count:]
        again = {(request - count, position): it for (request, position), it in rows.items() if request > count}
        assert again == {key: it for key, it in rows.items() if key[0] <= count}
        rows = again
    if name == "preempted":
        assert answers.stats.total_preemptions > 0
    assert len(rows) == sum(map(len, answers.tokens)) // (2 if limits.prefix_caching else 1)
    assert all(len(tokens) == num_tokens for tokens in answers.tokens)
    given = zip(requests, answers.tokens, strict=True)
    return [(prompt, tokens) for (prompt, sampling), tokens in given if sampling.temperature == 0.0], rows


@pytest.mark.parametrize(
    ("size", "dtype", "strategy"),
    [
        *((size, "float32", "shared_memory") for size in (1, 2, 3, 5)),
        *((size, "bfloat16", "shared_memory") for size in (1, 3)),
        pytest.param(3, "float32", "gloo", marks=pytest.mark.slow),
        *(pytest.param(size, "float32", "shared_memory", marks=pytest.mark.slow) for size in (6, 9)),
        pytest.param(5, "bfloat16", "shared_memory", marks=pytest.mark.slow),
        *(pytest.param(size, "float32", "shared_memory", marks=pytest.mark.exhaustive) for size in (4, 7, 8)),
        *(pytest.param(size, "bfloat16", "shared_memory", marks=pytest.mark.exhaustive) for size in (2, 9)),
    ],
)
def test_every_logit_has_the_same_bits_and_greedy_tokens_are_those_of_transformers(
    size: int,
    dtype: Any,
    strategy: Any,
    small_path: Path,
    small_logits: Logits,
    watch: Watch,
    reference: dict[str, Any],
) -> None:
    """In chunks, from the prefix cache and after preemption; on more ranks than KV heads too."""
    group = LocalGroup(
        small_path,
        size,
        Limits().num_pages,
        dtype=dtype,
        strategy=strategy,
        on_frame=lambda frame, scheduler: watch.keys.extend(rows_of_logits(frame, scheduler)),
    )
    try:
        for name in WAYS:
            answers, rows = _answers(group, watch, name)
            if dtype == "float32":
                assert_greedy(small_logits, answers, _num_tokens(name))
            expected = reference.setdefault(dtype, {})
            differing = [key for key, found in rows.items() if expected.setdefault(key, found) != found]
            assert differing == [], f"{name}, {size} ranks"
    finally:
        group.close()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("lite", size) for size in (1, 2, 3)),
        *(("v3", size) for size in (1, 3)),
        *(("v32", size) for size in (1, 2, 3)),
        *((name, size) for name in ("kimi_linear", "glm_5") for size in (1, 2)),
    ],
)
def test_every_logit_over_latents_has_the_same_bits(
    name: str, size: int, watch: Watch, reference: dict[str, Any], tmp_path: Path
) -> None:
    """The ways are those of the test before. The models are like DeepSeek-V2-Lite, DeepSeek-V3, Kimi-Linear,
    DeepSeek-V3.2 and GLM-5."""
    case = case_of(name, tmp_path)
    group = LocalGroup(
        case.path, size, Limits().num_pages, on_frame=lambda *step: watch.keys.extend(rows_of_logits(*step))
    )
    try:
        for way in WAYS:
            _, rows = _answers(group, watch, way)
            expected = reference.setdefault(name, {})
            assert [key for key, found in rows.items() if expected.setdefault(key, found) != found] == [], way
    finally:
        group.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "planted"), [("qwen3-8b", False), ("qwen3-8b", True), ("deepseek-v2-lite", False), ("gpt-oss-20b", False)]
)
def test_every_logit_of_gpus_has_the_same_bits_unless_sums_are_changed(
    shape: str, planted: bool, tmp_path: Path
) -> None:
    """At sizes 1 and 2, ranks sharing a GPU where there is one; the layers' shapes are the real ones."""
    model = json.loads((ROOT / "benchmarks/models" / shape / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"num_hidden_layers": 2, "vocab_size": 32000}))
    command = [sys.executable, "-m", "benchmarks.exactness", "--config", "benchmarks/dummy.yaml", "--tokens", "24"]
    command += ["--set", f"model={tmp_path}", "--set", "numerics=exact", "--sizes", "1,2", "--graph-tokens", "64"]
    done = subprocess.run([*command, *["--plant"][:planted]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == planted, done.stdout + done.stderr
    counts = [line.partition(": ")[2].split() for line in done.stdout.splitlines() if line.startswith("2 ranks, ")]
    assert len(counts) == len(GPU_WAYS)
    assert all((int(differing) > 0) == planted for differing, *_ in counts), done.stdout


def test_sums_in_another_order_are_found(
    small_path: Path, watch: Watch, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "float32" not in reference:
        pytest.skip("needs the answers of the tests above")

    monkeypatch.setattr(SumTree, "of", SumTree.of)
    plant()
    monkeypatch.setattr(tp_worker, "check_exactness", lambda *_: None)  # it would refuse to start
    group = LocalGroup(
        small_path,
        2,
        Limits().num_pages,
        on_frame=lambda frame, scheduler: watch.keys.extend(rows_of_logits(frame, scheduler)),
    )
    try:
        _, rows = _answers(group, watch, "together")
        expected = reference["float32"]
        assert sum(found != expected.get(key) for key, found in rows.items()) > len(rows) // 2
    finally:
        group.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_leaves", [4, 8, 9, 16, 24])
def test_what_is_planted_changes_sums_of_any_number_of_leaves(
    num_leaves: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    from parallel.kernels.tree_sum import sum_subtrees
    from parallel.numerics.kernels.node_gemm import node_gemm

    random = torch.Generator().manual_seed(num_leaves)
    x, weight = (torch.randn(rows, 16 * num_leaves, generator=random).half() for rows in (2, 32))
    borders = [num_leaves * rank // num_ranks for rank in range(num_ranks + 1)]
    spans = tuple(Span(*ends) for ends in itertools.pairwise(borders))

    def summed() -> torch.Tensor:
        tree, nodes = SumTree.of(spans), []
        for span, cover in zip(spans, tree.covers, strict=True):
            columns, own = slice(16 * span.start, 16 * span.stop), tuple((it.start, it.stop) for it in cover)
            relative = tuple(Span(start - span.start, stop - span.start) for start, stop in own)
            out = torch.empty(len(own), 2, 32)
            nodes.append(
                node_gemm(x[:, columns].contiguous(), weight[:, columns].contiguous(), leaf=16, nodes=relative, out=out)
            )
        return sum_subtrees(torch.cat(nodes), tree.additions, (2 * len(tree.additions),), out=torch.empty(1, 2, 32))

    monkeypatch.setattr(SumTree, "of", SumTree.of)
    right = summed()
    plant()
    assert (summed() != right).any()


def served(frames: Frames, num_late: Callable[[], int]) -> list[StepFrame]:
    """The frames that are launched where results come once no more than `num_late()` steps could be in flight."""
    launched: list[StepFrame] = []
    in_flight: deque[StepFrame] = deque()
    while True:
        encoded = frames.poll() if len(in_flight) <= num_late() or not in_flight else None
        if encoded is not None:
            launched.append(StepFrame.decode(encoded))
            in_flight.append(launched[-1])
        elif in_flight:
            frame = in_flight.popleft()
            num_scored = len(frame.prompt_targets)
            scores = {
                "prompt_logprobs": np.zeros(num_scored, np.float32),
                "prompt_top_ids": np.zeros((num_scored, 0), np.int32),
                "prompt_top_logprobs": np.zeros((num_scored, 0), np.float32),
            }
            tokens = np.zeros(np.count_nonzero(frame.samples_per_row), np.int32)
            frames.retire(StepResult(frame.generation, frame.step, tokens, **scores).encode())
        else:
            return launched


def test_every_rank_makes_the_same_frames_whenever_its_results_come() -> None:
    [way] = [way for way in GPU_WAYS if way.preempts]
    asked = requests(1000, way.rows, num_tokens=24, num_long=0)
    chance = random.Random(0)
    quick, slow = (
        served(Frames(way, 1000, 648, way.num_pages(asked, 648), asked, num_states=None), num_late)
        for num_late in (lambda: 0, lambda: chance.randrange(3))
    )
    assert [frame.encode() for frame in quick] == [frame.encode() for frame in slow]


@pytest.mark.parametrize(
    ("way", "device"), [*((way, "cpu") for way in WAYS_ON_CPUS), *((way, "cuda") for way in GPU_WAYS)]
)
def test_requests_are_served_in_the_way_that_its_name_says_and_mostly_decoded(way: Way, device: str) -> None:
    count = max(it.rows for it in ways_on(device))
    asked = requests(1000, count, num_tokens=24, num_long=0)
    frames = Frames(way, 1000, 648, way.num_pages(asked, 648), asked, num_states=None)
    sampled = [int(np.count_nonzero(frame.samples_per_row)) for frame in served(frames, lambda: 0)]
    frames.check()
    assert sum(sampled) > 0.75 * len(frames.rows)
    if way.fills:
        bounds = [size for size in (0, 1, 16, 64, 128, 256) if size <= way.rows]
        assert all(set(range(low + 1, high + 1)) & set(sampled) for low, high in itertools.pairwise(bounds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_this_machine_keeps_the_contract(dtype: torch.dtype) -> None:
    check_exactness(ExactArithmetic(CPU), "cpu", dtype, CPU)


def test_the_self_test_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_batch(*given: Any, **exact: Any) -> Any:
        backend = create_backend(*given, **exact)
        attend = backend.attend
        backend.attend = lambda q, layer: attend(q, layer) * (1.0 + 2.0**-20 * (len(q) > 1))  # type: ignore[method-assign]
        return backend

    with monkeypatch.context() as patch:
        patch.setattr(self_test, "create_backend", by_batch)
        with pytest.raises(EngineError, match="attention of a token depends on the tokens it is computed with; choose"):
            check_exactness(ExactArithmetic(CPU), "cpu", torch.float32, CPU)

    def by_library(x: torch.Tensor, packed: torch.Tensor, num_columns: int, *_: Any) -> torch.Tensor:
        return x.float() @ packed.transpose(1, 2).flatten(0, 1)[:num_columns].float().t()

    monkeypatch.setattr("parallel.numerics.weight.product", by_library)
    with pytest.raises(EngineError, match="a product"):
        check_exactness(ExactArithmetic(CPU), "cpu", torch.float32, CPU)
    assert cpu_products.TILE == 64


MODELS = {
    "windows": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 6,
    },
    "experts": {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_attention_heads": 8,
    },
}
MODELS["sparse"] = {"model_type": "deepseek_v32", **FAMILIES["v32"].config}
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}


def _check_steps(folder: Path, model: str, size: int) -> None:
    (folder / "config.json").write_text(json.dumps({**SIZES, **MODELS[model]}))
    given = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", numerics="exact", tensor_parallel_size=size
    )
    spec = read_model_config(folder)
    config = resolve(given, spec, HostFacts(num_cores=2, num_gpus=0)).config
    plan = ShardPlan.create(spec, size, exact=True)

    def check(group: TensorParallelGroup) -> None:
        worker = TPWorker(config=config, model=spec, model_path=folder, plan=plan, group=group)
        worker.shard.load()
        worker.allocate(14, 220, 14 if model == "windows" else None)
        worker.check_steps(14, 220)
        worker.close()

    on_ranks(size, check)


@pytest.mark.parametrize(("model", "size"), [("windows", 1), ("windows", 3), ("experts", 2), ("sparse", 2)])
def test_a_models_own_steps_and_sums_are_checked(model: str, size: int, tmp_path: Path) -> None:
    _check_steps(tmp_path, model, size)


def _wrong(number: int, most: int) -> float:
    """A factor that changes the last bits where a number is between 2 and `most`."""
    return 1.0 + 2.0**-20 * (2 <= number <= most)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("product", "a token's hidden state changes in a step of 16 tokens"),
        ("experts", "a token's hidden state changes in a step of 16 tokens"),
        ("attention", "a token's hidden state changes in a step of 64 decodes"),
        ("logits", "logits depend on the other rows of the batch"),
        ("sum", "1 ranks add 1 rows in another order"),
    ],
)
def test_a_models_check_names_what_differs(
    broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patch(owner: type, name: str, factor: Callable[..., float]) -> None:
        right = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *given: right(self, *given) * factor(self, *given))

    if broken == "product":
        patch(ColumnParallelLinear, "__call__", lambda _, x: _wrong(len(x), 16))
    elif broken == "experts":
        patch(CpuExperts, "__call__", lambda _, x, padding: _wrong(len(x), 16))
    elif broken == "attention":
        decodes = lambda self, q, layer: _wrong(self._batch.batch_size, 300)  # noqa: E731
        patch(CpuBackend, "attend", decodes)
    elif broken == "logits":
        patch(Decoder, "local_logits", lambda _, hidden: _wrong(len(hidden), 16))
    else:
        patch(TensorParallelGroup, "sum_nodes", lambda _, nodes, tree: _wrong(len(nodes[0]) + 1, 2))
    with pytest.raises(EngineError, match=said):
        _check_steps(tmp_path, "experts", 1)


def test_checked_steps_are_long_enough_for_sparse_layers_to_choose_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SparseStep.choose

    def choose(step: SparseStep, scores: torch.Tensor, top_k: int, page_size: int) -> torch.Tensor:
        return right(step, scores if len(scores) > 64 else -scores, top_k, page_size)

    monkeypatch.setattr(SparseStep, "choose", choose)
    monkeypatch.setattr(self_test, "_MOST_TOKENS", MODELS["sparse"]["index_topk"])
    with pytest.raises(EngineError, match="a token's hidden state changes in a step of 16 tokens"):
        _check_steps(tmp_path, "sparse", 1)


def test_a_chains_columns_are_checked_against_fewer_of_them(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    pytest.importorskip("triton", reason="a CPU install has no Triton")
    from parallel.numerics.kernels import chain_gemm

    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).half()
    self_test._check_columns(weight, 16, weight.dtype)
    right = chain_gemm.chain_gemm
    wrong = lambda x, weight, *given, **out: right(x, weight, *given, **out).mul_(_wrong(len(weight), 32))  # noqa: E731
    monkeypatch.setattr(chain_gemm, "chain_gemm", wrong)
    with pytest.raises(EngineError, match="a product's column depends on the other columns"):
        self_test._check_columns(weight, 16, weight.dtype)


def test_nodes_that_a_norm_adds_are_checked_against_their_tree(
    monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    from parallel.kernels import tree_sum

    group = TensorParallelGroup.single()
    rank_sum = CudaExactSum(group, 64, SumTree.of((Span(0, 8),)), leaf=16)
    for num_rows in (1, 17):
        self_test._check_rank_sum(rank_sum, group, num_rows, torch.float16)
    right = tree_sum.sum_add_norm

    def one_after_the_other(nodes: torch.Tensor, adds: Any, *given: Any, **places: Any) -> torch.Tensor:
        ascending = [(0, 1), *((len(adds) + i, i + 1) for i in range(1, len(adds)))]
        return right(nodes, tuple(ascending), *given, **places)

    monkeypatch.setattr(tree_sum, "sum_add_norm", one_after_the_other)
    with pytest.raises(EngineError, match="1 ranks add 1 rows in another order"):
        self_test._check_rank_sum(rank_sum, group, 1, torch.float16)


@pytest.mark.gpu
def test_a_gpu_checks_leaves_of_cublas_in_less_than_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = json.loads((ROOT / "benchmarks/models/qwen3-8b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"num_hidden_layers": 8}))
    given = EngineConfig(model=str(tmp_path), load_format="dummy", device="cuda", numerics="exact")
    spec = read_model_config(tmp_path)
    config = resolve(given, spec, HostFacts(8, 1, node_card())).config
    plan, group = ShardPlan.create(spec, 1, exact=True), TensorParallelGroup.single("cuda")
    monkeypatch.setattr(ModelRunner, "capture", lambda *_, **__: None)
    worker = TPWorker(config=config, model=spec, model_path=tmp_path, plan=plan, group=group)
    worker.shard.load()
    worker.allocate(128, 2048)  # compiles
    began = time.perf_counter()
    worker.check_steps(128, 2048)
    assert time.perf_counter() - began < 1.0
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *given, out, **dtype: bmm(*given, out=out, **dtype).mul_(1.0 + 2.0**-20))
    with pytest.raises(EngineError, match="a token's hidden state changes in a step of 256 tokens"):
        worker.check_steps(128, 2048)
    worker.close()


def test_a_platform_says_what_computes() -> None:
    assert platform_of(CPU) == f"{platform.machine()}, torch {torch.__version__}"


@pytest.mark.gpu
def test_a_gpus_platform_says_what_computes() -> None:
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    said = rf"sm{capability}, torch {re.escape(torch.__version__)}, triton \d+\.\d+\.\d+, cublaslt \d{{5,}}"
    assert re.fullmatch(said, platform_of(torch.device("cuda")))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the bits are those of another kind of processor")
def test_whoever_changes_a_bit_of_exact_answers_raises_the_contract(small_path: Path, watch: Watch) -> None:
    group = LocalGroup(
        small_path, 1, 256, on_frame=lambda frame, scheduler: watch.keys.extend(rows_of_logits(frame, scheduler))
    )
    try:
        _, rows = _answers(group, watch, "together")
    finally:
        group.close()
    of_first = sorted(it for it in rows.items() if it[0][0] <= len(LENGTHS))
    digest = hashlib.sha256(repr(of_first).encode()).hexdigest()[:16]
    assert {CONTRACT: digest} == {2: "9395fe4da162a438"}, "raise configs.numerics.CONTRACT, and take this digest here"
