"""Checks of a rank before it serves: whether this machine meets the contract of exact numerics.

A compiler that fuses operations differently, or a kernel with an order of sums that depends on its size, would go
unnoticed, since the answers look right. A CPU has a few kernels for all shapes, and `check_exactness` runs them. On a
GPU each shape has its own kernels, also in cuBLAS, so `check_steps` runs the model itself, for about ten steps. It uses
only kernels that serving uses. It also checks what no step shows: that products and sums equal those of other group
sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer
from attention.registry import create_backend
from configs.errors import EngineError
from configs.layers import Axis, Cut
from configs.numerics import leaf_columns
from configs.recurrent import STATE_CHUNK
from parallel.collectives.group import TensorParallelGroup
from parallel.collectives.interface import PartialSum
from parallel.numerics.arithmetic import Arithmetic, LayerContext
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.rank_sum import ExactSum
from parallel.numerics.weight import ChainWeight
from parallel.plan import LayerShard, Span
from parallel.tree import SumTree
from worker.layers.norm import RMSNorm
from worker.models.decoder import Decoder
from worker.protocol import RowFlag, StepFrame
from worker.step.model_runner import ModelRunner
from worker.step.step import Step
from worker.step.step_inputs import StepInputs

_ROWS = 37
_INPUTS = 384
_OUTPUTS = 2112
_TOKENS = 600  # more than a chunk of keys
_PAGE_SIZE = 16
_STEP_SIZES = (1, 16, 17, 64, 128, 256, 513)
"""Numbers of new tokens of steps. Products, experts and sums over ranks change kernels above 16, 64, 128 and 512."""
_MOST_TOKENS = 1100
_MOST_ROWS = 256
_MOST_ELEMENTS = 1 << 24
"""Maximum number of fp32 elements (64 MiB) of a product or of nodes in one check. Larger ones are not checked."""
_WRONG = "numerics=exact does not hold on this machine: {}; choose numerics=fast, and report this"


def check_exactness(arithmetic: Arithmetic, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises EngineError, naming the difference, if products, sums, norms or attention break the contract.

    Args:
        backend: name of the attention backend.
        dtype: dtype of the activations.
    """
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, _INPUTS, generator=random).to(dtype) for rows in (_ROWS, _OUTPUTS))
    x, weight = x.to(device), weight.to(device)
    _check_products(arithmetic, x, weight)
    _check_sums(arithmetic, x, weight)
    norm = RMSNorm(_INPUTS, 1e-6, dtype=dtype, device=device)
    norm.weight.copy_(weight[0])
    _require_equal(norm(x)[-1:], norm(x[-1:]), "the norm of a row depends on the other rows")
    _check_attention(backend, dtype, device, random)


def check_steps(
    arithmetic: Arithmetic,
    runner: ModelRunner,
    decoder: Decoder,
    group: TensorParallelGroup,
    *,
    num_tokens: int,
    max_rows: int,
    page_size: int,
    vocab_size: int,
) -> None:
    """Raises EngineError, naming the difference, if the model's own products, sums or steps break the contract.

    Every rank of the group must call it before the first request, because it writes to the pool and the tables of rows.

    Args:
        runner: must have pages 1, 2, ... for `num_tokens`, in the window pool too if there is one.
        num_tokens: maximum number of tokens of a step. At most _MOST_TOKENS are used, or with sparse layers `top_k` +
            _MOST_ROWS, because up to `top_k` tokens they see all keys.
        max_rows: maximum number of rows of a step.
    """
    sizes = [size for size in _STEP_SIZES if size <= num_tokens]
    for weight in arithmetic.chains.values():
        for num_rows in sizes:
            if num_rows * len(weight) <= _MOST_ELEMENTS:
                _check_columns(weight, num_rows, decoder.dtype)
    for rank_sum in arithmetic.sums.values():
        for num_rows in sizes:
            if num_rows * rank_sum.out_features * sum(rank_sum.tree_for(num_rows).counts) <= _MOST_ELEMENTS:
                _check_rank_sum(rank_sum, group, num_rows, decoder.dtype)
    latent = [layer for layer in runner.token_to_kv_pool.layers if isinstance(layer, LatentLayer)]
    num_tokens = min(num_tokens, max([_MOST_TOKENS, *(layer.top_k + _MOST_ROWS for layer in latent if layer.top_k)]))
    max_rows = min(max_rows, num_tokens, _MOST_ROWS)
    if runner.state_pool is not None and num_tokens % STATE_CHUNK == 0:
        num_tokens -= 1  # the last token, which is computed again, must come after the stored state
    tokens = np.random.default_rng(0).integers(0, vocab_size, num_tokens)
    whole = runner.hidden_of(_step(tokens, [0], page_size))
    sizes.append(num_tokens)
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        if (stop := min(start + size, num_tokens)) > start:
            found = runner.hidden_of(_step(tokens[start:stop], [start], page_size))
            _require_equal(
                found, whole[start:stop], f"a token's hidden state changes in a step of {stop - start} tokens"
            )
    positions = np.linspace(0, num_tokens - 1, max_rows).astype(np.int64)
    if runner.state_pool is not None:
        # Recurrent layers need the state before each row's token. Only the one after the prompt is there.
        positions = np.full(max_rows, num_tokens - 1)
        runner.state_pool.repeat_first_row(max_rows)
    found = runner.hidden_of(_step(tokens[positions], positions.tolist(), page_size))
    _require_equal(found, whole[positions.tolist()], f"a token's hidden state changes in a step of {max_rows} decodes")
    logits = decoder.local_logits(whole[-max_rows:])
    for size in (size for size in sizes if size < max_rows):
        _require_equal(
            decoder.local_logits(whole[-size:]), logits[-size:], "logits depend on the other rows of the batch"
        )


def _step(tokens: npt.NDArray[np.int64], starts: Sequence[int], page_size: int) -> StepFrame:
    """A step over `tokens`: one row if there is one start, else a row of one token for each start. Rows share pages."""
    lens = np.full(len(starts), len(tokens) // len(starts), np.int32)
    ends = (np.array(starts) + lens).tolist()
    deltas = [(row, page, page + 1) for row, end in enumerate(ends, start=1) for page in range(-(-end // page_size))]
    pages = np.arange(1, -(-max(ends) // page_size) + 1, dtype=np.int32)
    return StepFrame(
        generation=1,
        step=1,
        rows=np.arange(1, len(starts) + 1, dtype=np.int32),
        starts=np.array(starts, np.int32),
        lens=lens,
        flags=np.full(len(starts), RowFlag.HAS_TOKENS | RowFlag.SAMPLE, np.int32),
        token_ids=tokens.astype(np.int32),
        page_deltas=np.array(deltas, np.int32),
        window_pages=np.stack((pages, pages), axis=1),
    )


def _check_columns(weight: Tensor | Fp8Matrix, num_rows: int, dtype: torch.dtype) -> None:
    """Checks that a column of a product does not depend on which other columns the rank holds."""
    random = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(num_rows, weight.shape[1], generator=random, device=weight.device).to(dtype)
    whole = ChainWeight(weight, None).in_fp32(x)
    for num_parts in (2, 3):
        columns = len(weight) // num_parts // 16 * 16
        if columns:
            part = ChainWeight(weight[:columns], None).in_fp32(x)
            _require_equal(part, whole[:, :columns], "a product's column depends on the other columns")


def _check_rank_sum(rank_sum: ExactSum, group: TensorParallelGroup, num_rows: int, dtype: torch.dtype) -> None:
    """Checks that the ranks add their nodes in the tree's order, and so like any other number of ranks."""
    random = torch.Generator(group.device).manual_seed(0)  # equal nodes on every rank
    tree, shape = rank_sum.tree_for(num_rows), (num_rows, rank_sum.out_features)
    nodes = torch.randn(sum(tree.counts), *shape, generator=random, device=group.device)
    first, count = sum(tree.counts[: group.rank]), tree.counts[group.rank]
    expected = tree.finish(nodes.unbind(), torch.empty_like(nodes[0]))
    own = nodes[first : first + count]
    found = rank_sum.for_norm(num_rows, lambda out: own if out is None else out.copy_(own))
    if isinstance(found, PartialSum):
        # The sum minus its rounded value shows more of its bits than the rounded sum alone.
        residual = -expected.to(dtype)
        expected = (residual.float() + expected).to(dtype)
        found.add_norm(residual, torch.ones(shape[1], dtype=dtype, device=group.device), 1e-6)
        found = residual
    _require_equal(found, expected, f"{group.size} ranks add {num_rows} rows in another order")


def _check_products(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> None:
    product = arithmetic.weight(weight.clone(), None)  # the product takes over this memory
    whole = product.in_fp32(x)
    for part in (slice(0, 1), slice(5, 21)):
        _require_equal(product.in_fp32(x[part]), whole[part], "a product's row depends on the other rows")
    shard = arithmetic.weight(weight[8:40].clone(), None).in_fp32(x)
    _require_equal(shard, whole[:, 8:40], "a product's column depends on the other columns")
    if not torch.equal(whole[:2, :2], _chains(x[:2], weight[:2])):
        raise EngineError(_WRONG.format("a product is not a chain of fused multiply-adds"))


def _chains(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the contract's plain form: add each product to the sum so far, and round once."""
    sums = torch.zeros(len(x), len(weight))
    for i, row in enumerate(x.float().tolist()):
        for j, column in enumerate(weight.float().tolist()):
            total = Fraction(0)
            for a, b in zip(row, column, strict=True):
                total = Fraction(_to_fp32(total + Fraction(a) * Fraction(b)))
            sums[i, j] = float(total)
    return sums


def _to_fp32(value: Fraction) -> float:
    """The nearest fp32, ties to even. A conversion through fp64 would round twice."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
    return float(min((near, *around), key=lambda it: (abs(Fraction(float(it)) - value), int(it.view(np.int32)) & 1)))


def _check_sums(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> None:
    """Checks that a sum over ranks does not depend on their number. One rank computes all parts in turn."""
    cut, leaf = Cut(Axis.MLP_COLUMNS, 1), leaf_columns(_INPUTS)
    num_leaves = _INPUTS // leaf
    answers = []
    for size in (1, 2, 3, 5):
        borders = [num_leaves * rank // size for rank in range(size + 1)]
        spans = [Span(start * leaf, stop * leaf) for start, stop in itertools.pairwise(borders)]
        shards = tuple(LayerShard({cut.axis: span}) for span in spans)
        nodes: list[Tensor] = []
        for rank, span in enumerate(spans):
            group = TensorParallelGroup(rank=rank, size=size, device=x.device, collectives=None)
            context = LayerContext(shards, group, arithmetic, x.dtype, x.device)
            columns = slice(*span)
            own = weight[:, columns].clone(memory_format=torch.contiguous_format)
            nodes += arithmetic.part(own, cut, context)(x[:, columns].contiguous())
        tree = SumTree.of(tuple(Span(start, stop) for start, stop in itertools.pairwise(borders)))
        answers.append(tree.finish(nodes, torch.empty_like(nodes[0])))
    for answer in answers[1:]:
        _require_equal(answer, answers[0], "a sum over ranks depends on their number")


def _check_attention(name: str, dtype: torch.dtype, device: torch.device, random: torch.Generator) -> None:
    """Checks that attention gives a token the same output in a decode and at the end of a prompt."""
    layer = AttentionLayer(layer_id=0, tp_q_head_num=3, tp_k_head_num=1, head_dim=64, scale=0.125)
    num_pages = -(-_TOKENS // _PAGE_SIZE)
    pool = TokenToKVPool(
        [layer], num_pages=num_pages, page_size=_PAGE_SIZE, dtype=dtype, compute_dtype=dtype, device=device
    )
    for slots in pool.slots(0):
        slots.copy_(torch.randn(slots.shape, generator=random))
    table = ReqToTokenPool(1, num_pages, device)
    table.page_table[1] = torch.arange(1, num_pages + 1)
    queries = torch.randn(_TOKENS, 3 * 64, generator=random).to(dtype).to(device)
    backend = create_backend(name, name, pool, exact=True)
    whole = _attended(backend, table, queries, 0)
    for start in (_TOKENS - 1, _TOKENS - 9):
        found = _attended(backend, table, queries, start)
        _require_equal(found, whole[start:], "attention of a token depends on the tokens it is computed with")


def _attended(backend: AttentionBackend, table: ReqToTokenPool, queries: Tensor, start: int) -> Tensor:
    """Attention's output for the queries from `start` on, computed as the new tokens of one row."""
    num_tokens = len(queries) - start
    frame = StepFrame(
        generation=1,
        step=1,
        rows=np.array([1], np.int32),
        starts=np.array([start], np.int32),
        lens=np.array([num_tokens], np.int32),
        flags=np.array([RowFlag.HAS_TOKENS | RowFlag.SAMPLE], np.int32),
        token_ids=np.zeros(num_tokens, np.int32),
    )
    inputs = StepInputs(table, max_rows=1, max_tokens=num_tokens, page_size=_PAGE_SIZE)
    step = Step.of(frame)
    inputs.upload(step, step.shape)
    backend.init_forward_metadata(inputs.batch(step))
    return backend.attend(queries[start:], backend.layers[0])


def _require_equal(found: Tensor, expected: Tensor, wrong: str) -> None:
    if not torch.equal(found, expected):
        raise EngineError(_WRONG.format(wrong))
