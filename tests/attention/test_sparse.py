"""Sparse attention (DSA) of every backend that serves it, over pools whose unused parts are NaN."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.backend import AttentionBackend
from attention.kernels import decode
from attention.latent import LatentHeads
from attention.registry import IMPLEMENTATIONS
from attention.sparse import IndexInputs, SparseStep
from configs.attention import BACKENDS, Feature
from tests.helpers.batches import batch_of
from tests.helpers.latent_case import BATCHES, LatentCase, layer_of
from tests.helpers.pairs import pairs

TOP_K, HEADS, DIM = 12, 5, 24
SERVING = [name for name, spec in BACKENDS.items() if Feature.SPARSE in spec.features]


class SparseCase(LatentCase):
    """Rows of random latents, index keys and index queries."""

    def __init__(
        self, batch: str, page_size: int, dtype: torch.dtype, device: torch.device, *, equal_keys: bool = False
    ) -> None:
        layer = layer_of(3, top_k=TOP_K, index_heads=HEADS, index_dim=DIM)
        super().__init__(layer, page_size, BATCHES[batch], dtype, device)
        draw = torch.Generator().manual_seed(2)
        lens = [prefix + extend for prefix, extend in self.rows]
        self.index_k = [torch.randn(num, DIM, generator=draw).to(device, dtype) for num in lens]
        if equal_keys:
            self.index_k = [it[:1].expand_as(it) for it in self.index_k]
        num_tokens = len(self.batch.positions)
        self.index = IndexInputs(
            torch.randn(num_tokens, HEADS, DIM, generator=draw).to(device, dtype),
            torch.cat([it[prefix:] for it, (prefix, _) in zip(self.index_k, self.rows, strict=True)]),
            torch.randn(num_tokens, HEADS, generator=draw).to(device),
        )
        for row, (latents, index_k) in enumerate(zip(self.kept, self.index_k, strict=True), start=1):
            at = torch.arange(len(latents), device=device)
            slots = self.table.page_table[row].long()[at // page_size] * page_size + at % page_size
            self.pool.set_kv(0, slots, latents)
            self.pool.set_index(0, slots, index_k)
        self.step = SparseStep.of(self.batch, max(lens))

    def backend(self, name: str, **options: bool) -> AttentionBackend:
        backend = IMPLEMENTATIONS[name](self.pool.layers, self.pool, **options)
        backend.init_forward_metadata(self.batch)
        return backend

    def scores(self) -> list[torch.Tensor]:
        """In fp32, for each token those of the keys that it may see."""
        found = []
        queries = self.index.q.split([extend for _, extend in self.rows])
        weights = self.index.weights.split([extend for _, extend in self.rows])
        for q, weight, k, (prefix, extend) in zip(queries, weights, self.index_k, self.rows, strict=True):
            for i in range(extend):
                by_head = torch.relu(q[i].float() @ k[: prefix + i + 1].float().T)
                found.append(weight[i] @ by_head)
        return found

    def chosen(self) -> list[list[int]]:
        """For each token the positions that it sees, ascending."""
        ordered = [sorted(range(len(it)), key=lambda i, it=it: (-float(it[i]), i)) for it in self.scores()]
        return [sorted(it[:TOP_K]) for it in ordered]

    def slots(self) -> list[list[int]]:
        """The slots of `chosen`."""
        table, size = self.table.page_table, self.pool.page_size
        rows = [row for row, (_, extend) in enumerate(self.rows, start=1) for _ in range(extend)]
        return [
            [int(table[row, at // size]) * size + at % size for at in seen]
            for row, seen in zip(rows, self.chosen(), strict=True)
        ]

    def attended(self) -> torch.Tensor:
        """[num_tokens, heads, v_dim] in fp32."""
        layer, weight = self.layer, self.weight.float()
        out, chosen, q = [], iter(self.chosen()), torch.cat(self.q).float()
        for kept, (_, extend) in zip(self.kept, self.rows, strict=True):
            for _ in range(extend):
                seen = kept[next(chosen)].float()
                latent, k_rope = seen.split((layer.latent_dim, layer.rope_dim), dim=1)
                for head in range(layer.tp_q_head_num):
                    own = latent @ weight[head].T
                    keys = torch.cat((own[:, : layer.nope_dim], k_rope), dim=1)
                    scores = keys @ q[len(out) // layer.tp_q_head_num, head] * layer.scale
                    out.append(torch.softmax(scores, 0) @ own[:, layer.nope_dim :])
        return torch.stack(out).view(len(q), layer.tp_q_head_num, -1)


@pytest.fixture
def device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if device.type == "cpu":
        monkeypatch.setattr(decode, "_MAX_SPLITS", 2)  # each a turn of the interpreter's loop, empty or not
    return device


def _serves(name: str, device: torch.device) -> bool:
    return BACKENDS[name].device in (None, device.type) or name == "triton"


@pytest.mark.parametrize(
    ("name", "batch", "page_size", "dtype"),
    pairs(SERVING, [*BATCHES], [1, 16, 64], [torch.float32, torch.float16]),
)
def test_tokens_see_the_keys_with_the_largest_index_scores(
    name: str, batch: str, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    if not _serves(name, device):
        pytest.skip(f"{name} does not run on {device.type}")
    case = SparseCase(batch, page_size, dtype, device)
    backend, step = case.backend(name), case.step
    scores = backend.index_scores(case.index, case.layer, slice(0, len(step.rows)), step.most_keys)
    for ours, expected in zip(scores, case.scores(), strict=True):
        torch.testing.assert_close(ours[: len(expected)], expected, atol=1e-4, rtol=1e-4)
        assert (ours[len(expected) :] == -torch.inf).all()
    chosen = step.choose(scores, slice(0, len(scores)), TOP_K, page_size)
    for found, slots in zip(chosen.tolist(), case.slots(), strict=True):
        assert found[: len(slots)] == slots
    heads = LatentHeads(case.layer, case.weight)
    out = heads.values(backend.attend_chosen(heads.absorb(torch.cat(case.q)), case.layer, step.paged(chosen)))
    bound = 2e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(
        out.view(len(out), -1, case.layer.v_dim).float(), case.attended(), atol=bound, rtol=bound
    )


@pytest.mark.parametrize("name", SERVING)
def test_of_equal_scores_the_first_positions_are_chosen(name: str, device: torch.device) -> None:
    if not _serves(name, device):
        pytest.skip(f"{name} does not run on {device.type}")
    case = SparseCase("mixed", 16, torch.float32, device, equal_keys=True)
    scores = case.backend(name).index_scores(case.index, case.layer, slice(0, len(case.step.rows)), case.step.most_keys)
    seen = scores > -torch.inf
    tied = torch.where(seen, 1.0, scores)
    zeros = torch.where(seen, torch.where(torch.arange(tied.shape[1], device=device) % 2 == 0, -0.0, 0.0), scores)
    for equal in (tied, zeros):
        chosen = case.step.choose(equal, slice(0, len(equal)), TOP_K, 16)
        expected = case.step.choose(
            torch.where(seen, -torch.arange(tied.shape[1], device=device).float(), scores),
            slice(0, len(equal)),
            TOP_K,
            16,
        )
        assert torch.equal(chosen, expected)


def test_tokens_of_no_row_see_the_first_key_of_the_last_row() -> None:
    case = SparseCase("mixed", 16, torch.float32, torch.device("cpu"))
    stale = torch.full((3,), 1 << 20)
    padded = dataclasses.replace(case.batch, positions=torch.cat((case.batch.positions, stale)))
    step, num_tokens = SparseStep.of(padded, case.step.most_keys), len(case.batch.positions)
    assert torch.equal(step.rows[:num_tokens], case.step.rows)
    assert torch.equal(step.positions[:num_tokens], case.batch.positions)
    assert step.rows[num_tokens:].tolist() == [len(case.rows) - 1] * 3
    assert step.positions[num_tokens:].tolist() == [0] * 3


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_scores_and_answers_have_the_same_bits_in_every_step(name: str, device: torch.device) -> None:
    """Whole prompts, chunks and decodes."""
    if not _serves(name, device):
        pytest.skip(f"{name} does not run on {device.type}")
    case = SparseCase("extend", 16, torch.float32, device)
    first, num_tokens = case.rows[0][1], case.rows[1][1]
    q = LatentHeads(case.layer, case.weight).absorb(torch.cat(case.q)[first:])
    index = IndexInputs(*(it[first:] for it in case.index))

    def run(borders: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found, out = [], []
        for start, stop in itertools.pairwise(borders):
            batch = batch_of(case.table, [(2, start, stop - start)], 16)
            backend, tokens = case.backend(name, exact=True), slice(0, stop - start)
            backend.init_forward_metadata(batch)
            step = SparseStep.of(batch, num_tokens)
            scores = backend.index_scores(
                IndexInputs(*(it[start:stop] for it in index)), case.layer, tokens, num_tokens
            )
            chosen = step.paged(step.choose(scores, tokens, TOP_K, 16))
            found.append(scores)
            out.append(backend.attend_chosen(q[start:stop], case.layer, chosen))
        return torch.cat(found), torch.cat(out)

    whole = run([0, num_tokens])
    for borders in ([0, 7, 20, num_tokens], [*range(num_tokens + 1)]):
        for ours, expected in zip(run(borders), whole, strict=True):
            assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
