"""`silu_mul` at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.silu_mul_triton import BLOCK, silu_mul_kernel

TYPES = {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "count": "i32"}
CASES = {"silu_mul": Case(silu_mul_kernel, TYPES, {"BLOCK": BLOCK}, is_wide=True, divisible=("count",))}
