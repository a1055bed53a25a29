"""Step metadata by the Triton kernels, in the interpreter where there is no GPU, and by their twins, against numpy."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention import step_metadata
from attention.step_metadata import StepTensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
MAX_LEN = 1300
NUM_ROWS = 12
POISON = 1 << 30
UNTOUCHED = -7

Int32Array = npt.NDArray[np.int32]
Row = tuple[int, int, int]  # page-table row, start, tokens
BATCHES: dict[str, list[Row]] = {
    "decode": [(3, 0, 1), (1, 63, 1), (12, 64, 1), (7, 1199, 1), (2, 15, 1)],
    "decode with padding": [(5, 700, 1), (4, 16, 1), (0, 0, 1), (0, 0, 1)],
    "prompts": [(9, 0, 5), (8, 0, 1200), (1, 48, 17)],
    "prompts with padding": [(9, 0, 5), (1, 63, 1), (0, 0, 0), (0, 0, 0), (0, 0, 26)],
    "mixed": [(6, 511, 1), (2, 600, 600), (3, 0, 1), (11, 1, 2), (10, 1023, 1)],
}


@pytest.fixture(params=["kernel", "torch"])
def by(request: pytest.FixtureRequest) -> ModuleType:
    """The module whose functions are tested."""
    if request.param == "torch":
        return step_metadata
    pytest.importorskip("triton")
    from attention.kernels import step_metadata as kernels

    return kernels


def _device(by: ModuleType) -> torch.device:
    return CPU if by is step_metadata else DEVICE


class Step:
    """A page table whose unused entries are poisoned, and the inputs of one batch."""

    def __init__(self, batch: list[Row], page_size: int) -> None:
        rng = np.random.default_rng(page_size)
        self.batch, self.page_size = batch, page_size
        self.max_pages = -(-MAX_LEN // page_size)
        self.table = np.full((NUM_ROWS + 1, self.max_pages), POISON, np.int32)
        self.table[0] = 0
        self.num_pages = [-(-(start + count) // page_size) for _, start, count in batch]
        for (row, _, _), num_pages in zip(batch, self.num_pages, strict=True):
            if row:
                self.table[row, :num_pages] = rng.integers(1, 100_000, num_pages)
        self.last_tokens = rng.integers(0, 150_000, NUM_ROWS + 1)
        self.cu_seqlens_q = np.cumsum([0] + [count for _, _, count in batch])
        self.token_ids = rng.integers(0, 150_000, self.cu_seqlens_q[-1])
        for i, (_, _, count) in enumerate(batch):
            # Single tokens are decodes, all but the last of them.
            if count == 1 and i < len(batch) - 1:
                self.token_ids[self.cu_seqlens_q[i]] = -1

        self.window_page_of = rng.integers(1, 5000, 100_000).astype(np.int32)
        self.window_page_of[0] = 0

    def run(self, by: ModuleType, *, windows: bool = False) -> StepTensors:
        device = _device(by)
        num_rows, num_tokens = len(self.batch), int(self.cu_seqlens_q[-1])
        rows, starts, counts = np.array(self.batch, np.int32).T
        # Slices of one buffer, as the runner makes them: nothing but 4 bytes of alignment is certain.
        parts = [rows, starts, self.cu_seqlens_q, self.token_ids]
        buffer = _to_device(np.concatenate([[99], *parts]).astype(np.int32), device)
        on_device = buffer[1:].split([len(part) for part in parts])
        out = StepTensors(
            input_ids=torch.full((num_tokens + 1,), UNTOUCHED, dtype=torch.int64, device=device),
            positions=torch.full((num_tokens + 1,), UNTOUCHED, dtype=torch.int64, device=device),
            out_cache_loc=torch.full((num_tokens + 1,), UNTOUCHED, dtype=torch.int64, device=device),
            cache_seqlens=torch.full((num_rows + 1,), UNTOUCHED, dtype=torch.int32, device=device),
            page_table=torch.full((num_rows + 1, self.max_pages), UNTOUCHED, dtype=torch.int32, device=device),
        )
        if windows:
            slots, pages = out.out_cache_loc.clone(), out.page_table.clone()
            out = replace(out, window_out_cache_loc=slots, window_page_table=pages)
        by.fill_step_metadata(
            rows=on_device[0],
            starts=on_device[1],
            cu_seqlens_q=on_device[2],
            token_ids=on_device[3],
            page_table=_to_device(self.table, device),
            last_tokens=_to_device(self.last_tokens[:, None], device),
            page_size=self.page_size,
            max_seqlen_q=int(counts.max()),
            out=out,
            window_page_of=_to_device(self.window_page_of, device) if windows else None,
        )
        return out


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", list(BATCHES))
def test_fills_inputs_slots_lengths_and_pages_of_every_row_and_nothing_past_them(
    name: str, page_size: int, by: ModuleType
) -> None:
    step = Step(BATCHES[name], page_size)
    out = step.run(by)
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in step.batch])
    rows = np.repeat([row for row, _, _ in step.batch], [count for _, _, count in step.batch])
    pages = step.table[rows, positions // page_size].astype(np.int64)
    expected_pages = np.full((len(step.batch) + 1, step.max_pages), UNTOUCHED)
    for i, (row, _, _) in enumerate(step.batch):
        expected_pages[i, : step.num_pages[i]] = step.table[row, : step.num_pages[i]]
    expected = {
        "input_ids": np.where(step.token_ids < 0, step.last_tokens[rows], step.token_ids),
        "positions": positions,
        "out_cache_loc": pages * page_size + positions % page_size,
        "cache_seqlens": np.array([start + count for _, start, count in step.batch]),
    }
    for field, values in expected.items():
        np.testing.assert_array_equal(getattr(out, field).cpu().numpy(), [*values, UNTOUCHED], field)
    np.testing.assert_array_equal(out.page_table.cpu().numpy(), expected_pages)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", list(BATCHES))
def test_fills_slots_and_pages_of_the_window_pool_and_nothing_past_them(
    name: str, page_size: int, by: ModuleType
) -> None:
    step = Step(BATCHES[name], page_size)
    plain, out = step.run(by), step.run(by, windows=True)
    for field in ("input_ids", "positions", "out_cache_loc", "cache_seqlens", "page_table"):
        assert torch.equal(getattr(out, field), getattr(plain, field)), field
    assert out.window_out_cache_loc is not None
    assert out.window_page_table is not None
    slots, pages = plain.out_cache_loc.cpu().numpy()[:-1], plain.page_table.cpu().numpy()
    expected = step.window_page_of[slots // page_size] * np.int64(page_size) + slots % page_size
    np.testing.assert_array_equal(out.window_out_cache_loc.cpu().numpy(), [*expected, UNTOUCHED])
    expected = np.where(pages == UNTOUCHED, UNTOUCHED, step.window_page_of[np.maximum(pages, 0)])
    np.testing.assert_array_equal(out.window_page_table.cpu().numpy(), expected)


def test_padding_rows_have_length_one_and_write_slot_zero(by: ModuleType) -> None:
    out = Step(BATCHES["decode with padding"], 16).run(by)
    assert out.cache_seqlens.tolist() == [701, 17, 1, 1, UNTOUCHED]
    assert out.out_cache_loc.tolist()[2:] == [0, 0, UNTOUCHED]
    assert out.page_table[2:4, 0].tolist() == [0, 0]


@pytest.mark.parametrize("num_deltas", [0, 1, 128, 300])
def test_page_deltas_write_their_entries_and_no_other(num_deltas: int, by: ModuleType) -> None:
    rng = np.random.default_rng(num_deltas)
    table = rng.integers(0, 1000, (NUM_ROWS + 1, 50)).astype(np.int32)
    entries = rng.permutation(NUM_ROWS * 50)[:num_deltas]
    deltas = np.stack([entries // 50 + 1, entries % 50, rng.integers(1, 9999, num_deltas)], 1).astype(np.int32)
    on_device = _to_device(table.copy(), _device(by))
    buffer = _to_device(np.concatenate([[99], deltas.reshape(-1)]).astype(np.int32), _device(by))
    by.apply_page_deltas(on_device, buffer[1:].view(-1, 3))
    table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]
    np.testing.assert_array_equal(on_device.cpu().numpy(), table)


def test_rows_begin_where_the_device_knows_with_drafts_that_it_has(by: ModuleType) -> None:
    """Rows 3 and 1 bring a last token and two drafts, and one token; row 2 says where it begins, and what with."""
    device, table = _device(by), np.arange(1, 13 * 40 + 1, dtype=np.int32).reshape(13, 40)
    last = np.arange(13 * 4).reshape(13, 4) + 1000
    last[1, 0] = -1
    rows, starts, ids = [3, 1, 2], [-1, -1, 5], [-1, -2, -3, -1, 70, 71]
    next_starts = np.arange(13, dtype=np.int32) * 10
    on_device = [_to_device(np.array(it, np.int32), device) for it in (rows, starts, [0, 3, 4, 6], ids, table)]
    out = StepTensors(
        input_ids=torch.zeros(6, dtype=torch.int64, device=device),
        positions=torch.zeros(6, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(6, dtype=torch.int64, device=device),
        cache_seqlens=torch.zeros(3, dtype=torch.int32, device=device),
        page_table=torch.zeros(3, 40, dtype=torch.int32, device=device),
    )
    by.fill_step_metadata(
        rows=on_device[0],
        starts=on_device[1],
        cu_seqlens_q=on_device[2],
        token_ids=on_device[3],
        page_table=on_device[4],
        last_tokens=_to_device(last, device),
        page_size=16,
        max_seqlen_q=3,
        out=out,
        next_starts=_to_device(next_starts, device),
    )
    assert out.input_ids.tolist() == [*last[3, :3].tolist(), 0, 70, 71]
    assert out.positions.tolist() == [30, 31, 32, 10, 5, 6]
    assert out.cache_seqlens.tolist() == [33, 11, 7]
    assert (out.out_cache_loc // 16).tolist() == table[[3, 3, 3, 1, 2, 2], [1, 1, 2, 0, 0, 0]].tolist()


@pytest.mark.gpu
def test_a_replayed_graph_follows_its_inputs() -> None:
    from attention.kernels import step_metadata as kernels

    first, second = Step([(3, 0, 1), (1, 63, 1)], 16), Step([(7, 200, 1), (0, 0, 1)], 16)
    static = {
        "rows": torch.zeros(2, dtype=torch.int32, device=DEVICE),
        "starts": torch.zeros(2, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.arange(3, dtype=torch.int32, device=DEVICE),
        "token_ids": torch.full((2,), -1, dtype=torch.int32, device=DEVICE),
        "page_table": torch.zeros(NUM_ROWS + 1, first.max_pages, dtype=torch.int32, device=DEVICE),
        "last_tokens": torch.zeros(NUM_ROWS + 1, 1, dtype=torch.int64, device=DEVICE),
    }
    out = StepTensors(
        input_ids=torch.zeros(2, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(2, dtype=torch.int64, device=DEVICE),
        out_cache_loc=torch.zeros(2, dtype=torch.int64, device=DEVICE),
        cache_seqlens=torch.zeros(2, dtype=torch.int32, device=DEVICE),
        page_table=torch.zeros(2, first.max_pages, dtype=torch.int32, device=DEVICE),
    )
    kernels.fill_step_metadata(**static, page_size=16, max_seqlen_q=1, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.fill_step_metadata(**static, page_size=16, max_seqlen_q=1, out=out)
    for step in (first, second):
        rows, starts, _ = np.array(step.batch, np.int32).T
        values = (rows, starts, step.cu_seqlens_q, step.token_ids, step.table, step.last_tokens[:, None])
        for tensor, value in zip(static.values(), values, strict=True):
            tensor.copy_(torch.from_numpy(value))
        graph.replay()
        expected = step.run(kernels)
        assert out.input_ids.tolist() == expected.input_ids.tolist()[:2]
        assert out.out_cache_loc.tolist() == expected.out_cache_loc.tolist()[:2]
        assert out.cache_seqlens.tolist() == expected.cache_seqlens.tolist()[:2]
        for i, num_pages in enumerate(step.num_pages):
            assert out.page_table[i, :num_pages].tolist() == expected.page_table[i, :num_pages].tolist()
