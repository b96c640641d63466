"""`soft_kl` at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.soft_kl_triton import BLOCK, NUM_WARPS, soft_kl_kernel

FLOATS = ("p", "coverage", "negentropy", "weights", "distance", "overlap")
STRIDES = ("stride_logits", "stride_p")


def of_dtype(dtype: str) -> Case:
    """Makes the case of a draft vocabulary of 32,000, a multiple of 16."""
    types = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(("logits", "by_logits"), f"*{dtype}")
    types |= {"best": "*i64", "which": "*i64", "is_right": "*i1"} | dict.fromkeys(("vocab", *STRIDES), "i32")
    options = {"num_warps": NUM_WARPS}
    return Case(soft_kl_kernel, types, {"BLOCK": BLOCK}, options, is_wide=True, divisible=("vocab",))


CASES = {"soft_kl": of_dtype("bf16"), "soft_kl, logits in fp32": of_dtype("fp32")}
