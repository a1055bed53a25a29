"""Sparse attention (DSA), by every backend that serves it. The unused parts of the pools are NaN."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention import sparse
from attention.backend import AttentionBackend
from attention.kernels import decode, index_scores
from attention.latent import LatentHeads
from attention.registry import IMPLEMENTATIONS
from attention.sparse import IndexInputs, SparseStep
from attention.step_shape import StepShape
from configs.attention import BACKENDS, Feature
from tests.helpers.batches import batch_of
from tests.helpers.latent_case import BATCHES, LITE, LatentCase, layer_of
from tests.helpers.pairs import pairs

TOP_K, HEADS, DIM = 12, 5, 24
# FlashMLA has tests/attention/test_flash_mla.py.
SERVING = [name for name, spec in BACKENDS.items() if Feature.SPARSE in spec.features and spec.package is None]


class SparseCase(LatentCase):
    """Rows of random latents, index keys and index queries."""

    def __init__(
        self,
        batch: str,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        equal_keys: bool = False,
        widths: dict[str, int] | None = None,
    ) -> None:
        if widths is None:
            widths = LITE if device.type == "cuda" else {}
        layer = layer_of(3, top_k=TOP_K, index_heads=HEADS, index_dim=DIM, **widths)
        super().__init__(layer, page_size, BATCHES[batch], dtype, device)
        draw = torch.Generator().manual_seed(2)
        lens = [prefix + extend for prefix, extend in self.rows]
        self.index_k = [torch.randn(num, DIM, generator=draw).to(device, dtype) for num in lens]
        if equal_keys:
            self.index_k = [it[:1].expand_as(it) for it in self.index_k]
        num_tokens = len(self.batch.positions)
        self.index = IndexInputs(
            torch.randn(num_tokens, HEADS + 1, DIM, generator=draw).to(device, dtype)[:, :HEADS],
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
        """The backend, prepared for the step. Skips the test if the backend does not run on the case's device."""
        if BACKENDS[name].device not in (None, self.pool.device.type) and name != "triton":
            pytest.skip(f"{name} does not run on {self.pool.device.type}")
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


def choose(case: SparseCase, name: str, step: SparseStep | None = None, **options: bool) -> torch.Tensor:
    return case.backend(name, **options).choose_keys(case.index, case.layer, step or case.step)


def assert_chosen(case: SparseCase, found: torch.Tensor, expected: list[list[int]]) -> None:
    """What follows the keys of tokens that see fewer than TOP_K of them does not count."""
    assert found.dtype is torch.int32
    assert [row[: len(slots)] for row, slots in zip(found.tolist(), expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("name", "batch", "page_size", "dtype"),
    pairs(SERVING, [*BATCHES], [1, 16, 64], [torch.float32, torch.float16]),
)
def test_tokens_see_the_keys_with_the_largest_index_scores(
    name: str, batch: str, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = SparseCase(batch, page_size, dtype, device)
    chosen = choose(case, name)
    assert_chosen(case, chosen, case.slots())
    heads = LatentHeads(case.layer, case.weight)
    paged = case.step.paged(chosen)
    out = heads.values(case.backend(name).attend_chosen(heads.absorb(torch.cat(case.q)), case.layer, paged))
    bound = 2e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(
        out.view(len(out), -1, case.layer.v_dim).float(), case.attended(), atol=bound, rtol=bound
    )


@pytest.mark.parametrize("name", SERVING)
def test_of_equal_scores_the_first_positions_are_chosen(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys have one score, in some tokens 0.0, which others sum up to as -0.0."""
    monkeypatch.setattr(index_scores, "_CHOSEN_BLOCK", 8)
    case = SparseCase("mixed", 16, torch.float32, device, equal_keys=True)
    case.index.weights[1::3] = 0.0
    case.index.weights[2::3] = -0.0
    table, rows, last = case.table.page_table[1:].tolist(), case.step.rows.tolist(), case.step.positions.tolist()
    expected = [
        [table[row][at // 16] * 16 + at % 16 for at in range(min(end + 1, TOP_K))]
        for row, end in zip(rows, last, strict=True)
    ]
    assert_chosen(case, choose(case, name), expected)


@pytest.mark.parametrize("name", SERVING)
def test_scores_that_are_no_numbers_choose_keys_of_the_row_all_the_same(name: str, device: torch.device) -> None:
    case = SparseCase("extend", 16, torch.float32, device)
    case.index.weights[::2] = torch.nan
    case.index.weights[::4] = -torch.nan
    table, last = case.table.page_table[1:].tolist(), case.step.positions.tolist()
    for row, end, slots in zip(case.step.rows.tolist(), last, choose(case, name).tolist(), strict=True):
        every = [table[row][at // 16] * 16 + at % 16 for at in range(end + 1)]
        found = slots[: min(end + 1, TOP_K)]
        assert len({*found}) == len(found)
        assert {*found} <= {*every}


def test_tokens_of_no_row_see_the_first_key_of_the_last_row() -> None:
    case = SparseCase("mixed", 16, torch.float32, torch.device("cpu"))
    stale = torch.full((3,), 1 << 20)
    padded = dataclasses.replace(case.batch, positions=torch.cat((case.batch.positions, stale)))
    step, num_tokens = SparseStep.of(padded, case.step.most_keys), len(case.batch.positions)
    assert torch.equal(step.rows[:num_tokens], case.step.rows)
    assert torch.equal(step.positions[:num_tokens], case.batch.positions)
    assert step.rows[num_tokens:].tolist() == [len(case.rows) - 1] * 3
    assert step.positions[num_tokens:].tolist() == [0] * 3


@pytest.mark.parametrize(("most_scores", "most_tokens"), [(1 << 20, 7), (150, 512), (1, 512)])
def test_parts_of_a_step_are_the_step(most_scores: int, most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_MOST_SCORES", most_scores)
    monkeypatch.setattr(sparse, "_MOST_TOKENS", most_tokens)
    case = SparseCase("mixed", 16, torch.float32, torch.device("cpu"))
    backend, parts = case.backend("cpu"), [*case.step.parts()]
    assert len(parts) > 2
    chosen = [
        backend.choose_keys(IndexInputs(*(it[tokens] for it in case.index)), case.layer, part) for tokens, part in parts
    ]
    assert torch.equal(torch.cat(chosen), choose(case, "cpu"))


def test_a_captured_decode_attends_as_an_eager_one_whatever_keys_its_rows_have(device: torch.device) -> None:
    """A captured step may have rows of any length, so its tokens choose among all pages of the table."""
    case = SparseCase("decode", 16, torch.float32, device)
    rows = len(case.rows)
    heads, out = LatentHeads(case.layer, case.weight), []
    for captured in (False, True):
        backend = case.backend("triton")
        if captured:
            backend.prepare_capture(case.batch, StepShape(rows, rows, rows))
        out.append(backend.attend_stored(torch.cat(case.q), case.layer, heads, case.index))
    torch.testing.assert_close(out[1], out[0])
    torch.testing.assert_close(out[1].view(rows, -1, case.layer.v_dim), case.attended(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_chosen_keys_and_answers_have_the_same_bits_in_every_step(name: str, device: torch.device) -> None:
    """Whole prompts, chunks and decodes."""
    case = SparseCase("extend", 16, torch.float32, device)
    first, num_tokens = case.rows[0][1], case.rows[1][1]
    q = LatentHeads(case.layer, case.weight).absorb(torch.cat(case.q)[first:])
    index = IndexInputs(*(it[first:] for it in case.index))

    def run(borders: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found, out = [], []
        for start, stop in itertools.pairwise(borders):
            backend, batch = case.backend(name, exact=True), batch_of(case.table, [(2, start, stop - start)], 16)
            backend.init_forward_metadata(batch)
            step, tokens = SparseStep.of(batch, num_tokens), slice(start, stop)
            slots = backend.choose_keys(IndexInputs(*(it[tokens] for it in index)), case.layer, step)
            lens = (step.positions + 1).clamp(max=TOP_K)
            found.append(slots.masked_fill(torch.arange(TOP_K, device=device) >= lens[:, None], 0))
            out.append(backend.attend_chosen(q[tokens], case.layer, step.paged(slots)))
        return torch.cat(found), torch.cat(out)

    whole = run([0, num_tokens])
    for borders in ([0, 7, 20, num_tokens], [*range(num_tokens + 1)]):
        for ours, expected in zip(run(borders), whole, strict=True):
            assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
