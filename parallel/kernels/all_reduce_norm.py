"""One kernel that sums over the ranks, adds to the residual stream and norms.

Each rank's summands lie in memory that every rank has mapped. A program does one row on every rank: it meets the
programs of that row on the other ranks, reads their summands and adds them all in one order, so the bits are the same
on every rank: in rank order, or, where summands are nodes of a tree, as the tree says. Block size and warps follow from
the row length alone, as in worker/kernels/norm.py.

The memory of a rank starts with flags, [num_ranks, max_rows] int32 by who wrote them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from parallel.numerics.kernels.tree_sum import add_norm_row, append, block_of_row, finish
from parallel.numerics.tree import Additions

LATE = 2
"""The mark of a program that gave up waiting at its deadline; 1 if the host ended the wait."""

# Threads 0 to num_ranks - 1 each write one rank's flag, and wait for the one that this rank wrote here.
# The GEMM that wrote the summands ran before on this stream, so they happen before the release, which is cumulative:
# who acquires the flag sees them.
_SIGNAL: tl.constexpr = tl.constexpr("""
{
    .reg .pred mine;
    setp.lt.u32 mine, $1, $2;
    @mine st.release.sys.global.u32 [$3], $4;
    mov.b32 $0, 0;
}
""")
# A wait looks 1 in 1024 polls, about every half millisecond, at the clock and at the word by which the host ends it.
_WAIT: tl.constexpr = tl.constexpr("""
{
    .reg .pred apart, behind, soon, first, aborted, early;
    .reg .b32 distance, polls, word;
    .reg .b64 now, deadline;
    setp.ge.u32 apart, $1, $2;
    @apart bra DONE;
    mov.b32 polls, 0;
    mov.b64 deadline, 0;
POLL:
    ld.acquire.sys.global.u32 distance, [$3];
    sub.u32 distance, distance, $4;
    setp.lt.s32 behind, distance, 0;
    @!behind bra DONE;
    add.u32 polls, polls, 1;
    and.b32 word, polls, 1023;
    setp.ne.u32 soon, word, 0;
    @soon bra POLL;
    mov.u64 now, %globaltimer;
    setp.eq.u64 first, deadline, 0;
    @first add.u64 deadline, now, $7;
    ld.relaxed.sys.global.u32 word, [$6];
    setp.ne.u32 aborted, word, 0;
    setp.lt.u64 early, now, deadline;
    @aborted bra GIVE_UP;
    @early bra POLL;
GIVE_UP:
    selp.b32 word, 1, 2, aborted;
    st.relaxed.sys.global.u32 [$5], word;
    st.relaxed.sys.global.u32 [$6+4], word;
DONE:
    mov.b32 $0, 0;
}
""")


@triton.jit
def _signalling_thread(given_up, num_ranks: tl.constexpr):
    """The rank that this thread signals and waits for; `num_ranks` and above: none. Triton takes it for a scalar."""
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.where(given_up != 0, num_ranks, thread)


@triton.jit
def _signal(bases, thread, flag_offset, epoch):
    """Tells the programs of this row on all ranks, this one among them, that it has come to `epoch`."""
    base = bases[0].to(tl.int64)
    for rank in tl.static_range(1, len(bases)):
        base = tl.where(thread == rank, bases[rank].to(tl.int64), base)
    tl.inline_asm_elementwise(
        _SIGNAL, "=r,r,r,l,r", [thread, len(bases), base + flag_offset, epoch], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait(num_ranks: tl.constexpr, thread, flag_address, epoch, given_up_ptr, host_words, timeout_ns):
    """Returns once the programs of this row on all ranks have come to `epoch`, or it gave up waiting."""
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,r,r,l,r,l,l,l",
        [thread, num_ranks, flag_address, epoch, given_up_ptr.to(tl.int64), host_words, timeout_ns.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()  # now all threads see what the few that waited have acquired


@triton.jit
def _nodes_of_ranks(bases, offset, node_bytes, columns, inside, NODES: tl.constexpr, DTYPE: tl.constexpr):
    """fp32 elements `columns` of the nodes (rank, number), `offset + number * node_bytes` bytes into rank's memory."""
    values = ()
    for i in tl.static_range(len(NODES)):
        # Rows start at multiples of 16 bytes: the compiler loses that on the way from a number to a pointer.
        address = bases[NODES[i][0]].to(tl.int64) + offset + NODES[i][1] * node_bytes
        node_ptr = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        # Volatile: never from the L1 cache, which does not hear of other GPUs' writes.
        values = append(values, tl.load(node_ptr + columns, mask=inside, other=0.0, volatile=True).to(tl.float32))
    return values


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_add_norm_kernel(
    out_ptr, residual_ptr, weight_ptr, state_ptr, bases, own, rank, data_offset, host_words, timeout_ns,
    residual_stride, eps, NODES: tl.constexpr, ADDS: tl.constexpr, IN_FP32: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_ranks: tl.constexpr = len(bases)
    given_up_ptr = state_ptr + MAX_ROWS
    epoch = tl.load(state_ptr + row) + 1
    thread = _signalling_thread(tl.load(given_up_ptr), num_ranks)
    _signal(bases, thread, (rank * MAX_ROWS + row) * 4, epoch)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    residual_ptr += row.to(tl.int64) * residual_stride
    # Before the wait, because no other rank writes these; after the signal, which would wait for them.
    residual = tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    flag_address = own + (thread * MAX_ROWS + row) * 4
    _wait(num_ranks, thread, flag_address, epoch, given_up_ptr, host_words, timeout_ns)
    tl.store(state_ptr + row, epoch)
    dtype: tl.constexpr = tl.float32 if IN_FP32 else residual_ptr.dtype.element_ty
    row_bytes: tl.constexpr = SIZE * (dtype.primitive_bitwidth // 8)
    offset, node_bytes = data_offset + row * row_bytes, tl.num_programs(0) * row_bytes
    nodes = _nodes_of_ranks(bases, offset, node_bytes, columns, inside, NODES, dtype)
    x = finish(nodes, ADDS)[2 * len(ADDS)]
    add_norm_row(out_ptr + row * SIZE, residual_ptr, x, residual, weight, columns, inside, eps, SIZE)


def all_reduce_add_norm(
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bases: tuple[int, ...],
    rank: int,
    data_offset: int,
    state: torch.Tensor,
    host_words: int,
    timeout_ns: int,
    counts: tuple[int, ...] = (),
    adds: Additions = (),
) -> torch.Tensor:
    """Adds the sum of all ranks' summands to `residual` in place and returns the RMS norm of that (rounded) sum.

    The summands are added in fp32 in rank order, or nodes by `adds`, then the residual; that is rounded
    once, and its norm once more. Every rank launches it with the same shapes, in the same order.

    Args:
        residual: [num_rows, size], rows any distance apart; the same on every rank. The programs of all rows wait for
            other ranks, so all must run at once: no more rows than the device has SMs.
        weight: [size], bf16 or fp32.
        bases: where each rank's mapped memory is in this rank's address space.
        data_offset: bytes from there to the summands, [num_rows, size] of the residual's dtype, contiguous; with
            `counts` [counts[rank], num_rows, size] fp32.
        state: [max_rows + 1] int32 of this rank alone, zeros at first: how often each row's program met the other
            ranks', and last why a wait was given up. Once it was, nothing signals or waits any more, and sums are of
            whatever the summands are.
        host_words: address of two int32 in the host's memory that the device can read and write: the host sets the
            first to end the waits, the device the second to say that it gave up, and why.
        timeout_ns: how long a program waits for another rank's.
        counts: of each rank, its nodes of a tree: then the bits are those of tree_sum.sum_add_norm.
        adds: over all nodes, the first rank's first.

    Returns:
        [num_rows, size], contiguous, of the residual's dtype.
    """
    num_rows, size = residual.shape
    out = torch.empty((num_rows, size), dtype=residual.dtype, device=residual.device)
    block, num_warps = block_of_row(size)
    _all_reduce_add_norm_kernel[(num_rows,)](
        out,
        residual,
        weight,
        state,
        bases,
        bases[rank],
        rank,
        data_offset,
        host_words,
        timeout_ns,
        residual.stride(0),
        eps,
        NODES=nodes_of(counts or (1,) * len(bases)),
        ADDS=adds if counts else in_rank_order(len(bases)),
        IN_FP32=bool(counts),
        SIZE=size,
        BLOCK=block,
        MAX_ROWS=len(state) - 1,
        num_warps=num_warps,
        enable_fp_fusion=not counts,
    )
    return out


@functools.lru_cache(maxsize=256)
def nodes_of(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(rank, number) of each node, the first rank's first."""
    return tuple((rank, i) for rank, count in enumerate(counts) for i in range(count))


@functools.cache
def in_rank_order(num_ranks: int) -> Additions:
    """((0 + 1) + 2) + ..."""
    return tuple((num_ranks + i - 1 if i else 0, i + 1) for i in range(num_ranks - 1))
