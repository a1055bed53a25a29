"""Kernels by which ranks sum and exchange rows through memory that every rank has mapped.

    all_reduce_add_norm    one kernel sums over the ranks, adds to the residual and norms: each rank reads all summands
    reduce_norm_share      the same for many rows: each rank sums its share of the rows and writes it to all ranks
    gather, look_up        each rank writes what it has to all ranks

A program only meets the programs with its number on the other ranks. Summands are added in one order, so the bits are
the same on every rank: rank order, or the tree's order if the summands are nodes of a tree. Block size and warps depend
only on the row length, as in worker/kernels/norm.py.

The memory of a rank starts with flags, two arrays of [MAX_RANKS, MAX_PROGRAMS] int32 indexed by the writing rank: one
for sums, one for exchanged rows. Epochs count each program's meetings. They are in `state`, [2 * MAX_PROGRAMS + 1]
int32 of this rank alone, initially zeros; its last element is the reason why a wait gave up. After that nothing signals
or waits any more, and results are meaningless.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside
from parallel.kernels.flags import FLAG_BYTES, MAX_PROGRAMS
from parallel.kernels.tree_sum import add_norm_row, append, block_of_row, finish, scale_of
from parallel.tree import Additions

STATE_WORDS = 2 * MAX_PROGRAMS + 1
_MAX_PROGRAMS: tl.constexpr = tl.constexpr(MAX_PROGRAMS)
_SHARE_FLAGS: tl.constexpr = tl.constexpr(FLAG_BYTES // 2)
# With this many registers per thread, two programs of up to 8 warps fit on an SM. All programs of a launch must run at
# once.
_MAX_REGISTERS = 128
_GATHER_WORDS = 1024
LATE = 2
"""Written by a program that gave up at its deadline. 1 if the host ended the wait."""

# Threads 0 to num_ranks - 1 each write one rank's flag and wait for the flag that this rank wrote here. The product
# that wrote the summands ran earlier on this stream, so its writes happen before the release, which is cumulative: a
# rank that acquires the flag sees them.
_SIGNAL: tl.constexpr = tl.constexpr("""
{
    .reg .pred mine;
    setp.lt.u32 mine, $1, $2;
    @mine st.release.sys.global.u32 [$3], $4;
    mov.b32 $0, 0;
}
""")
# A wait reads the clock, and the word by which the host ends it, in 1 of 1024 polls: about every half millisecond.
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
    """The rank that this thread signals and waits for. None if it is `num_ranks` or more. To Triton it is a scalar."""
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.where(given_up != 0, num_ranks, thread)


@triton.jit
def _signal(bases, thread, flag_offset, epoch):
    """Signals to the programs of this row on all ranks, including this one, that this program has reached `epoch`."""
    base = bases[0].to(tl.int64)
    for rank in tl.static_range(1, len(bases)):
        base = tl.where(thread == rank, bases[rank].to(tl.int64), base)
    tl.inline_asm_elementwise(
        _SIGNAL, "=r,r,r,l,r", [thread, len(bases), base + flag_offset, epoch], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait(num_ranks: tl.constexpr, thread, flag_address, epoch, given_up_ptr, host_words, timeout_ns):
    """Returns once the programs of this row on all ranks have reached `epoch`, or the wait gave up."""
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,r,r,l,r,l,l,l",
        [thread, num_ranks, flag_address, epoch, given_up_ptr.to(tl.int64), host_words, timeout_ns.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()  # now all threads see what the waiting threads acquired


@triton.jit
def _nodes_of_ranks(bases, offset, node_bytes, columns, inside, NODES: tl.constexpr, DTYPE: tl.constexpr):
    """Loads fp32 `columns` of node (rank, number), at `offset + number * node_bytes` bytes of the rank's memory."""
    values = ()
    for i in tl.static_range(len(NODES)):
        # Rows start at multiples of 16 bytes, which the compiler cannot see from the address arithmetic.
        address = bases[NODES[i][0]].to(tl.int64) + offset + NODES[i][1] * node_bytes
        node_ptr = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        # Not volatile: a thread loads 16 fp32 bytes twice per sector, and volatile loads would fetch the sector twice.
        # Stale data in the L1 cache is gone, because a thread of this program has acquired.
        values = append(values, tl.load(node_ptr + columns, mask=inside, other=0.0).to(tl.float32))
    return values


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_add_norm_kernel(
    out_ptr, residual_ptr, weight_ptr, state_ptr, bases, own, rank, data_offset, host_words, timeout_ns,
    residual_stride, eps, NODES: tl.constexpr, ADDS: tl.constexpr, IN_FP32: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_ranks: tl.constexpr = len(bases)
    given_up_ptr = state_ptr + 2 * _MAX_PROGRAMS
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    epoch = tl.load(state_ptr + row) + 1
    thread = _signalling_thread(tl.load(given_up_ptr), num_ranks)
    _signal(bases, thread, (rank * _MAX_PROGRAMS + row) * 4, epoch)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    residual_ptr += row.to(tl.int64) * residual_stride
    # These loads come before the wait, because no other rank writes this data, and after the signal, which would wait
    # for them.
    residual = tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    flag_address = own + (thread * _MAX_PROGRAMS + row) * 4
    _wait(num_ranks, thread, flag_address, epoch, given_up_ptr, host_words, timeout_ns)
    tl.store(state_ptr + row, epoch)
    dtype: tl.constexpr = tl.float32 if IN_FP32 else residual_ptr.dtype.element_ty
    row_bytes: tl.constexpr = SIZE * (dtype.primitive_bitwidth // 8)
    offset, node_bytes = data_offset + row * row_bytes, tl.num_programs(0) * row_bytes
    nodes = _nodes_of_ranks(bases, offset, node_bytes, columns, inside, NODES, dtype)
    x = finish(nodes, ADDS)[2 * len(ADDS)]
    let_next_start(DEPENDENT)
    add_norm_row(out_ptr + row * SIZE, residual_ptr, x, residual, weight, columns, inside, eps, SIZE)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _reduce_norm_share_kernel(
    out_ptr, residual_ptr, weight_ptr, state_ptr, bases, own, rank, data_offset, scales_offset, num_rows, host_words,
    timeout_ns, residual_stride, eps, NODES: tl.constexpr, ADDS: tl.constexpr, IN_FP32: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_ranks: tl.constexpr = len(bases)
    given_up_ptr = state_ptr + 2 * _MAX_PROGRAMS
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    epoch = tl.load(state_ptr + program) + 1
    thread = _signalling_thread(tl.load(given_up_ptr), num_ranks)
    flag_offset = (rank * _MAX_PROGRAMS + program) * 4
    _signal(bases, thread, flag_offset, epoch)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    flag_address = own + (thread * _MAX_PROGRAMS + program) * 4
    _wait(num_ranks, thread, flag_address, epoch, given_up_ptr, host_words, timeout_ns)
    residual_dtype: tl.constexpr = residual_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float32 if IN_FP32 else residual_dtype
    row_bytes: tl.constexpr = SIZE * (dtype.primitive_bitwidth // 8)
    node_bytes = num_rows.to(tl.int64) * row_bytes
    # In each run of as many rows as there are ranks, row i belongs to rank i. Programs take runs in turn.
    num_runs = tl.cdiv(num_rows, num_ranks)
    for run in range(program, num_runs, tl.num_programs(0)):
        row = tl.cast(run, tl.int64) * num_ranks + rank
        if row < num_rows:
            residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
            offset = data_offset + row * row_bytes
            nodes = _nodes_of_ranks(bases, offset, node_bytes, columns, inside, NODES, dtype)
            rounded = (residual + finish(nodes, ADDS)[2 * len(ADDS)]).to(residual_dtype)
            scale = scale_of(rounded.to(tl.float32), eps, SIZE)
            # No other rank reads this row of any rank's summands, so the sum overwrites it.
            for other in tl.static_range(num_ranks):
                base = bases[other].to(tl.int64)
                sum_ptr = tl.multiple_of((base + offset).to(tl.pointer_type(residual_dtype)), 16)
                tl.store(sum_ptr + columns, rounded, mask=inside)
                tl.store((base + scales_offset + row * 4).to(tl.pointer_type(tl.float32)), scale)
    tl.debug_barrier()  # all threads have written what the signalling threads release
    thread = _signalling_thread(tl.load(given_up_ptr, volatile=True), num_ranks)
    _signal(bases, thread, flag_offset, epoch + 1)
    _wait(num_ranks, thread, flag_address, epoch + 1, given_up_ptr, host_words, timeout_ns)
    tl.store(state_ptr + program, epoch + 1)
    for run in range(program, num_runs, tl.num_programs(0)):
        for i in tl.static_range(num_ranks):
            row = tl.cast(run, tl.int64) * num_ranks + i
            if row < num_rows:
                sum_ptr = tl.multiple_of((own + data_offset + row * row_bytes).to(tl.pointer_type(residual_dtype)), 16)
                rounded = tl.load(sum_ptr + columns, mask=inside, other=0.0, volatile=True)
                scale_ptr = (own + scales_offset + row * 4).to(tl.pointer_type(tl.float32))
                scale = tl.load(scale_ptr, volatile=True)
                tl.store(residual_ptr + row * residual_stride + columns, rounded, mask=inside)
                normed = rounded.to(tl.float32) * scale * weight
                tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_to_all(bases, offset, words, columns, inside):
    for rank in tl.static_range(len(bases)):
        address = bases[rank].to(tl.int64) + offset
        tl.store(tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + columns, words, mask=inside)


@triton.jit
def _meet_to_share(bases, own, rank, state_ptr, epoch, host_words, timeout_ns):
    """Returns once the programs of this number have written to all ranks, or the wait gave up."""
    program = tl.program_id(0)
    num_ranks: tl.constexpr = len(bases)
    given_up_ptr = state_ptr + 2 * _MAX_PROGRAMS
    tl.debug_barrier()  # all threads have written what the signalling threads release
    thread = _signalling_thread(tl.load(given_up_ptr), num_ranks)
    _signal(bases, thread, _SHARE_FLAGS + (rank * _MAX_PROGRAMS + program) * 4, epoch)
    flag_address = own + _SHARE_FLAGS + (thread * _MAX_PROGRAMS + program) * 4
    _wait(num_ranks, thread, flag_address, epoch, given_up_ptr, host_words, timeout_ns)
    tl.store(state_ptr + _MAX_PROGRAMS + program, epoch)


@triton.jit(do_not_specialize=["rank", "num_words", "out_stride"])
def _gather_kernel(
    out_ptr, x_ptr, state_ptr, bases, own, rank, area_offset, half_bytes, num_words, out_stride, host_words, timeout_ns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_ranks: tl.constexpr = len(bases)
    epoch = tl.load(state_ptr + _MAX_PROGRAMS + program) + 1
    # Each program has its own area in either half and alternates between the halves. See SymmetricMemoryCollectives.
    area = area_offset + (epoch & 1) * half_bytes + program * (half_bytes // _MAX_PROGRAMS)
    columns = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_words, BLOCK)
    for block in range(program, num_blocks, num_programs):
        words = tl.load(x_ptr + block * BLOCK + columns, mask=block * BLOCK + columns < num_words, other=0)
        place = block // num_programs * num_ranks + rank
        _write_to_all(bases, area + place * (BLOCK * 4), words, columns, columns < BLOCK)
    _meet_to_share(bases, own, rank, state_ptr, epoch, host_words, timeout_ns)
    for block in range(program, num_blocks, num_programs):
        for other in tl.static_range(num_ranks):
            place = block // num_programs * num_ranks + other
            address = own + area + place * (BLOCK * 4)
            word_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            words = tl.load(word_ptr + columns, volatile=True)
            inside = block * BLOCK + columns < num_words
            tl.store(out_ptr + other * out_stride + block * BLOCK + columns, words, mask=inside)


@triton.jit(do_not_specialize=["rank", "num_ids", "num_held", "vocab_size"])
def _look_up_kernel(
    out_ptr, ids_ptr, row_of_ptr, rows_ptr, state_ptr, bases, own, rank, area_offset, half_bytes, num_ids, num_held,
    vocab_size, host_words, timeout_ns, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state_ptr + _MAX_PROGRAMS + program) + 1
    area = area_offset + (epoch & 1) * half_bytes + program * (half_bytes // _MAX_PROGRAMS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WORDS
    for i in range(program, num_ids, num_programs):
        token = tl.load(ids_ptr + i)
        known = (token >= 0) & (token < vocab_size)
        row = tl.load(row_of_ptr + token, mask=known, other=num_held)
        if row < num_held:
            words = tl.load(rows_ptr + row.to(tl.int64) * WORDS + columns, mask=inside, other=0)
            _write_to_all(bases, area + i // num_programs * (WORDS * 4), words, columns, inside)
    _meet_to_share(bases, own, rank, state_ptr, epoch, host_words, timeout_ns)
    for i in range(program, num_ids, num_programs):
        address = own + area + i // num_programs * (WORDS * 4)
        word_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
        words = tl.load(word_ptr + columns, mask=inside, other=0, volatile=True)
        tl.store(out_ptr + tl.cast(i, tl.int64) * WORDS + columns, words, mask=inside)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks' memory, as kernels receive it."""

    bases: tuple[int, ...]
    """Start of each rank's mapped memory in this rank's address space."""
    rank: int
    state: torch.Tensor
    """[2 * MAX_PROGRAMS + 1] int32: this rank's epochs, and why a wait gave up (see the module's docstring)."""
    host_words: int
    """Address of two int32 in host memory that the device can access. The host sets the first to end the waits. The
    device sets the second to report that it gave up, and why."""
    timeout_ns: int
    """Nanoseconds that a program waits for the programs of other ranks before it gives up."""
    num_sms: int
    """Number of SMs of each rank's device. All programs of a launch run at once: one per SM, or two of up to 8
    warps."""

    def num_programs(self, wanted: int, num_warps: int) -> int:
        """Number of programs for a launch with this much work."""
        return min(wanted, MAX_PROGRAMS, self.num_sms * (2 if num_warps <= 8 else 1))


def all_reduce_add_norm(
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: Peers,
    *,
    data_offset: int,
    counts: tuple[int, ...] = (),
    adds: Additions = (),
    scales_offset: int | None = None,
) -> torch.Tensor:
    """Adds the sum of all ranks' summands to `residual` in place and returns the RMS norm of the rounded result.

    Summands are added in fp32 in rank order (nodes by `adds`), then the residual. The result is rounded once, and its
    norm once more. Every rank must launch this with the same shapes, in the same order.

    Args:
        residual: [num_rows, size] with any row stride, equal on every rank. Without `scales_offset`, at most as many
            rows as SMs, because each row has a program and all must run at once.
        weight: [size] bf16 or fp32.
        data_offset: bytes from a rank's base to its summands, [num_rows, size] in the residual's dtype, contiguous.
            With `counts`, [counts[rank], num_rows, size] fp32.
        counts: number of each rank's nodes of a tree. The bits are then those of tree_sum.sum_add_norm.
        adds: additions over all nodes, in rank order.
        scales_offset: bytes to num_rows fp32 for the norms' scales. If given, each rank sums only every size'th row and
            writes it to all ranks, over the first summand, for which each rank must have memory.

    Returns:
        [num_rows, size], contiguous, in the residual's dtype.
    """
    num_rows, size = residual.shape
    out = torch.empty((num_rows, size), dtype=residual.dtype, device=residual.device)
    block, num_warps = block_of_row(size)
    own = peers.bases[peers.rank]
    dependent = is_dependent(residual.device, num_rows)
    shared: dict[str, Any] = {
        "NODES": nodes_of(counts or (1,) * len(peers.bases)),
        "ADDS": adds if counts else in_rank_order(len(peers.bases)),
        "IN_FP32": bool(counts),
        "SIZE": size,
        "BLOCK": block,
        "DEPENDENT": dependent,
        "launch_pdl": dependent,
        "num_warps": num_warps,
        "enable_fp_fusion": not counts,
    }
    if scales_offset is None:
        _all_reduce_add_norm_kernel[(num_rows,)](
            out, residual, weight, peers.state, peers.bases, own, peers.rank, data_offset, peers.host_words,
            peers.timeout_ns, residual.stride(0), eps, **shared,
        )  # fmt: skip
        return out
    _reduce_norm_share_kernel[(peers.num_programs(triton.cdiv(num_rows, len(peers.bases)), num_warps),)](
        out, residual, weight, peers.state, peers.bases, own, peers.rank, data_offset, scales_offset, num_rows,
        peers.host_words, peers.timeout_ns, residual.stride(0), eps, **shared, maxnreg=_MAX_REGISTERS,
    )  # fmt: skip
    return out


def gather(out: torch.Tensor, x: torch.Tensor, peers: Peers, *, area_offset: int, half_bytes: int) -> None:
    """Fills `out` [num_ranks, num_words] int32 with every rank's contiguous `x` [num_words].

    Args:
        area_offset: bytes from a rank's base to the two halves for exchanged rows.
        half_bytes: size of a half, a multiple of MAX_PROGRAMS * 16.
    """
    num_ranks = len(peers.bases)
    most = peers.num_programs(MAX_PROGRAMS // 2, 4)
    blocks = half_bytes // MAX_PROGRAMS // (4 * _GATHER_WORDS * num_ranks) * most
    assert blocks, f"{half_bytes} bytes are too few for {num_ranks} ranks"
    step = blocks * _GATHER_WORDS
    for start in range(0, len(x), step):
        piece, into = x[start : start + step], out[:, start : start + step]
        _gather_kernel[(min(triton.cdiv(len(piece), _GATHER_WORDS), most),)](
            into, piece, peers.state, peers.bases, peers.bases[peers.rank], peers.rank, area_offset, half_bytes,
            len(piece), out.stride(0), peers.host_words, peers.timeout_ns, BLOCK=_GATHER_WORDS, num_warps=4,
        )  # fmt: skip


def look_up(
    ids: torch.Tensor, row_of: torch.Tensor, rows: torch.Tensor, peers: Peers, *, area_offset: int, half_bytes: int
) -> torch.Tensor:
    """Looks up the rows of `ids` [num_ids] int64. The rank that holds a row writes it to all ranks.

    Args:
        row_of: [vocab_size] int32: index in `rows` of each id; len(rows) - 1 if another rank has it.
        rows: [num_held + 1, row_size], contiguous; row_size is a multiple of 16 bytes.
        area_offset, half_bytes: as for `gather`. Each program must have room for a row.

    Returns:
        [num_ids, row_size].
    """
    out = torch.empty((len(ids), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    num_words = rows.shape[1] * rows.element_size() // 4
    block = triton.next_power_of_2(num_words)
    num_warps = min(max(block // 512, 1), 8)
    most = peers.num_programs(len(ids), num_warps)
    step = half_bytes // MAX_PROGRAMS // (4 * num_words) * most  # all run at once on a device with 128 or more SMs
    for start in range(0, len(ids), max(step, 1)):
        piece = ids[start : start + step]
        _look_up_kernel[(min(len(piece), most),)](
            out[start:].view(torch.int32), piece, row_of, rows.view(torch.int32), peers.state, peers.bases,
            peers.bases[peers.rank], peers.rank, area_offset, half_bytes, len(piece), len(rows) - 1, len(row_of),
            peers.host_words, peers.timeout_ns, WORDS=num_words, BLOCK=block, num_warps=num_warps,
            maxnreg=_MAX_REGISTERS,
        )  # fmt: skip
    return out


@functools.lru_cache(maxsize=256)
def nodes_of(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(rank, number) of each node, in rank order."""
    return tuple((rank, i) for rank, count in enumerate(counts) for i in range(count))


@functools.cache
def in_rank_order(num_ranks: int) -> Additions:
    """((0 + 1) + 2) + ..."""
    return tuple((num_ranks + i - 1 if i else 0, i + 1) for i in range(num_ranks - 1))
