"""The kernels of linear layers of few rows: a program takes all rows, up to 64 of them, and a block of outputs, and
walks the inputs, so that every byte of a weight is read once.

Weights in 8 bits are held as `quantized_linear` says. Of others more than 64 rows, fp32, and more than 16 rows of one
weight, where cuBLAS is as fast, are left to torch; so are dtypes that differ, weights with gaps, and inputs that 64
does not divide. Their tiles are those that an H200 found the fastest for Llama-3.1-8B, of some seventy tried.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

MOST_ROWS, MOST_OF_ONE = 64, 16  # rows; of a product with one weight
MOST_WEIGHTS = 3  # of one launch: queries, keys and values
INTERPRETED = triton.knobs.runtime.interpret
SHARED_OF_TESTS = 232_448  # bytes, an H100's: what Triton's interpreter is told


class Tile(NamedTuple):
    """The sizes of a program: rows it multiplies, outputs, inputs at a time; its warps and stages."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def tile(num_rows: int, num_outputs: int, is_gated: bool = False) -> Tile:
    """The tile for so many rows and outputs, where there is shared memory for it: the fastest of those timed. Few
    outputs (up to 4,608; one weight of Llama-3.1-8B's attention has 4,096) are cut into narrow blocks, for more
    programs."""
    rows = max(16, triton.next_power_of_2(num_rows))
    if is_gated:
        return Tile(rows, 128 if rows < 64 and num_outputs >= 12288 else 64, 128 if rows < 64 else 64, 4, 3)
    if num_outputs <= 4608:
        return Tile(rows, 32, 256, 4, 5 if rows < 64 else 4)
    if rows < 64 or num_outputs < 16384:
        return Tile(rows, 64, 128, 4, 5 if rows < 64 else 4)
    return Tile(rows, 64, 64, 4, 3)


def fitted(cut: Tile, num_inputs: int, num_weights: int, shared: int) -> Tile | None:
    """The tile with inputs that divide the layer's, and stages that fit in so many bytes of shared memory, of fewer
    outputs where they have to; None where there is none. `num_weights`: read at once."""
    for outputs, inputs in itertools.product((cut.outputs, cut.outputs // 2), (cut.inputs, 128, 64)):
        stage = 2 * (cut.rows + num_weights * outputs) * inputs
        least = 3 if inputs > 64 else 2  # where fewer fit, fewer inputs at a time are better
        if inputs <= cut.inputs and num_inputs % inputs == 0 and least * stage <= shared:
            stages = min(cut.num_stages, shared // stage)
            return cut._replace(outputs=outputs, inputs=inputs, num_stages=stages)
    return None


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may take on a GPU."""
    if INTERPRETED:
        return SHARED_OF_TESTS
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


@triton.jit
def _products(at_x, weight, at, inside, num_inputs, INPUTS: tl.constexpr, WIDEN: tl.constexpr, sums):
    """Adds to the sums (rows, outputs) the products with the rows `at` of a weight."""
    i = tl.arange(0, INPUTS)
    at_weight = weight + at.to(tl.int64)[:, None] * num_inputs + i[None, :]
    for first in range(0, num_inputs, INPUTS):
        a = tl.load(at_x + (first + i)[None, :], mask=inside, other=0.0)
        b = tl.load(at_weight + first, eviction_policy="evict_first")  # it is read once
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    return sums


@triton.jit
def joint_linear_kernel(
    x,
    weight_1,
    weight_2,
    weight_3,
    bias_1,
    bias_2,
    bias_3,
    out,
    num_rows,
    num_inputs,
    outputs_1,
    outputs_2,
    outputs_3,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program computes OUTPUTS outputs of one of the weights."""
    block = tl.program_id(0)
    second = tl.cdiv(outputs_1, OUTPUTS)  # the first block of the second weight
    third = second + tl.cdiv(outputs_2, OUTPUTS)
    weight, bias = weight_1, bias_1
    width = outputs_1
    first, before = 0, 0  # the first block of this weight, and the outputs before it
    if block >= second:
        weight, bias = weight_2, bias_2
        width = outputs_2
        first, before = second, outputs_1
    if block >= third:
        weight, bias = weight_3, bias_3
        width = outputs_3
        first, before = third, outputs_1 + outputs_2
    output = (block - first) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.minimum(output, width - 1)  # the last one over again, not stored
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    sums = _products(x + row[:, None] * num_inputs, weight, at, is_row, num_inputs, INPUTS, WIDEN, sums)
    if HAS_BIAS:
        sums += tl.load(bias + at).to(tl.float32)[None, :]
    at_out = out + row[:, None] * (outputs_1 + outputs_2 + outputs_3) + (before + output)[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_row & (output < width)[None, :])


@triton.jit
def gated_linear_kernel(
    x,
    gate,
    up,
    out,
    num_rows,
    num_inputs,
    num_outputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program computes OUTPUTS outputs of both weights, and what comes of them."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.minimum(output, num_outputs - 1).to(tl.int64)
    row, i = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    is_row = (row < num_rows)[:, None]
    at_x = x + row[:, None] * num_inputs + i[None, :]
    places = at[:, None] * num_inputs + i[None, :]
    g, u = tl.zeros((ROWS, OUTPUTS), tl.float32), tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        a = tl.load(at_x + first, mask=is_row, other=0.0)
        b = tl.load(gate + places + first, eviction_policy="evict_first")
        c = tl.load(up + places + first, eviction_policy="evict_first")
        if WIDEN:
            a = a.to(tl.float32)
            b, c = b.to(tl.float32), c.to(tl.float32)
        g = tl.dot(a, tl.trans(b), g, input_precision="ieee")
        u = tl.dot(a, tl.trans(c), u, input_precision="ieee")
    kind = out.dtype.element_ty
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    y = (g / (1.0 + tl.exp(-g)) * u).to(kind)
    at_out = out + row[:, None] * num_outputs + output[None, :]
    tl.store(at_out, y, mask=is_row & (output < num_outputs)[None, :])


def _tile(x: Tensor, weights: list[Tensor], is_gated: bool) -> Tile | None:
    """The tile of a product; None where it is left to torch."""
    num_rows, num_inputs = x.shape[:-1].numel(), x.shape[-1]
    most = MOST_ROWS if len(weights) > 1 else MOST_OF_ONE
    is_taken = x.dtype in (torch.bfloat16, torch.float16) and num_rows <= most
    if not is_taken or not all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights):
        return None
    cut = tile(num_rows, len(weights[0]) if is_gated else sum(map(len, weights)), is_gated)
    shared = shared_memory(0 if x.device.index is None else x.device.index)
    return fitted(cut, num_inputs, 2 if is_gated else 1, shared)


def _constants(cut: Tile, is_widened: bool = False) -> dict[str, Any]:
    sizes = {"ROWS": cut.rows, "OUTPUTS": cut.outputs, "INPUTS": cut.inputs, "WIDEN": INTERPRETED or is_widened}
    return {**sizes, "num_warps": cut.num_warps, "num_stages": cut.num_stages}


def joint_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Launches the kernel; see the operation."""
    cut = _tile(x, weights, is_gated=False) if len(weights) <= MOST_WEIGHTS else None
    if cut is None and len(weights) == 1:
        return linear(x, weights[0], *biases)
    out = x.new_empty(*x.shape[:-1], sum(map(len, weights)))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if cut is None:  # torch's products side by side, without a copy of them
        for i, part in enumerate(out.view(len(rows), -1).split([*map(len, weights)], dim=-1)):
            if biases:
                torch.addmm(biases[i], rows, weights[i].T, out=part)
            else:
                torch.mm(rows, weights[i].T, out=part)
        return out
    widths = [*map(len, weights), 0, 0][:MOST_WEIGHTS]
    of_weights = [*weights, *weights[:1] * 2][:MOST_WEIGHTS]  # what is not there is not read
    of_biases = [*(bias.contiguous() for bias in biases), *of_weights][:MOST_WEIGHTS] if biases else of_weights
    joint_linear_kernel[(sum(triton.cdiv(width, cut.outputs) for width in widths),)](
        *(rows, *of_weights, *of_biases, out, len(rows), x.shape[-1], *widths), HAS_BIAS=bool(biases), **_constants(cut)
    )
    return out


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Launches the kernel; see the operation."""
    cut = _tile(x, [gate, up], is_gated=True)
    if cut is None:
        return silu(linear(x, gate)).mul_(linear(x, up))
    out = x.new_empty(*x.shape[:-1], len(up))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    gated_linear_kernel[(triton.cdiv(len(up), cut.outputs),)](
        *(rows, gate, up, out, len(rows), x.shape[-1], len(up)), **_constants(cut)
    )
    return out


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


def quantized_tile(num_rows: int, num_outputs: int, is_fp32: bool = False) -> Tile:
    """Chooses a tile for a weight in 8 bits by estimates that no GPU has checked yet: so few outputs a program that
    most of some 130 multiprocessors have one; for few rows, where memory alone takes time, so many inputs at a time
    that enough bytes are under way."""
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
    cut = quantized_tile(len(rows), num_outputs, is_widened)
    biases = scale if bias is None else bias.contiguous()  # not read where there are none
    quantized_linear_kernel[(triton.cdiv(num_outputs, cut.outputs), triton.cdiv(len(rows), cut.rows))](
        *(rows, weight, scale.contiguous(), biases, out, len(rows), num_outputs, num_inputs),
        HAS_BIAS=bias is not None,
        IS_FP8=weight.dtype == torch.uint8,
        BY_PTX=not INTERPRETED and torch.version.hip is None,
        **_constants(cut, is_widened),
    )
    return out
