"""The kernels between a layer's products and its attention. Of RMSNorm and of what stands before it a program takes a
row, or one half of it, in one block; of the rotary embedding, which appends keys and values, some heads of a token,
which it writes to a slot that it computes from what the device holds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operation import with_close_entries

ELEMENTS_PER_THREAD = 8  # 16 bytes of bf16 in one load
MAX_WARPS = 16
HEADS = 4  # of a token, a program


@triton.jit
def _normed(x, weight, width, eps):
    """The RMSNorm of a row in fp32; x is 0 beyond its width."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    stride_x,
    stride_residual,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the sum of a row, rounded, and the norm of what it was rounded to."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    dtype = total.dtype.element_ty
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(x + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual + row * stride_residual + i, mask=inside, other=0.0).to(tl.float32)
    rounded = s.to(dtype)
    tl.store(total + row * width + i, rounded, mask=inside)
    tl.store(normed + row * width + i, _normed(rounded.to(tl.float32), w, width, eps).to(dtype), mask=inside)


@triton.jit
def embed_norms_kernel(
    ids,
    table,
    table_weight,
    state,
    state_weight,
    out,
    stride_ids_b,
    stride_ids_t,
    stride_table,
    stride_state_b,
    stride_state_t,
    width,
    eps,
    BLOCK: tl.constexpr,
):
    """One program: one half of a token's output, the norm of its embedding or of its state."""
    t, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    half = tl.program_id(2)
    i = tl.arange(0, BLOCK)
    inside = i < width
    dtype = out.dtype.element_ty
    at = out + ((b * tl.num_programs(0) + t) * 2 + half) * width + i
    if half == 0:
        w = tl.load(table_weight + i, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(ids + b * stride_ids_b + t * stride_ids_t)
        x = tl.load(table + row * stride_table + i, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(at, _normed(x, w, width, eps).to(dtype), mask=inside)
    else:
        w = tl.load(state_weight + i, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(state + b * stride_state_b + t * stride_state_t + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, _normed(x, w, width, eps).to(dtype), mask=inside)


def tile(width: int) -> dict[str, int]:
    """The block of a row and the warps that share it: each thread takes one load of 16 bytes, where warps suffice."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // (32 * ELEMENTS_PER_THREAD), 1), MAX_WARPS)}


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launches the kernel; see the operation."""
    width = x.shape[-1]
    normed, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    rows = with_close_entries(x.reshape(-1, width))
    others = rows if residual is None else with_close_entries(residual.reshape(-1, width))
    strides = rows.stride(0), others.stride(0)
    add_rms_norm_kernel[(len(rows),)](
        rows, others, weight.contiguous(), normed, total, *strides, width, eps, residual is not None, **tile(width)
    )
    return normed, total


def embed_norms(
    ids: Tensor, table: Tensor, table_weight: Tensor, state: Tensor, state_weight: Tensor, eps: float
) -> Tensor:
    """Launches the kernel; see the operation."""
    batch, tokens, width = state.shape
    table, state = with_close_entries(table), with_close_entries(state)
    weights = table_weight.contiguous(), state_weight.contiguous()
    out = state.new_empty((batch, tokens, 2 * width))
    strides = *ids.stride(), table.stride(0), *state.stride()[:2]
    embed_norms_kernel[(tokens, batch, 2)](
        ids, table, weights[0], state, weights[1], out, *strides, width, eps, **tile(width)
    )
    return out


@triton.jit
def _rotate(
    x,
    y,
    weight,
    cos,
    sin,
    stride_x,
    stride_y,
    head,
    num_heads,
    eps,
    D: tl.constexpr,
    P: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Some heads of a token from x to y, normed where they are to be and rotated; rounded to the dtype of x first."""
    HALF: tl.constexpr = P // 2
    i = tl.arange(0, HALF_BLOCK)
    in_half = i < HALF
    is_head = head < num_heads
    inside = is_head[:, None] & in_half[None, :]
    from_first, to_first = head[:, None] * stride_x + i[None, :], head[:, None] * stride_y + i[None, :]
    first = tl.load(x + from_first, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + from_first + HALF, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + i, mask=in_half, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + i + HALF, mask=in_half, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + i, mask=in_half, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + i + HALF, mask=in_half, other=0.0).to(tl.float32)
    kept = x.dtype.element_ty
    stored = y.dtype.element_ty
    if D > P:
        j = P + tl.arange(0, REST_BLOCK)
        is_rest = is_head[:, None] & (j < D)[None, :]
        rest = tl.load(x + head[:, None] * stride_x + j[None, :], mask=is_rest, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first + second * second, 1)
        if D > P:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        first *= scale * tl.load(weight + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(weight + i + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
        if D > P:
            rest *= scale * tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)[None, :]
    turned_first = (first * first_cos[None, :] - second * first_sin[None, :]).to(kept)
    turned_second = (second * second_cos[None, :] + first * second_sin[None, :]).to(kept)
    tl.store(y + to_first, turned_first.to(tl.float32).to(stored), mask=inside)
    tl.store(y + to_first + HALF, turned_second.to(tl.float32).to(stored), mask=inside)
    if D > P:
        tl.store(y + head[:, None] * stride_y + j[None, :], rest.to(kept).to(tl.float32).to(stored), mask=is_rest)


@triton.jit
def rope_append_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    key_buffer,
    value_buffer,
    starts,
    out,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_cos_b,
    stride_cos_t,
    stride_sin_b,
    stride_sin_t,
    stride_key_b,
    stride_key_h,
    stride_key_s,
    stride_value_b,
    stride_value_h,
    stride_value_s,
    stride_starts,
    num_tokens,
    capacity,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One program: some of a token's heads of queries, of keys, or of values."""
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (HKV + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * KV_BLOCKS
    block, b = tl.program_id(0) % BLOCKS, tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    slot = tl.load(starts + b * stride_starts) + t
    kept = tl.where((slot >= 0) & (slot < capacity), HKV, 0)  # heads of keys and values
    cos += b * stride_cos_b + t * stride_cos_t
    sin += b * stride_sin_b + t * stride_sin_t
    h = tl.arange(0, HEADS).to(tl.int64)
    if block < Q_BLOCKS:
        head = block * HEADS + h
        x, y = q + b * stride_qb + t * stride_qt, out + (b * num_tokens + t) * H * D
        _rotate(x, y, q_weight, cos, sin, stride_qh, D, head, H, eps, D, P, HALF_BLOCK, REST_BLOCK, NORMED)
    elif block < Q_BLOCKS + KV_BLOCKS:
        head, apart = (block - Q_BLOCKS) * HEADS + h, stride_key_h
        key, goal = k + b * stride_kb + t * stride_kt, key_buffer + b * stride_key_b + slot * stride_key_s
        _rotate(key, goal, k_weight, cos, sin, stride_kh, apart, head, kept, eps, D, P, HALF_BLOCK, REST_BLOCK, NORMED)
    else:
        head = (block - Q_BLOCKS - KV_BLOCKS) * HEADS + h
        i = tl.arange(0, DV_BLOCK)
        inside = (head < kept)[:, None] & (i < DV)[None, :]
        values = tl.load(v + b * stride_vb + t * stride_vt + head[:, None] * stride_vh + i[None, :], mask=inside)
        at = value_buffer + b * stride_value_b + slot * stride_value_s + head[:, None] * stride_value_h + i[None, :]
        tl.store(at, values.to(tl.float32).to(value_buffer.dtype.element_ty), mask=inside)


def rope_blocks(width: int, value_width: int, rotated: int) -> dict[str, int]:
    """The constants of `rope_append_kernel` for heads so wide, of which so much is rotated."""
    return {
        "D": width,
        "DV": value_width,
        "P": rotated,
        "HALF_BLOCK": triton.next_power_of_2(rotated // 2),
        "REST_BLOCK": triton.next_power_of_2(max(width - rotated, 1)),
        "DV_BLOCK": triton.next_power_of_2(value_width),
        "HEADS": HEADS,
    }


def rope_append(
    qkv: list[Tensor], rope: list[Tensor], norms: list[Tensor], eps: float, buffers: list[Tensor], starts: Tensor
) -> Tensor:
    """Launches the kernel; see the operation."""
    if any(buffer.stride(-1) != 1 for buffer in buffers):  # it would write elsewhere
        raise ValueError("buffers must be contiguous in their last dimension")
    qkv, rope = [with_close_entries(each) for each in qkv], [with_close_entries(each) for each in rope]
    batch, tokens, heads, width = qkv[0].shape
    kv_heads, value_width = qkv[2].shape[2:]
    weights = [weight.contiguous() for weight in norms] or qkv[:2]  # which are not read where there are none
    out = torch.empty_like(qkv[0], memory_format=torch.contiguous_format)
    strides = [stride for each in qkv for stride in each.stride()[:3]]
    for each in rope:
        strides += [0 if len(each) == 1 else each.stride(0), each.stride(1)]
    strides += [stride for each in buffers for stride in each.stride()[:3]]
    blocks = rope_blocks(width, value_width, rope[0].shape[2]) | {"H": heads, "HKV": kv_heads, "NORMED": bool(norms)}
    head_blocks = triton.cdiv(heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS)
    sizes = starts.stride(0), tokens, buffers[0].shape[2]
    rope_append_kernel[(tokens * head_blocks, batch)](
        *qkv, *rope, *weights, *buffers, starts, out, *strides, *sizes, eps, **blocks, num_warps=1
    )
    return out
