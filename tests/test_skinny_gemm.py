"""The matrix product of a few rows against an fp64 one: in Triton's interpreter, and in bf16 on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="a CPU install has no Triton")

from parallel.kernels.skinny_gemm import GemmTuning, skinny_gemm

TILE = GemmTuning(block_n=16, block_k=64, num_warps=2, num_stages=3)
VECTOR = GemmTuning(block_n=8, block_k=64, num_warps=2, num_stages=3, tensor_cores=False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs: interpreted on CPU tensors, or compiled for a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return torch.device(request.param)


def _split(tuning: GemmTuning, num_splits: int) -> GemmTuning:
    return dataclasses.replace(tuning, num_splits=num_splits)


class Case:
    """A random weight and rows, which lie in wider rows of NaN; counters to share between calls."""

    def __init__(
        self, rows: int, n: int, k: int, device: torch.device, dtype: torch.dtype | None = None, *, bias: bool = False
    ) -> None:
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        generator = torch.Generator().manual_seed(rows + n + k)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.x = torch.full((rows, k + 16), torch.nan, device=device, dtype=dtype)[:, :k].copy_(random(rows, k))
        self.weight = random(n, k) / 8
        self.bias = random(n) if bias else None
        self.arrived = torch.zeros(n, dtype=torch.int32, device=device)

    def run(
        self, tuning: GemmTuning, *, gated: bool = False, early: bool = False, rows: int | None = None
    ) -> torch.Tensor:
        """The product of the first `rows` rows, all by default."""
        x = self.x[:rows]
        width = len(self.weight) // 2 if gated else len(self.weight)
        out = torch.full((len(x), width), torch.nan, device=x.device, dtype=x.dtype)
        arrived = self.arrived if tuning.num_splits > 1 else None
        return skinny_gemm(x, self.weight, self.bias, out=out, tuning=tuning, arrived=arrived, gated=gated, early=early)

    def reference(self, *, gated: bool = False) -> torch.Tensor:
        y = F.linear(self.x.double(), self.weight.double(), None if self.bias is None else self.bias.double())
        if gated:
            gate, up = y.chunk(2, 1)
            return F.silu(gate) * up
        return y

    def assert_right(self, y: torch.Tensor, *, gated: bool = False) -> None:
        """fp32 sums, rounded once."""
        tolerance = 1e-5 if y.dtype == torch.float32 else torch.finfo(y.dtype).eps
        torch.testing.assert_close(y.double(), self.reference(gated=gated), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize(("tuning", "rows"), [(TILE, 1), (TILE, 5), (TILE, 16), (TILE, 20), (VECTOR, 1)])
def test_sums_all_columns_of_every_row(device: torch.device, tuning: GemmTuning, rows: int, num_splits: int) -> None:
    case = Case(rows, 40, 320, device)  # the last block of rows is not full, and the last split has fewer columns
    case.assert_right(case.run(_split(tuning, num_splits)))


@pytest.mark.parametrize(("tuning", "rows"), [(TILE, 3), (VECTOR, 1)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_stops_at_the_last_column_of_a_block(
    device: torch.device, tuning: GemmTuning, rows: int, num_splits: int
) -> None:
    case = Case(rows, 32, 176, device)
    case.assert_right(case.run(_split(tuning, num_splits)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_adds_the_bias_once(device: torch.device, num_splits: int, gated: bool) -> None:
    case = Case(2, 48, 128, device, bias=True)
    case.assert_right(case.run(_split(TILE, num_splits), gated=gated), gated=gated)


@pytest.mark.parametrize(("tuning", "rows"), [(TILE, 3), (VECTOR, 1)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_multiplies_silu_of_the_first_half_with_the_second(
    device: torch.device, tuning: GemmTuning, rows: int, num_splits: int
) -> None:
    case = Case(rows, 80, 192, device)
    case.assert_right(case.run(_split(tuning, num_splits), gated=True), gated=True)


def test_sums_in_fp32_what_is_fp16(interpreter: None) -> None:
    case = Case(3, 32, 256, torch.device("cpu"), torch.float16)
    case.assert_right(case.run(_split(TILE, 2)))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_row_alone_has_the_bits_that_it_has_among_others(device: torch.device, num_splits: int) -> None:
    case = Case(20, 48, 192, device)
    tuning = _split(TILE, num_splits)
    among_all = case.run(tuning)
    for rows in (1, 7, 16):
        assert torch.equal(case.run(tuning, rows=rows), among_all[:rows])


def test_leaves_its_counters_at_zero(device: torch.device) -> None:
    case = Case(2, 48, 192, device)
    for _ in range(3):
        case.assert_right(case.run(_split(TILE, 3)))
        assert not case.arrived.any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 128, 4096])
@pytest.mark.parametrize("gated", [False, True])
def test_an_early_start_changes_no_bit(num_splits: int, prefetch: int, gated: bool) -> None:
    case = Case(4, 1040, 2064, torch.device("cuda"))
    tuning = _split(TILE, num_splits)
    early = dataclasses.replace(tuning, prefetch=prefetch)
    expected = case.run(tuning, gated=gated)
    for _ in range(20):
        assert torch.equal(case.run(early, gated=gated, early=True), expected)


@pytest.mark.gpu
def test_waits_for_the_kernel_that_writes_its_input() -> None:
    """Products of each other's results in a graph, all early, in memory that the graph's pool gives out again."""
    device = torch.device("cuda")
    case = Case(8, 2048, 2048, device)
    tuning = dataclasses.replace(_split(TILE, 4), prefetch=512)

    def multiply(x: torch.Tensor, early: bool) -> torch.Tensor:
        out = torch.empty_like(x)
        return skinny_gemm(x, case.weight, None, out=out, tuning=tuning, arrived=case.arrived, early=early)

    def chain(early: bool) -> torch.Tensor:
        y = case.x.contiguous()
        for _ in range(24):
            y = multiply(multiply(y, early), early) / 32  # a kernel between that knows nothing of early starts
        return y

    expected = chain(early=False)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(early=True)
    for _ in range(10):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
    assert not case.arrived.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 12288), (1024, 3072), (5120, 6400)])
@pytest.mark.parametrize("rows", [1, 16, 32])
def test_is_as_exact_as_cublas_in_sizes_of_models(n: int, k: int, rows: int) -> None:
    case = Case(rows, n, k, torch.device("cuda"))
    tuning = GemmTuning(block_n=32, block_k=128, num_warps=4, num_stages=4, num_splits=4)
    reference = case.reference()
    theirs = (F.linear(case.x, case.weight) - reference).abs().max()
    assert (case.run(tuning) - reference).abs().max() <= 2 * theirs
