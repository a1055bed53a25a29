"""Mixtures of experts against transformers' blocks: the partial sums of all ranks together are the block's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP, DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP, DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMLP, Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from configs.biased_mixture import BiasedMixture
from configs.errors import ConfigError
from configs.layers import Axis, MixtureOfExperts
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, ExactArithmetic, LayerContext
from parallel.numerics.rank_sum import ExactSum
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import LayerShard, Span, as_matrix
from tests.helpers.rank_threads import on_ranks
from worker.layers.experts import CudaExperts, Experts, ExpertsSpec
from worker.layers.step import Padding

CPU = torch.device("cpu")
PREFIX = "model.layers.3."
TOKENS = (1, 2, 37)
HIDDEN, COLUMNS, SHARED_COLUMNS, NUM_EXPERTS, LATENTS = 48, 128, 160, 12, 32


@dataclass(frozen=True)
class Family:
    block: Callable[[], torch.nn.Module]
    spec: ExpertsSpec


def _qwen(config: type, block: type, **fields: Any) -> Callable[[], torch.nn.Module]:
    return lambda: block(
        config(
            hidden_size=HIDDEN,
            moe_intermediate_size=COLUMNS,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=4,
            **fields,
        )
    )


def _mixtral() -> torch.nn.Module:
    return MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=COLUMNS, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2
        )
    )


def _deepseek(**fields: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        config = DeepseekV2Config(
            hidden_size=HIDDEN,
            num_attention_heads=4,
            moe_intermediate_size=COLUMNS,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=4,
            **fields,
        )
        block = DeepseekV2Moe(config)
        block.shared_experts = DeepseekV2MLP(config, intermediate_size=SHARED_COLUMNS)
        return block

    return make


def _deepseek_v3(**fields: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        config = DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=COLUMNS,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=4,
            n_group=3,
            topk_group=2,
            **fields,
        )
        block = DeepseekV3MoE(config)
        block.shared_experts = DeepseekV3MLP(config, intermediate_size=SHARED_COLUMNS)
        return block

    return make


def _llama4() -> torch.nn.Module:
    config = Llama4TextConfig(
        hidden_size=HIDDEN, intermediate_size=COLUMNS, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2
    )
    block = Llama4TextMoe(config)
    block.shared_expert = Llama4TextMLP(config, intermediate_size=SHARED_COLUMNS)
    return block


def _gpt_oss() -> torch.nn.Module:
    block = GptOssMLP(
        GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=COLUMNS, num_local_experts=NUM_EXPERTS, num_experts_per_tok=4
        )
    )
    block.experts.limit = 0.7  # transformers 5.17 does not read it from the config
    return block


def _nemotron(latent_size: int | None) -> Callable[[], torch.nn.Module]:
    return lambda: NemotronHMoE(
        NemotronHConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=COLUMNS,
            moe_shared_expert_intermediate_size=SHARED_COLUMNS,
            moe_latent_size=latent_size,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=4,
            n_group=3,
            topk_group=2,
            routed_scaling_factor=2.5,
        )
    )


QWEN3 = MixtureOfExperts(
    hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=4, intermediate_size=COLUMNS, norm_topk_prob=True
)
DEEPSEEK = replace(
    QWEN3,
    norm_topk_prob=False,
    round_weights=False,
    weight_scale=2.5,
    shared_intermediate_size=SHARED_COLUMNS,
    shared_name="mlp.shared_experts",
    has_shared_gate=False,
)
FAMILIES = {
    "qwen3_moe": Family(_qwen(Qwen3MoeConfig, Qwen3MoeSparseMoeBlock, norm_topk_prob=True), QWEN3),
    "mixtral": Family(
        _mixtral,
        replace(QWEN3, top_k=2, round_weights=False, name="block_sparse_moe", projections=("w1", "w3", "w2")),
    ),
    "qwen2_moe": Family(
        _qwen(Qwen2MoeConfig, Qwen2MoeSparseMoeBlock, shared_expert_intermediate_size=SHARED_COLUMNS),
        replace(QWEN3, norm_topk_prob=False, shared_intermediate_size=SHARED_COLUMNS),
    ),
    "deepseek_v2": Family(_deepseek(routed_scaling_factor=2.5), DEEPSEEK),
    "deepseek_v2_groups": Family(
        _deepseek(routed_scaling_factor=2.5, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        replace(DEEPSEEK, num_groups=4, top_groups=2),
    ),
    "deepseek_v3": Family(
        _deepseek_v3(routed_scaling_factor=2.5),
        replace(DEEPSEEK, num_groups=3, top_groups=2, sigmoid=True, has_choice_bias=True, norm_topk_prob=True),
    ),
    "deepseek_v3_sigmoids": Family(
        _deepseek_v3(routed_scaling_factor=1.0, norm_topk_prob=False),
        replace(DEEPSEEK, num_groups=3, top_groups=2, sigmoid=True, has_choice_bias=True, weight_scale=1.0),
    ),
}
FAMILIES["llama4"] = Family(
    _llama4,
    replace(
        QWEN3,
        top_k=2,
        norm_topk_prob=False,
        sigmoid=True,
        scales_input=True,
        shared_intermediate_size=SHARED_COLUMNS,
        shared_name="feed_forward.shared_expert",
        has_shared_gate=False,
        name="feed_forward",
        router_name="router",
        stacked="inputs first",
    ),
)
FAMILIES["gpt_oss"] = Family(
    _gpt_oss,
    BiasedMixture(
        hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=4, intermediate_size=COLUMNS, limit=0.7, alpha=1.702
    ),
)
NEMOTRON = replace(
    FAMILIES["deepseek_v3"].spec, hidden_act="relu2", is_gated=False, name="mixer", shared_name="mixer.shared_experts"
)
FAMILIES["nemotron_h"] = Family(_nemotron(None), NEMOTRON)
FAMILIES["nemotron_h_latents"] = Family(_nemotron(LATENTS), replace(NEMOTRON, latent_size=LATENTS))
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


class Source(TensorSource):
    """A TensorSource over a block, by the names that its checkpoints have."""

    def __init__(self, block: torch.nn.Module, spec: ExpertsSpec) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.read_names: set[str] = set()
        self.num_read = 0
        if isinstance(spec, BiasedMixture):
            self.tensors = {f"{PREFIX}mlp.{name}": tensor for name, tensor in block.state_dict().items()}
            return
        prefix, (gate_name, up_name, down_name) = PREFIX + spec.name, spec.projections
        for name, tensor in block.state_dict().items():
            if name.startswith("experts.") and spec.stacked != "no":
                self.tensors[f"{prefix}.{name}"] = tensor.flatten(0, 1)
            elif name == "experts.gate_up_proj":
                for expert, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                    self.tensors[f"{prefix}.experts.{expert}.{gate_name}.weight"] = gate
                    self.tensors[f"{prefix}.experts.{expert}.{up_name}.weight"] = up
            elif name in ("experts.up_proj", "experts.down_proj"):
                of_expert = up_name if name == "experts.up_proj" else down_name
                for expert, matrix in enumerate(tensor):
                    self.tensors[f"{prefix}.experts.{expert}.{of_expert}.weight"] = matrix
            else:
                self.tensors[f"{prefix}.{name}"] = tensor

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        tensor = self.tensors[name]
        tensor = tensor.view(as_matrix(tensor.shape))
        tensor = tensor if rows is None else tensor[slice(*rows)]
        tensor = tensor if columns is None else tensor[:, slice(*columns)]
        assert as_matrix(out.shape) == tensor.shape
        out.copy_(tensor.view(out.shape))
        self.read_names.add(name)
        self.num_read += out.numel()


def _block(family: Family) -> torch.nn.Module:
    """In fp32, every weight random."""
    block = family.block().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*block.parameters(), *block.buffers()]:  # a bias of the choice is a buffer
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return block


def _experts(
    spec: ExpertsSpec,
    columns: Span,
    shared_columns: Span,
    group: TensorParallelGroup | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    spans = {Axis.EXPERT_COLUMNS: columns, Axis.SHARED_EXPERT_COLUMNS: shared_columns}
    group = group or TensorParallelGroup.single(device)
    return Experts.of(spec, LayerContext((LayerShard(spans),) * group.size, group, FAST, dtype, device))


def _spans(total: int, size: int) -> list[Span]:
    """32 columns a unit, dealt as evenly as they go; empty ones where there are more ranks than units."""
    units = total // 32
    ends = [32 * (units * (rank + 1) // size) for rank in range(size)]
    return [Span(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _no_padding(x: torch.Tensor) -> Padding:
    return Padding(torch.full((len(x),), 16, device=x.device), 16)


def _x(num_tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _expected(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x.unsqueeze(0))
    return (y[0] if isinstance(y, tuple) else y).view(x.shape)  # with the logits beside it


@every_family
def test_a_rank_reads_its_columns_and_no_more(family: Family) -> None:
    source = Source(_block(family), family.spec)
    _experts(family.spec, Span(32, 96), Span(96, 160)).load(source, PREFIX)
    num_matrices, size, latents = 3, HIDDEN, 0
    if isinstance(family.spec, MixtureOfExperts) and not family.spec.is_gated:
        num_matrices = 2
        if family.spec.latents:
            size, latents = LATENTS, 2 * HIDDEN * LATENTS
    expected = NUM_EXPERTS * (HIDDEN + num_matrices * 64 * size) + latents
    if isinstance(family.spec, BiasedMixture):
        expected += NUM_EXPERTS * (1 + 2 * 64 + HIDDEN)
    beside = (HIDDEN if family.spec.shared_gate else 0) + (NUM_EXPERTS if family.spec.choice_bias else 0)
    assert source.num_read == expected + beside + (num_matrices * 64 * HIDDEN if family.spec.shared else 0)


@every_family
@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_of_a_group_sum_up_to_the_block(family: Family, size: int) -> None:
    block = _block(family)
    source = Source(block, family.spec)

    def of_rank(group: TensorParallelGroup) -> list[torch.Tensor]:
        spans = _spans(COLUMNS, size)[group.rank], _spans(SHARED_COLUMNS, size)[group.rank]
        layer = _experts(family.spec, *spans, group)
        layer.load(source, PREFIX)
        outputs = [layer(x, _no_padding(x)) for x in map(_x, TOKENS)]
        return [y for y in outputs if isinstance(y, torch.Tensor)]

    for results in on_ranks(size, of_rank):
        for num_tokens, y in zip(TOKENS, results, strict=True):
            torch.testing.assert_close(y, _expected(block, _x(num_tokens)), rtol=1e-4, atol=1e-5)
    assert source.read_names == source.tensors.keys()


@every_family
@pytest.mark.parametrize("kept", [None, [5, 1, 2]])
def test_padding_is_zero_and_changes_nothing_beside_it(family: Family, kept: list[int] | None) -> None:
    block = _block(family)
    layer = _experts(family.spec, Span(0, COLUMNS), Span(0, SHARED_COLUMNS))
    layer.load(Source(block, family.spec), PREFIX)
    slots = torch.tensor([16, 3, 400, 15, 17, 0])
    padding, meant = Padding(slots, 16), slots
    if kept is not None:
        which = torch.tensor(kept, dtype=torch.int32)
        padding, meant = padding.of(which), slots[kept]
    x = _x(len(meant))
    x[meant < 16] = torch.nan
    y = layer(x, padding)
    assert isinstance(y, torch.Tensor)
    assert not y[meant < 16].any()
    torch.testing.assert_close(y[meant >= 16], _expected(block, x[meant >= 16]), rtol=1e-4, atol=1e-5)


@every_family
def test_bf16_is_as_exact_as_transformers_bf16(family: Family) -> None:
    block = _block(family).bfloat16()
    layer = _experts(family.spec, Span(0, COLUMNS), Span(0, SHARED_COLUMNS), dtype=torch.bfloat16)
    layer.load(Source(block, family.spec), PREFIX)
    x = _x(40).bfloat16()
    theirs = _expected(block, x).float()
    expected = _expected(block.float(), x.float())
    assert (layer(x, _no_padding(x)).float() - expected).abs().max() <= 2 * (theirs - expected).abs().max()


@every_family
def test_no_tokens_are_no_rows(family: Family) -> None:
    layer = _experts(family.spec, Span(0, COLUMNS), Span(0, SHARED_COLUMNS))
    layer.load(Source(_block(family), family.spec), PREFIX)
    assert layer(_x(0), _no_padding(_x(0))).shape == (0, HIDDEN)


def test_equal_logits_choose_the_first_experts() -> None:
    family = FAMILIES["qwen3_moe"]
    block = _block(family)
    with torch.no_grad():
        block.gate.weight.zero_()
        block.experts.down_proj[4:].fill_(torch.nan)  # neither chosen nor read
    layer = _experts(family.spec, Span(0, COLUMNS), Span(0, 0))
    layer.load(Source(block, family.spec), PREFIX)
    assert layer(_x(3), _no_padding(_x(3))).isfinite().all()


def test_refuses_an_activation_that_the_kernels_do_not_have() -> None:
    with pytest.raises(ConfigError, match="hidden_act=gelu"):
        _experts(replace(QWEN3, hidden_act="gelu"), Span(0, 32), Span(0, 0))


@pytest.mark.gpu
@every_family
@pytest.mark.parametrize("num_tokens", [1, 4, 37, 300])
def test_on_a_gpu_the_block_is_as_exact_as_transformers(family: Family, num_tokens: int) -> None:
    device = torch.device("cuda")
    block = _block(family).to(device, torch.bfloat16)
    source = Source(block, family.spec)
    layers = [
        _experts(family.spec, *spans, device=device, dtype=torch.bfloat16)
        for spans in zip(_spans(COLUMNS, 3), _spans(SHARED_COLUMNS, 3), strict=True)
    ]
    for layer in layers:
        layer.load(source, PREFIX)
    x = _x(num_tokens).to(device, torch.bfloat16)
    of_cuda = [layer for layer in layers if isinstance(layer, CudaExperts)]
    theirs = _expected(block, x).float()
    expected = _expected(block.float(), x.float())
    # transformers rounds its logits to bf16 and may choose other experts by that; where it does, nothing is compared.
    router = getattr(block, getattr(family.spec, "router_name", "router"))
    bias = router.bias if isinstance(family.spec, BiasedMixture) else torch.zeros(NUM_EXPERTS, device=device)
    chosen = (x.float() @ router.weight.T + bias).topk(family.spec.top_k).indices.sort(1).values
    rounded = (x @ router.weight.bfloat16().T + bias.bfloat16()).topk(family.spec.top_k).indices.sort(1).values
    same = (chosen == rounded).all(1)
    assert same.float().mean() > 0.5
    if isinstance(family.spec, MixtureOfExperts) and family.spec.latents:  # their sum is not the output yet
        whole = _experts(family.spec, Span(0, COLUMNS), Span(0, SHARED_COLUMNS), device=device, dtype=torch.bfloat16)
        whole.load(source, PREFIX)
        y = whole(x, _no_padding(x))
    else:
        y = sum(layer.partial(x, _no_padding(x), torch.full_like(x, torch.nan)).float() for layer in of_cuda)
    assert (y - expected)[same].abs().max() <= 2 * (theirs - expected)[same].abs().max()


def _exact_layers(family: Family, size: int, device: torch.device) -> list[CudaExperts]:
    """Those of all ranks; leaves, of 8 columns, are dealt as evenly as they go."""
    spec, dtype = family.spec, torch.float32 if device.type == "cpu" else torch.bfloat16
    source, layers = Source(_block(family), spec), []
    dealt = [
        [Span(8 * (total // 8 * r // size), 8 * (total // 8 * (r + 1) // size)) for r in range(size)]
        for total in (COLUMNS, SHARED_COLUMNS)
    ]
    axes = Axis.EXPERT_COLUMNS, Axis.SHARED_EXPERT_COLUMNS
    shards = tuple(LayerShard(dict(zip(axes, spans, strict=True))) for spans in zip(*dealt, strict=True))
    for rank in range(size):
        group = TensorParallelGroup(rank=rank, size=size, device=device, collectives=None)
        layer = CudaExperts(spec, LayerContext(shards, group, ExactArithmetic(device), dtype, device))
        layer.load(source, PREFIX)
        layers.append(layer)
    return layers


def _total(layer: CudaExperts, x: torch.Tensor, padding: Padding) -> torch.Tensor:
    """What the layer of a group of one adds to the residual stream, here fp32."""
    y, total = layer(x, padding), torch.zeros(x.shape, device=x.device)
    if isinstance(y, torch.Tensor):  # in the interpreter, on a CPU
        return y
    y.add_norm(total, torch.ones(x.shape[1], device=x.device), 1e-6)
    return total


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("sizes", [(3,), pytest.param((1, 2, 4), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in ("qwen2_moe", "deepseek_v3", "gpt_oss", "nemotron_h_latents") else pytest.mark.slow,
        )
        for name in FAMILIES
    ],
)
def test_exact_kernels_sum_ranks_and_batches_to_the_bits_of_one_token_on_one_rank(
    name: str, sizes: tuple[int, ...], device: torch.device, chains: None
) -> None:
    family = FAMILIES[name]
    [alone] = _exact_layers(family, 1, device)
    x = _x(10).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    tokens = [x[i : i + 1] for i in (0, 4, 8)]
    totals = torch.cat([_total(alone, token, _no_padding(token)) for token in tokens])
    if device.type == "cpu":
        torch.testing.assert_close(totals, _expected(_block(family), x)[::4], rtol=1e-4, atol=1e-5)
    expected = torch.cat([_summed([alone], token, _no_padding(token)) for token in tokens])
    if not isinstance(family.spec, MixtureOfExperts) or not family.spec.latents:
        assert torch.equal(totals, expected)
    padding = Padding(torch.full((10,), 16, device=device), 16)
    padding.slots[1] = 0
    for size in sizes:
        y = _summed(_exact_layers(family, size, device), x, padding)
        assert torch.equal(y[::4], expected), f"{size} ranks"
        assert not y[1].any()


def _summed(layers: list[CudaExperts], x: torch.Tensor, padding: Padding) -> torch.Tensor:
    """The sum of the layers of all ranks: the output, or its latents."""
    sums = [layer.rank_sum for layer in layers if isinstance(layer.rank_sum, ExactSum)]
    size = sums[0].out_features
    rooms = [torch.empty(count, len(x), size, device=x.device) for count in sums[0].tree.counts]
    nodes = [node for layer, out in zip(layers, rooms, strict=True) for node in layer.partial(x, padding, out)]
    return sums[0].tree.finish(nodes, torch.empty_like(nodes[0]))
