"""What of the small models of tests/helpers/families.py is compared: logits with transformers, and bits with bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.backend import AttentionBackend
from attention.kv_pool import FP8, ReqToTokenPool, TokenToKVPool
from attention.registry import create_backend
from attention.state_pool import StatePool
from parallel.collectives.group import TensorParallelGroup
from parallel.layers.embedding import whole_logits
from parallel.numerics.arithmetic import FAST, ExactArithmetic
from parallel.plan import ShardPlan
from tests.helpers.batches import batch_of
from tests.helpers.families import Case
from tests.helpers.paged_case import NewTokens, mask_of
from tests.helpers.rank_threads import on_ranks
from worker.models.decoder import Decoder
from worker.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_TOKENS = 37


@dataclass
class Rank:
    """One rank's decoder over a pool of its own, driven row by row."""

    decoder: Decoder
    backend: AttentionBackend
    table: ReqToTokenPool
    plan: ShardPlan
    group: TensorParallelGroup
    states: StatePool | None = None
    """Of the rows' recurrent layers, if there are any."""

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
        max_tokens: int = 64,
    ) -> Rank:
        """`kv_dtype`: None: `dtype`. With `exact` the backend is cpu."""
        plan, device = ShardPlan.create(case.model, group.size, exact=exact), group.device
        arithmetic = ExactArithmetic(CPU) if exact else FAST
        decoder = Decoder(case.model, plan, group, arithmetic=arithmetic, dtype=dtype, device=device)
        with Checkpoint.open(case.path, case.model) as checkpoint:
            decoder.load(checkpoint)
            if kv_dtype is FP8:
                decoder.set_kv_scales(checkpoint.kv_scales())
        decoder.set_max_positions(max_tokens)
        of_row = max_tokens // page_size
        table = ReqToTokenPool(3, of_row, device)
        # Pages of the three rows interleave, none in order.
        table.page_table[1:] = torch.arange(1, 3 * of_row + 1).view(of_row, 3).T.flip(1)
        layers, types = decoder.attention_layers, {"dtype": kv_dtype or dtype, "compute_dtype": dtype}
        pool = TokenToKVPool(layers, num_pages=3 * of_row, page_size=page_size, device=device, **types)
        backend = "cpu" if exact else backend
        states = StatePool(decoder.state_layers, 3, 0, device) if decoder.state_layers else None
        return cls(decoder, create_backend(backend, backend, pool), table, plan, group, states)

    def logits(self, rows: list[tuple[int, int, list[int]]], new_tokens: NewTokens | None = None) -> list[torch.Tensor]:
        """Logits [len(tokens), vocab] of each (row, start, tokens); in the first, they see each other as `new_tokens`
        says. None: causally."""
        token_ids = [token for _, _, tokens in rows for token in tokens]
        spans = [(row, start, len(tokens)) for row, start, tokens in rows]
        batch = batch_of(self.table, spans, self.backend.token_to_kv_pool.page_size, token_ids)
        every = torch.arange(batch.num_tokens, device=batch.positions.device)  # not only the last of each row
        batch = replace(batch, sample_indices=every)
        if self.states is not None:
            of_rows = torch.tensor([row for row, _, _ in rows], dtype=torch.int32)
            paged, no_drafts = batch.paged, torch.zeros_like(of_rows)
            states = self.states.begin(batch.num_tokens, of_rows, paged.cu_seqlens_q, paged.cache_seqlens, no_drafts)
            batch = replace(batch, states=states)
        if new_tokens is not None:
            mask = mask_of([new_tokens, *[None] * (len(rows) - 1)], batch.extend_lens.tolist(), every.device)
            batch = replace(
                batch, mask=mask, positions=torch.where(mask.positions < 0, batch.positions, mask.positions)
            )
        self.backend.init_forward_metadata(batch)
        hidden = self.decoder.forward(batch, self.backend)
        logits = whole_logits(self.decoder.local_logits(hidden), self.plan, self.group)
        return list(logits.split([len(tokens) for _, _, tokens in rows]))


def random_tokens(seed: int, count: int = NUM_TOKENS) -> list[int]:
    """Tokens that every model of the table has."""
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_logits(case: Case, tp_size: int, backend: str = "torch_native") -> None:
    """Compares with transformers in prefill, chunks, decodes and mixed steps, at every position."""
    first, second, third = random_tokens(1), random_tokens(2), random_tokens(3, 20)

    def body(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group, backend=backend)
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

    with torch.inference_mode():
        whole, parts, prompt = (case.hf(torch.tensor([tokens])).logits[0] for tokens in (first, second, third))
    expected = [whole, parts, parts[-1:], prompt]
    results = on_ranks(tp_size, body)
    for result in results:
        for ours, theirs, same in zip(result, expected, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            assert torch.equal(ours, same), "ranks must hold the same logits, or they sample different tokens"


def decoder_of(plan: ShardPlan, rank: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """One of `plan.tp_size` ranks, by itself."""
    group = TensorParallelGroup(rank=rank, size=plan.tp_size, device=CPU, collectives=None)
    return Decoder(plan.model, plan, group, dtype=dtype, device=CPU)


@dataclass(frozen=True)
class ExactLogits:
    """The logits that one rank has of two prompts, each alone, whose bits others must have too."""

    expected: list[torch.Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> ExactLogits:
        """Those of `case` with activations of `dtype`."""
        [[first, second, *_]] = on_ranks(1, lambda group: _exact_logits(case, group, dtype))
        assert first.isfinite().all()
        assert second.isfinite().all()
        return cls([first, second], dtype)

    def check(self, case: Case, tp_size: int) -> None:
        """Every bit is the same on so many ranks, of a prompt alone, in chunks beside others, and token by token."""
        for logits in on_ranks(tp_size, lambda group: _exact_logits(case, group, self.dtype)):
            for rows, meant in zip(logits, self.expected * 2, strict=True):
                assert torch.equal(rows.view(torch.int32), meant.view(torch.int32))


def _exact_logits(case: Case, group: TensorParallelGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of both prompts alone, and of both in chunks."""
    first, second = (np.random.default_rng(seed).integers(0, case.model.vocab_size, 37).tolist() for seed in (1, 2))
    rank = Rank.create(case, group, dtype, exact=True)
    alone = [rank.logits([(row, 0, tokens)])[0] for row, tokens in ((1, first), (2, second))]
    chunks = [rank.logits([(1, 0, first[:11]), (2, 0, second[:5])]), rank.logits([(2, 5, second[5:24])])]
    chunks += [rank.logits([(2, i, [second[i]]), (1, i - 13, [first[i - 13]])])[::-1] for i in range(24, 29)]
    chunks.append(rank.logits([(1, 16, first[16:]), (2, 29, second[29:])]))
    of_second = [chunks[0][1], chunks[1][0], *(rows[1] for rows in chunks[2:])]
    of_first = [rows[0] for rows in (chunks[0], *chunks[2:])]
    return [*alone, torch.cat(of_first), torch.cat(of_second)]
