"""The decoder against transformers: logits of tiny random models of every family, at several tensor-parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.backend import AttentionBackend
from attention.kv_pool import FP8, ReqToTokenPool, TokenToKVPool
from attention.registry import create_backend
from configs.errors import ConfigError
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.rope import RopeConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.layers.embedding import whole_logits
from parallel.numerics.arithmetic import FAST, ExactArithmetic
from parallel.plan import ShardPlan
from tests.helpers.batches import batch_of
from tests.helpers.dense_model import dense_model
from tests.helpers.paged_case import NewTokens, mask_of
from tests.helpers.rank_threads import on_ranks
from worker.layers.rotary import check_length, inverse_frequencies
from worker.models.decoder import Decoder
from worker.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_TOKENS = 37
LLAMA3_SCALING = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SCALING = {"factor": 4.0, "original_max_position_embeddings": 32}


@dataclass
class Case:
    """One tiny model: the transformers side and our description of it."""

    hf: Any
    path: Path
    model: ModelConfig


def _sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 384,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **changes,
    }


def _ours(model_type: str, rope: RopeConfig, sizes: dict[str, Any], **more: Any) -> ModelConfig:
    return dense_model(
        model_type=model_type,
        rope=rope,
        **sizes,
        **{"layer_windows": (None,) * sizes["num_hidden_layers"], **more},
    )


def build(name: str) -> tuple[Any, ModelConfig]:
    import transformers as t

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if name == "llama":
        sizes = _sizes()
        return t.LlamaForCausalLM(t.LlamaConfig(**sizes, rope_parameters=rope)), _ours(
            "llama", RopeConfig(theta=10000.0), sizes
        )
    if name == "llama_biased_llama3_rope":
        sizes = _sizes(tie_word_embeddings=True)
        config = t.LlamaConfig(
            **sizes,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3_SCALING},
        )
        rope_config = RopeConfig(theta=10000.0, scaling_type="llama3", scaling=tuple(sorted(LLAMA3_SCALING.items())))
        ours = _ours("llama", rope_config, sizes, qkv_bias=True, o_bias=True, mlp_bias=True)
        return t.LlamaForCausalLM(config), ours
    if name == "qwen2":
        sizes = _sizes(tie_word_embeddings=True, head_dim=16)
        given = {k: v for k, v in sizes.items() if k != "head_dim"}
        return t.Qwen2ForCausalLM(t.Qwen2Config(**given, rope_parameters=rope)), _ours(
            "qwen2", RopeConfig(theta=10000.0), sizes, qkv_bias=True
        )
    if name == "qwen3_yarn":
        # head_dim is not hidden_size / heads.
        sizes = _sizes(head_dim=32)
        scaled = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN_SCALING}
        rope_config = RopeConfig(theta=10000.0, scaling_type="yarn", scaling=tuple(sorted(YARN_SCALING.items())))
        return t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, rope_parameters=scaled)), _ours(
            "qwen3", rope_config, sizes, qk_norm=True
        )
    assert name == "mistral_window"
    sizes = _sizes()
    config = t.MistralConfig(**sizes, sliding_window=8, rope_parameters=rope, attn_implementation="eager")
    return t.MistralForCausalLM(config), _ours(
        "mistral", RopeConfig(theta=10000.0), sizes, layer_windows=(8,) * sizes["num_hidden_layers"]
    )


@pytest.fixture(scope="module", params=["llama", "llama_biased_llama3_rope", "qwen2", "qwen3_yarn", "mistral_window"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    hf, model = build(request.param)
    path = tmp_path_factory.mktemp(request.param)
    save(hf, path)
    return Case(hf, path, model)


def save(hf: Any, path: Path) -> None:
    """Writes a transformers model whose norms and biases are random too: ones and zeros would hide their absence."""
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    hf.eval().save_pretrained(path)


@dataclass
class Rank:
    """One rank's decoder over a pool of its own, driven row by row."""

    decoder: Decoder
    backend: AttentionBackend
    table: ReqToTokenPool
    plan: ShardPlan
    group: TensorParallelGroup

    @classmethod
    def create(
        cls,
        case: Case,
        group: TensorParallelGroup,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        *,
        exact: bool = False,
        backend: str = "torch_native",
        page_size: int = PAGE_SIZE,
    ) -> Rank:
        """`kv_dtype`: None: `dtype`. With `exact` the backend is cpu."""
        plan, device = ShardPlan.create(case.model, group.size, exact=exact), group.device
        arithmetic = ExactArithmetic(CPU) if exact else FAST
        decoder = Decoder(case.model, plan, group, arithmetic=arithmetic, dtype=dtype, device=device)
        with Checkpoint.open(case.path, case.model) as checkpoint:
            decoder.load(checkpoint)
            if kv_dtype is FP8:
                decoder.set_kv_scales(checkpoint.kv_scales())
        decoder.set_max_positions(64)
        of_row = 64 // page_size
        table = ReqToTokenPool(3, of_row, device)
        # Pages of the three rows interleave, none in order.
        table.page_table[1:] = torch.arange(1, 3 * of_row + 1).view(of_row, 3).T.flip(1)
        layers, types = decoder.attention_layers, {"dtype": kv_dtype or dtype, "compute_dtype": dtype}
        pool = TokenToKVPool(layers, num_pages=3 * of_row, page_size=page_size, device=device, **types)
        backend = "cpu" if exact else backend
        return cls(decoder, create_backend(backend, backend, pool), table, plan, group)

    def logits(self, rows: list[tuple[int, int, list[int]]], new_tokens: NewTokens | None = None) -> list[torch.Tensor]:
        """Logits [len(tokens), vocab] of each (row, start, tokens); in the first, they see each other as `new_tokens`
        says. None: causally."""
        token_ids = [token for _, _, tokens in rows for token in tokens]
        spans = [(row, start, len(tokens)) for row, start, tokens in rows]
        batch = batch_of(self.table, spans, self.backend.token_to_kv_pool.page_size, token_ids)
        every = torch.arange(batch.num_tokens, device=batch.positions.device)  # not only the last of each row
        batch = replace(batch, sample_indices=every)
        if new_tokens is not None:
            mask = mask_of([new_tokens, *[None] * (len(rows) - 1)], batch.extend_lens.tolist(), every.device)
            batch = replace(
                batch, mask=mask, positions=torch.where(mask.positions < 0, batch.positions, mask.positions)
            )
        self.backend.init_forward_metadata(batch)
        hidden = self.decoder.forward(batch, self.backend)
        logits = whole_logits(self.decoder.local_logits(hidden), self.plan, self.group)
        return list(logits.split([len(tokens) for _, _, tokens in rows]))


def _tokens(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _expected(case: Case, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return case.hf(torch.tensor([tokens])).logits[0]


def check_logits(case: Case, tp_size: int) -> None:
    """Compares with transformers in prefill, chunks, decodes and mixed steps, at every position."""
    first, second, third = _tokens(1), _tokens(2), _tokens(3, 20)

    def body(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group)
        whole = rank.logits([(1, 0, first)])[0]
        # The second row: a chunk, then a chunk beside a new prompt, then one token at a time beside it.
        parts = [rank.logits([(2, 0, second[:11])])[0]]
        chunk, prompt = rank.logits([(2, 11, second[11:30]), (3, 0, third[:10])])
        parts.append(chunk)
        prompt_parts = [prompt]
        for i in range(30, NUM_TOKENS):
            one, other = rank.logits([(2, i, [second[i]]), (3, i - 20, [third[i - 20]])])
            parts.append(one)
            prompt_parts.append(other)
        # A decode and a chunk in one step.
        again, rest = rank.logits([(2, NUM_TOKENS - 1, second[-1:]), (3, 17, third[17:])])
        return [whole, torch.cat(parts), again, torch.cat([*prompt_parts, rest])]

    expected = [_expected(case, first), _expected(case, second), _expected(case, second)[-1:], _expected(case, third)]
    results = on_ranks(tp_size, body)
    for result in results:
        for ours, theirs, same in zip(result, expected, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            assert torch.equal(ours, same), "ranks must hold the same logits, or they sample different tokens"


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_logits_equal_transformers_in_prefill_chunks_decode_and_mixed_steps(case: Case, tp_size: int) -> None:
    check_logits(case, tp_size)


def test_logits_equal_transformers_with_the_config_as_read_from_the_checkpoint(case: Case) -> None:
    tokens = _tokens(4)
    read = Case(case.hf, case.path, read_model_config(case.path))
    ((ours,),) = on_ranks(1, lambda group: Rank.create(read, group).logits([(1, 0, tokens)]))
    torch.testing.assert_close(ours, _expected(case, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("scaling_type", "scaling"),
    [
        ("default", {}),
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3_SCALING),
        ("llama3", {**LLAMA3_SCALING, "high_freq_factor": 1.0}),
        ("yarn", YARN_SCALING),
        ("yarn", {**YARN_SCALING, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.7}),
        ("yarn", {**YARN_SCALING, "mscale": 0.7, "mscale_all_dim": 0.9}),
    ],
)
def test_rotary_frequencies_equal_transformers(scaling_type: str, scaling: dict[str, Any]) -> None:
    import transformers as t
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = _sizes(head_dim=64)
    rope = {"rope_type": scaling_type, "rope_theta": 500000.0, **scaling}
    theirs = LlamaRotaryEmbedding(t.LlamaConfig(**sizes, rope_parameters=rope))
    ours, factor = inverse_frequencies(
        RopeConfig(theta=5e5, scaling_type=scaling_type, scaling=tuple(scaling.items())), sizes["head_dim"]
    )
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_refuses_an_unknown_rope_scaling() -> None:
    rope = RopeConfig(theta=1e4, scaling_type="ntk")
    with pytest.raises(ConfigError, match="ntk is not supported"):
        inverse_frequencies(rope, 16)


def test_refuses_lengths_at_which_dynamic_rope_would_change_cached_keys() -> None:
    model = _ours("llama", RopeConfig(theta=1e4, scaling_type="dynamic", scaling=(("factor", 2.0),)), _sizes())
    check_length(model, 128)
    with pytest.raises(ConfigError, match="max_model_len=129"):
        check_length(model, 129)


def test_refuses_an_unknown_activation() -> None:
    model = _ours("llama", RopeConfig(theta=1e4), _sizes(), hidden_act="swish7")
    with pytest.raises(ConfigError, match="swish7"):
        Decoder(model, ShardPlan.create(model, 1), TensorParallelGroup.single(), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_the_pool_of_a_rank_takes_the_bytes_that_the_plan_counts(tp_size: int) -> None:
    model = _ours("llama", RopeConfig(theta=10000.0), _sizes())
    plan = ShardPlan.create(model, tp_size)
    page = [sum(plan.kv_page_bytes(rank, PAGE_SIZE, "float32")) for rank in range(tp_size)]
    for rank in range(tp_size):
        group = TensorParallelGroup(rank=rank, size=tp_size, device=CPU, collectives=None)
        layers = Decoder(model, plan, group, dtype=torch.float32, device=CPU).attention_layers
        pool = TokenToKVPool(layers, num_pages=7, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)
        taken = sum(tensor.nbytes for layer in layers for tensor in pool.pages(layer.layer_id))
        assert taken == 8 * page[rank]
