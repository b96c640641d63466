"""`distillation_loss` at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.distillation_loss_triton import BLOCK, NUM_WARPS, distillation_loss_kernel

FLOATS = ("p", "coverage", "negentropy", "weights", "distance", "overlap")
STRIDES = ("stride_logits", "stride_p")


def of_dtype(dtype: str) -> Case:
    """Makes the case of a draft vocabulary of 32,000, a multiple of 16."""
    types = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(("logits", "by_logits"), f"*{dtype}")
    types |= {"best": "*i64", "which": "*i64", "is_right": "*i1"} | dict.fromkeys(("vocab", *STRIDES), "i32")
    types["hard"] = "fp32"
    options = {"num_warps": NUM_WARPS}
    return Case(distillation_loss_kernel, types, {"BLOCK": BLOCK}, options, is_wide=True, divisible=("vocab",))


CASES = {"distillation_loss": of_dtype("bf16"), "distillation_loss, logits in fp32": of_dtype("fp32")}
