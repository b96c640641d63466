"""The kernel of `quantized_linear`: a program takes a block of rows and outputs, and walks the inputs. Up to 64 rows
in 16 bits are one block, so that every byte of the weight is read once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .joint_linear_triton import INTERPRETED, Tile

# float8_e4m3fn has 7 as exponent of 1, fp32 has 127: with its bits moved into place a value is 2 ** -120 of itself.
FP8_FACTOR = tl.constexpr(2.0**120)


class Place(NamedTuple):
    """The place of a byte of fp8 in a dtype of 16 bits: from the upper half, where its sign is right, its other bits go
    down by `shift`, to those of `mask`. Times `factor`, as bits of that dtype, it is the value; `name`: PTX's."""

    name: str
    shift: int
    mask: int
    factor: int


OF_BF16 = Place("bf16x2", 4, 0x07F0, 0x7B80)  # 2 ** 120
OF_FP16 = Place("f16x2", 1, 0x3F80, 0x5C00)  # 2 ** 8


def ptx(place: Place) -> str:
    """Makes the instructions that widen four bytes of fp8, in $2, to four values in $0 and $1: three a value, where
    compilers make five of the same in C."""
    twice = {name: f"0x{value:04X}{value:04X}" for name, value in place._asdict().items() if name in ("mask", "factor")}
    lines = [".reg .b32 bits, sign, factor, zero;", f"mov.b32 factor, {twice['factor']};", "mov.b32 zero, 0x80008000;"]
    for result, bytes_to_upper_halves in (("$0", "0x1404"), ("$1", "0x3424")):
        lines += [
            f"prmt.b32 bits, $2, 0, {bytes_to_upper_halves};",
            "and.b32 sign, bits, 0x80008000;",
            f"shr.b32 bits, bits, {place.shift};",
            f"lop3.b32 bits, bits, {twice['mask']}, sign, 0xEA;",  # (bits & mask) | sign
            f"fma.rn.{place.name} {result}, bits, factor, zero;",
        ]
    return "{ " + " ".join(lines) + " }"


PTX_OF_BF16, PTX_OF_FP16 = tl.constexpr(ptx(OF_BF16)), tl.constexpr(ptx(OF_FP16))


def tile(num_rows: int, num_outputs: int, is_fp32: bool = False) -> Tile:
    """Chooses a tile by estimates that no GPU has checked yet: so few outputs a program that most of some 130
    multiprocessors have one; for few rows, where memory alone takes time, so many inputs at a time that enough bytes
    are under way."""
    rows = max(16, triton.next_power_of_2(num_rows))
    outputs = 16 if num_outputs <= 2048 else 32 if num_outputs <= 8192 else 64
    if is_fp32:  # products of fp32 take many registers
        return Tile(min(rows, 32), min(outputs, 32), 32, 4, 3)
    if rows == 16:  # more warps than pairs of 8 outputs would do the same work twice
        return Tile(16, 32, 256, 2, 4)
    return Tile(min(rows, 64), outputs, 128, 4, 3)


@triton.jit
def _widened(bits, IS_FP8: tl.constexpr, BY_PTX: tl.constexpr, like):
    """Returns the values of a weight in the dtype of `like`, exactly, but for NaN, which `quantized` never makes.
    Those of fp8 by moving bits: Triton's own conversion needs sm_89."""
    if IS_FP8:
        if BY_PTX:
            if like.dtype == tl.bfloat16:
                return tl.inline_asm_elementwise(PTX_OF_BF16, "=r,=r,r", [bits], tl.bfloat16, is_pure=True, pack=4)
            if like.dtype == tl.float16:
                return tl.inline_asm_elementwise(PTX_OF_FP16, "=r,=r,r", [bits], tl.float16, is_pure=True, pack=4)
        wide = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x7810_0000  # without copies of the sign
        return (wide.to(tl.float32, bitcast=True) * FP8_FACTOR).to(like.dtype)
    return bits.to(tl.float32).to(like.dtype)


@triton.jit
def quantized_linear_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    IS_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    """One program computes the products of ROWS rows with OUTPUTS rows of the weight. What lies past the last row,
    output or input is read as 0. BY_PTX: on an NVIDIA GPU."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at_x = x + row.to(tl.int64)[:, None] * num_inputs
    at_weight = weight + output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        inside = (i < num_inputs)[None, :]
        a = tl.load(at_x + i[None, :], mask=(row < num_rows)[:, None] & inside, other=0.0)
        b = tl.load(at_weight + i[None, :], mask=(output < num_outputs)[:, None] & inside, other=0)
        if WIDEN:
            a = a.to(tl.float32)
        sums = tl.dot(a, tl.trans(_widened(b, IS_FP8, BY_PTX, a)), sums, input_precision="ieee")
    kept = output < num_outputs
    sums *= tl.load(scale + output, mask=kept, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=kept, other=0.0).to(tl.float32)[None, :]
    at_out = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & kept[None, :])


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Launches the kernel; see the operation."""
    weight, rows = weight.contiguous(), x.reshape(-1, x.shape[-1]).contiguous()
    num_outputs, num_inputs = weight.shape
    out = x.new_empty(*x.shape[:-1], num_outputs)
    is_widened = x.dtype not in (torch.bfloat16, torch.float16)
    cut = tile(len(rows), num_outputs, is_widened)
    quantized_linear_kernel[(triton.cdiv(num_outputs, cut.outputs), triton.cdiv(len(rows), cut.rows))](
        *(
            rows,
            weight,
            scale.contiguous(),
            scale if bias is None else bias.contiguous(),
            out,
            len(rows),
            num_outputs,
            num_inputs,
        ),
        HAS_BIAS=bias is not None,
        IS_FP8=weight.dtype == torch.uint8,
        ROWS=cut.rows,
        OUTPUTS=cut.outputs,
        INPUTS=cut.inputs,
        WIDEN=INTERPRETED or is_widened,
        BY_PTX=not INTERPRETED and torch.version.hip is None,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return out
