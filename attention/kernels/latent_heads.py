"""The per-head products of latent attention for few tokens.

A program multiplies a tile of one head's weight with the tokens. It loads its weight before it waits for the kernel
before it, so that in a chain of dependent launches a product takes little more than its launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pages import block_of
from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start
from parallel.kernels.shared_memory import has_little

_MOST_TOKENS = 64  # largest number of tokens per program
_FEWER_TOKENS = 32  # with more of them, some GPUs use other matrix instructions, which might add in another order
_TILE = 8192  # weight elements per program: 16 KB of 16-bit values


@triton.jit(do_not_specialize=["num_tokens"])
def _head_products_kernel(
    x_ptr, weight_ptr, out_ptr, num_tokens, x_stride, x_head_stride, weight_stride, weight_k_stride, weight_n_stride,
    out_stride, out_head_stride, K: tl.constexpr, N: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < N
    weight_ptrs = weight_ptr + head * weight_stride + k[:, None] * weight_k_stride + columns[None, :] * weight_n_stride
    weight = tl.load(weight_ptrs, mask=(k < K)[:, None] & is_column[None, :], other=0.0)
    tokens = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_token = (tokens < num_tokens)[:, None]
    x_rows = x_ptr + tokens[:, None] * x_stride + head * x_head_stride
    out_rows = out_ptr + tokens[:, None] * out_stride + head * out_head_stride
    follow(DEPENDENT)
    x = tl.load(x_rows + k[None, :], mask=is_token & (k < K)[None, :], other=0.0)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)
        is_rest = is_token & ((rest < REST) & (tl.program_id(0) == 0))[None, :]
        kept = tl.load(x_rows + K + rest[None, :], mask=is_rest, other=0.0)
    let_next_start(DEPENDENT)
    product = tl.dot(x, weight, input_precision="ieee")
    tl.store(out_rows + columns[None, :], product.to(out_ptr.dtype.element_ty), mask=is_token & is_column[None, :])
    if REST > 0:
        tl.store(out_rows + N + rest[None, :], kept, mask=is_rest)


def head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, exact: bool = False) -> None:
    """Multiplies the first K columns of each head by the head's weight, and copies the columns after them. Sums are
    fp32, ascending, and rounded once.

    Args:
        x: [num_tokens, num_heads, K + rest]; the last dimension is contiguous.
        weight: [num_heads, K, N] in x's dtype, with any strides.
        out: [num_tokens, num_heads, N + rest] in x's dtype, written; the last dimension is contiguous.
        exact: use the same matrix instructions for any number of tokens. The bits of a row then depend on the row and
            the weight alone.
    """
    num_tokens, num_heads, width = x.shape
    _, k, n = weight.shape
    rest = width - k
    assert out.shape == (num_tokens, num_heads, n + rest), "out has a column for each of the weight, and those copied"
    assert x.stride(2) == out.stride(2) == 1, "columns are contiguous"
    most_tokens = _FEWER_TOKENS if exact or has_little(x.device) else _MOST_TOKENS
    block_m, block_k = min(block_of(num_tokens), most_tokens), block_of(k)
    block_n = min(block_of(n), max(16, _TILE // block_k))
    dependent = is_dependent(x.device, num_tokens)
    _head_products_kernel[(triton.cdiv(n, block_n), num_heads, triton.cdiv(num_tokens, block_m))](
        x,
        weight,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        out.stride(0),
        out.stride(1),
        K=k,
        N=n,
        REST=rest,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_REST=block_of(rest) if rest else 0,
        DEPENDENT=dependent,
        launch_pdl=dependent,
    )
