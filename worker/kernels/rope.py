"""One kernel from the QKV product to attention: norm of query and key heads, rotary embedding, KV store.

A program processes eight heads of one token: query heads in place, or key heads and their value heads into the KV
cache. All values are fp32 between load and store, and rounded once. The cache holds the rounded values; in FP8, they
are first divided by the layer's factors. The tile, and so the order of a head's sum of squares, depends only on
head_dim, so neither the batch nor the number of heads on this rank changes a head's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside

_HEADS = 8


@triton.jit
def _norm_and_rotate(
    ptrs, mask, weight_ptr, first_at, second_at, inside, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr
):
    """Both elements [HEADS, BLOCK] fp32 of the pairs of the heads that begin at `ptrs`."""
    first = tl.load(ptrs + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(ptrs + second_at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        first_weight = tl.load(weight_ptr + first_at, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + second_at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        first = first * scale * first_weight
        second = second * scale * second_weight
    # Explicit fma, because the compiler might or might not fuse a product into a sum.
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def _cached(x, scale, dtype: tl.constexpr):
    """The stored form of x: x in the cache's dtype, or if that is bytes, x / scale in FP8 e4m3.

    Rounds to the nearest, ties to even. Values beyond +-448 become +-448, and NaN stays NaN. Uses integers, because
    Triton's interpreter would truncate, and GPUs before compute capability 8.9 have no FP8.
    """
    if dtype != tl.uint8:
        return x.to(dtype)
    else:
        bits = tl.div_rn(x.to(tl.float32), scale).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        clamped = tl.minimum(size, 0x43E00000)  # 448
        # Exponents decrease by 120, and the last 20 bits are dropped. Half a last bit, or just less if even, is added.
        normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6, FP8 steps are 2**-9, which is fp32's step from 2**14 on.
        steps = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(clamped < 0x3C800000, steps, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


# Not specialised by head counts and slots, so that one compilation serves every rank and layer, and their bits agree.
@triton.jit(do_not_specialize=["num_slots", "num_q_heads", "num_kv_heads"])
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, k_slots_ptr, v_slots_ptr, out_cache_loc_ptr,
    num_slots, num_q_heads, num_kv_heads, eps, k_scale, v_scale, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNING: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_q_heads, HEADS)
    # [HEADS, BLOCK], the same for each head, so that cosines, sines and weights are loaded in the layout of the heads.
    # If loaded as rows, they would be converted through shared memory and barriers (Triton 3.6, seen in its PTX).
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    inside = columns < HALF
    # Offsets of the elements of each pair in a head. Elements without rotation are paired too, and rotated by zero.
    first_at = columns
    second_at = columns + HALF
    if ROTARY_DIM < HEAD_DIM:
        first_at = tl.where(columns < TURNING, columns, columns + TURNING)
        second_at = tl.where(columns < TURNING, columns + TURNING, columns + HALF)
    token_ptr = qkv_ptr + token * (num_q_heads + 2 * num_kv_heads) * HEAD_DIM
    angle_ptrs = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM + columns
    cos = tl.load(angle_ptrs, mask=columns < TURNING, other=1.0)
    sin = tl.load(angle_ptrs + TURNING, mask=columns < TURNING, other=0.0)
    slot = tl.load(out_cache_loc_ptr + token)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    if group < num_q_groups:
        q_heads = group * HEADS + tl.arange(0, HEADS)
        q_mask = (q_heads < num_q_heads)[:, None] & inside
        q_ptrs = token_ptr + q_heads[:, None] * HEAD_DIM
        q_first, q_second = _norm_and_rotate(
            q_ptrs, q_mask, q_weight_ptr, first_at, second_at, inside, cos, sin, eps, HEAD_DIM, NORM
        )
        let_next_start(DEPENDENT)
        tl.store(q_ptrs + first_at, q_first.to(qkv_ptr.dtype.element_ty), mask=q_mask)
        tl.store(q_ptrs + second_at, q_second.to(qkv_ptr.dtype.element_ty), mask=q_mask)
    else:
        kv_heads = (group - num_q_groups) * HEADS + tl.arange(0, HEADS)
        kv_mask = (kv_heads < num_kv_heads)[:, None] & inside
        offsets = kv_heads[:, None] * HEAD_DIM
        k_ptrs = token_ptr + num_q_heads * HEAD_DIM + offsets
        v_ptrs = k_ptrs + num_kv_heads * HEAD_DIM
        v_first = tl.load(v_ptrs + columns, mask=kv_mask, other=0.0)
        v_second = tl.load(v_ptrs + columns + HALF, mask=kv_mask, other=0.0)
        k_first, k_second = _norm_and_rotate(
            k_ptrs, kv_mask, k_weight_ptr, first_at, second_at, inside, cos, sin, eps, HEAD_DIM, NORM
        )
        let_next_start(DEPENDENT)
        stored = kv_mask & ((slot >= 0) & (slot < num_slots))
        slot_offsets = slot * num_kv_heads * HEAD_DIM + offsets
        CACHE: tl.constexpr = k_slots_ptr.dtype.element_ty
        tl.store(k_slots_ptr + slot_offsets + first_at, _cached(k_first, k_scale, CACHE), mask=stored)
        tl.store(k_slots_ptr + slot_offsets + second_at, _cached(k_second, k_scale, CACHE), mask=stored)
        tl.store(v_slots_ptr + slot_offsets + columns, _cached(v_first, v_scale, CACHE), mask=stored)
        tl.store(v_slots_ptr + slot_offsets + columns + HALF, _cached(v_second, v_scale, CACHE), mask=stored)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Norms and rotates the query heads of `qkv` in place, and caches its key heads, treated alike, and value heads.

    Key and value columns of `qkv` are not changed. Rotation uses the halves convention: element i of a head is paired
    with element i + rotary_dim / 2. Elements from rotary_dim on are not rotated.

    Args:
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], contiguous.
        q_weight: [head_dim], of qkv's dtype or fp32: RMSNorm of each query head before the rotation. None for no norm.
        k_weight: [head_dim], the same for each key head. None exactly when `q_weight` is.
        eps: epsilon of both norms.
        cos_sin: [max_positions, rotary_dim] fp32, contiguous: rotary_dim / 2 cosines, then the same number of sines.
        positions: [num_tokens] int64, each at least 0 and below max_positions.
        k_slots: [num_slots, num_kv_heads * head_dim], contiguous, of qkv's dtype or FP8 e4m3.
        v_slots: the same for values.
        out_cache_loc: [num_tokens] int64: the slot of each token. Several tokens may have slot 0, the padding slot with
            undefined content. A token with a slot that is negative or at least num_slots is not stored.
        k_scale: divisor of keys in FP8. `v_scale` is the same for values.
    """
    num_tokens, width = qkv.shape
    assert width == (num_q_heads + 2 * num_kv_heads) * head_dim, f"{width} columns are not the heads of qkv"
    assert qkv.is_contiguous(), "qkv is read and written as one block"
    assert (q_weight is None) == (k_weight is None), "query and key heads are both normed or neither"
    assert k_slots.shape[1] == num_kv_heads * head_dim, f"a slot of {k_slots.shape[1]} elements is not a token's keys"
    if k_slots.dtype is torch.float8_e4m3fn:
        k_slots, v_slots = k_slots.view(torch.uint8), v_slots.view(torch.uint8)
    block = 1 << (head_dim // 2 - 1).bit_length()
    grid = (num_tokens, -(-num_q_heads // _HEADS) + -(-num_kv_heads // _HEADS))
    dependent = is_dependent(qkv.device, num_tokens)
    _qk_norm_rope_store_kernel[grid](
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        k_slots,
        v_slots,
        out_cache_loc,
        k_slots.shape[0],
        num_q_heads,
        num_kv_heads,
        eps,
        k_scale,
        v_scale,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos_sin.shape[1],
        HEADS=_HEADS,
        BLOCK=block,
        NORM=q_weight is not None,
        DEPENDENT=dependent,
        num_warps=max(block // 32, 1),  # 8 elements of each half a thread: one 16-byte load in bf16
        launch_pdl=dependent,
    )


@triton.jit(do_not_specialize=["num_slots", "num_q_heads"])
def _latent_norm_rope_store_kernel(
    q_ptr, kept_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, out_cache_loc_ptr, num_slots, num_q_heads,
    q_stride, kept_stride, eps, scale, HEAD_DIM: tl.constexpr, LATENT_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LATENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    inside = columns < HALF
    angle_ptrs = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM + columns
    cos = tl.load(angle_ptrs, mask=inside, other=1.0)
    sin = tl.load(angle_ptrs + HALF, mask=inside, other=0.0)
    slot = tl.load(out_cache_loc_ptr + token)
    heads = tl.arange(0, HEADS)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    if group > 0:
        heads += (group - 1) * HEADS
        q_mask = (heads < num_q_heads)[:, None] & inside
        q_ptrs = q_ptr + token * q_stride + heads[:, None] * HEAD_DIM + (HEAD_DIM - ROTARY_DIM)
        q_first, q_second = _norm_and_rotate(
            q_ptrs, q_mask, None, columns, columns + HALF, inside, cos, sin, eps, ROTARY_DIM, False
        )
        let_next_start(DEPENDENT)
        tl.store(q_ptrs + columns, q_first.to(q_ptr.dtype.element_ty), mask=q_mask)
        tl.store(q_ptrs + columns + HALF, q_second.to(q_ptr.dtype.element_ty), mask=q_mask)
    else:
        is_slot = (slot >= 0) & (slot < num_slots)
        latent_ptr = kept_ptr + token * kept_stride
        slot_ptr = slots_ptr + slot * (LATENT_DIM + ROTARY_DIM)
        dims = tl.arange(0, BLOCK_LATENT)
        is_latent = dims < LATENT_DIM
        x = tl.load(latent_ptr + dims, mask=is_latent, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + dims, mask=is_latent, other=0.0).to(tl.float32)
        let_next_start(DEPENDENT)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / LATENT_DIM + eps) * weight
        CACHE: tl.constexpr = slots_ptr.dtype.element_ty
        tl.store(slot_ptr + dims, _cached(normed, scale, CACHE), mask=is_latent & is_slot)
        # The one key, processed as the first of HEADS heads.
        k_mask = (heads < 1)[:, None] & inside
        k_first, k_second = _norm_and_rotate(
            latent_ptr + LATENT_DIM, k_mask, None, columns, columns + HALF, inside, cos, sin, eps, ROTARY_DIM, False
        )
        k_ptrs = slot_ptr + LATENT_DIM + columns
        tl.store(k_ptrs, _cached(k_first, scale, CACHE), mask=k_mask & is_slot)
        tl.store(k_ptrs + HALF, _cached(k_second, scale, CACHE), mask=k_mask & is_slot)


def latent_norm_rope_store(
    q: torch.Tensor,
    latents: torch.Tensor,
    *,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    out_cache_loc: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Rotates the last columns of query heads in place, and writes normed latents and rotated keys to slots.

    Args:
        q: [num_tokens, num_q_heads, head_dim]. The heads of a token are contiguous, with any stride between tokens.
        latents: [num_tokens, latent_dim + rotary_dim]: latent and key of each token, with any token stride.
        weight: [latent_dim], of q's dtype or fp32: RMSNorm of the latents.
        eps: epsilon of the norm.
        cos_sin: as in `qk_norm_rope_store`, like `positions` and `out_cache_loc`.
        slots: [num_slots, latent_dim + rotary_dim], contiguous, of q's dtype or FP8 e4m3.
        scale: divisor of both in FP8.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    rotary_dim = cos_sin.shape[1]
    latent_dim = latents.shape[1] - rotary_dim
    assert q.stride(1) == head_dim, "the heads of a token are contiguous"
    assert latents.stride(1) == q.stride(2) == weight.stride(0) == 1, "columns are contiguous"
    assert slots.shape[1] == latents.shape[1], f"a slot of {slots.shape[1]} elements is not a token's latent and key"
    if slots.dtype is torch.float8_e4m3fn:
        slots = slots.view(torch.uint8)
    dependent = is_dependent(q.device, num_tokens)
    _latent_norm_rope_store_kernel[(num_tokens, 1 + -(-num_q_heads // _HEADS))](
        q,
        latents,
        weight,
        cos_sin,
        positions,
        slots,
        out_cache_loc,
        slots.shape[0],
        num_q_heads,
        q.stride(0),
        latents.stride(0),
        eps,
        scale,
        HEAD_DIM=head_dim,
        LATENT_DIM=latent_dim,
        ROTARY_DIM=rotary_dim,
        HEADS=_HEADS,
        BLOCK=1 << (rotary_dim // 2 - 1).bit_length(),
        BLOCK_LATENT=1 << (latent_dim - 1).bit_length(),
        DEPENDENT=dependent,
        launch_pdl=dependent,
    )
