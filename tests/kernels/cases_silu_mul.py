"""`silu_mul` at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.silu_mul_triton import BLOCK, silu_mul_kernel

POINTERS = dict.fromkeys(("gate", "up", "out"), "*bf16")
SIZES = dict.fromkeys(("stride_gate", "stride_up", "width"), "i32")
CASES = {"silu_mul": Case(silu_mul_kernel, POINTERS | SIZES, {"BLOCK": BLOCK}, is_wide=True, divisible=("width",))}
