"""`quantized_linear` at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.joint_linear_triton import quantized_linear_kernel, quantized_tile

NUMBERS = ("num_rows", "num_outputs", "num_inputs")


def case(rows: int, outputs: int, bits: str, dtype: str = "bf16", has_bias: bool = False) -> Case:
    """Makes the case of the kernel for so many rows and outputs; `bits`: i8, or u8 for fp8."""
    cut = quantized_tile(rows, outputs, dtype == "fp32")
    types = {"x": f"*{dtype}", "weight": f"*{bits}", "scale": "*fp32", "bias": f"*{dtype}", "out": f"*{dtype}"}
    types |= dict.fromkeys(NUMBERS, "i32")
    constants = {"HAS_BIAS": has_bias, "IS_FP8": bits == "u8", "WIDEN": dtype == "fp32", "BY_PTX": True}
    constants |= {"ROWS": cut.rows, "OUTPUTS": cut.outputs, "INPUTS": cut.inputs}
    options = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
    divisible = ("num_outputs", "num_inputs")
    few = rows <= 16 and dtype == "bf16"  # with more rows products take the time; fp16, at 5.1 with int8, is rare
    weights = cut.outputs * cut.inputs if few else 0
    return Case(
        quantized_linear_kernel, types, constants, options, is_wide=True, divisible=divisible, weights_a_pass=weights
    )


CASES = {
    "quantized_linear": case(1, 14336, "i8"),
    "quantized_linear, few outputs in fp8": case(1, 1024, "u8"),
    "quantized_linear, fp8 to fp16": case(6, 4096, "u8", "fp16"),
    "quantized_linear, 24 rows": case(24, 4096, "i8"),
    "quantized_linear, 64 rows in fp8": case(64, 32000, "u8"),
    "quantized_linear, fp16 and bias": case(8, 4096, "i8", "fp16", has_bias=True),
    "quantized_linear, fp32": case(8, 4096, "u8", "fp32"),
}
