"""The kernel of `silu_mul`: a program takes a block of elements, whatever the shape."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Launches the kernel; see the operation."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    silu_mul_kernel[(triton.cdiv(up.numel(), BLOCK),)](gate, up, out, up.numel(), BLOCK=BLOCK)
    return out
