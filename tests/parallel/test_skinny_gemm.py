"""The matrix product of a few rows against an fp64 one: in Triton's interpreter, and in bf16 on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="a CPU install has no Triton")

from parallel.numerics.kernels.skinny_gemm import is_faster, skinny_gemm
from parallel.numerics.weight import CudaWeight


class Case:
    """A random weight and rows, which lie in wider rows of NaN."""

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

    def run(self, rows: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The product of the first `rows` rows, all by default."""
        x = self.x[:rows]
        out = torch.full((len(x), len(self.weight)), torch.nan, device=x.device, dtype=dtype or x.dtype)
        assert skinny_gemm(x, self.weight, self.bias, out=out) is out
        return out

    def reference(self) -> torch.Tensor:
        return F.linear(self.x.double(), self.weight.double(), None if self.bias is None else self.bias.double())

    def assert_right(self, y: torch.Tensor) -> None:
        """fp32 sums, rounded once."""
        tolerance = 1e-5 if y.dtype == torch.float32 else torch.finfo(y.dtype).eps
        torch.testing.assert_close(y.double(), self.reference(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("k", [512, 1024, 776])  # the last step has fewer columns
def test_sums_all_columns_of_every_row(device: torch.device, rows: int, k: int) -> None:
    case = Case(rows, 40, k, device)  # the last block of rows is not full
    case.assert_right(case.run())


@pytest.mark.parametrize("rows", [1, 3])
def test_adds_the_bias_once(device: torch.device, rows: int) -> None:
    case = Case(rows, 48, 512, device, bias=True)
    case.assert_right(case.run())


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_in_fp32_what_is_fp16(interpreter: None, rows: int) -> None:
    case = Case(rows, 32, 512, torch.device("cpu"), torch.float16)
    case.assert_right(case.run())
    case.assert_right(case.run(dtype=torch.float32))


def test_a_row_has_the_bits_that_it_has_among_any_others(device: torch.device) -> None:
    case = Case(16, 48, 512, device)
    among_all = case.run()
    for rows in (2, 7):
        assert torch.equal(case.run(rows), among_all[:rows])


def test_takes_few_rows_of_all_but_the_largest_weights() -> None:
    assert is_faster(1, 151936, 1024)
    assert is_faster(16, 4096, 4096)
    assert not is_faster(17, 4096, 4096)
    assert not is_faster(0, 4096, 4096)
    assert not is_faster(1, 4096, 4100)
    assert not is_faster(2, 24576, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 12288), (1024, 3072), (5120, 6400)])
@pytest.mark.parametrize("rows", [1, 16])
def test_is_as_exact_as_cublas_in_sizes_of_models(n: int, k: int, rows: int) -> None:
    case = Case(rows, n, k, torch.device("cuda"))
    reference = case.reference()
    theirs = (F.linear(case.x, case.weight) - reference).abs().max()
    assert (case.run() - reference).abs().max() <= 2 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_multiply_any_number_of_rows(rows: int, bias: bool) -> None:
    case = Case(rows, 4096, 1024, torch.device("cuda"), bias=bias)
    matmul = CudaWeight(case.weight, case.bias)
    out = torch.full((rows, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert matmul(case.x, out) is out
    # Of values near 4, where bf16 steps are 2**-6.
    torch.testing.assert_close(out.double(), case.reference(), rtol=2.0**-7, atol=2.0**-7)
    assert torch.equal(matmul(case.x), out)
    logits = matmul.in_fp32(case.x)
    assert logits.dtype is torch.float32
    if not bias:
        torch.testing.assert_close(logits.double(), case.reference(), rtol=1e-4, atol=1e-4)
