"""The kernels of RMSNorm and of what stands before it: a program takes a row, or one half of it, in one block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operation import with_close_entries

ELEMENTS_PER_THREAD = 8  # 16 bytes of bf16 in one load
MAX_WARPS = 16


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
