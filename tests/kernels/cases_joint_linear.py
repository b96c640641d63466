"""`joint_linear` and `gated_linear` at real sizes, for compile_ahead.py."""

from compile_ahead import AMD_SHARED, SHARED, Case

from eagle31_hf.kernels.joint_linear_triton import fitted, gated_linear_kernel, joint_linear_kernel, tile

JOINT = ("x", "weight_1", "weight_2", "weight_3", "bias_1", "bias_2", "bias_3", "out")
WIDTHS = ("outputs_1", "outputs_2", "outputs_3")


def case(rows: int, outputs: int, inputs: int, shared: int, gated: bool = False, dtype: str = "bf16") -> Case:
    """The case of a kernel for so many rows, outputs and inputs, on GPUs with so much shared memory."""
    cut = fitted(tile(rows, outputs, gated), inputs, 2 if gated else 1, shared)
    pointers = ("x", "gate", "up", "out") if gated else JOINT
    widths = ("num_outputs",) if gated else WIDTHS
    types = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("num_rows", "num_inputs", *widths), "i32")
    constants = {"ROWS": cut.rows, "OUTPUTS": cut.outputs, "INPUTS": cut.inputs, "WIDEN": False}
    constants |= {} if gated else {"HAS_BIAS": outputs == 6144}
    options = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
    return Case(
        gated_linear_kernel if gated else joint_linear_kernel,
        types,
        constants,
        options,
        is_wide=True,
        divisible=("num_inputs", *widths),
        shared=shared,
    )


CASES = {
    f"{name}, {words} for {shared} bytes": case(rows, outputs, inputs, shared, name == "gated_linear", dtype)
    for shared in sorted({AMD_SHARED, *SHARED.values()})
    for name, words, rows, outputs, inputs, dtype in (
        ("joint_linear", "6 rows", 6, 6144, 4096, "bf16"),
        ("joint_linear", "few outputs in fp16", 6, 4096, 14336, "fp16"),
        ("joint_linear", "60 rows", 60, 4096, 4096, "bf16"),
        ("joint_linear", "60 rows of a head", 60, 32000, 4096, "bf16"),
        ("gated_linear", "6 rows", 6, 14336, 4096, "bf16"),
        ("gated_linear", "60 rows", 60, 14336, 4096, "bf16"),
    )
}
