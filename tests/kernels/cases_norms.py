"""The norms at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.layer_parts_triton import add_rms_norm_kernel, embed_norms_kernel, tile

SUM = dict.fromkeys(("x", "residual", "weight", "normed", "total"), "*bf16")
SUM |= {"stride_x": "i32", "stride_residual": "i32", "width": "i32", "eps": "fp32"}
EMBED = dict.fromkeys(("table", "table_weight", "state", "state_weight", "out"), "*bf16") | {"ids": "*i64"}
EMBED |= dict.fromkeys(("stride_table", "stride_state_b", "stride_state_t", "width"), "i32")
EMBED |= {"stride_ids_b": "i32", "eps": "fp32"}


def case(kernel, types: dict[str, str], width: int, **constants) -> Case:
    """A kernel whose rows are so wide."""
    shape = tile(width)
    options = {"num_warps": shape.pop("num_warps")}
    return Case(kernel, types, constants | shape, options, is_wide=True, divisible=("width",))


CASES = {
    "add_rms_norm": case(add_rms_norm_kernel, SUM, 4096, HAS_RESIDUAL=True),
    "add_rms_norm, 16384 wide": case(add_rms_norm_kernel, SUM, 16384, HAS_RESIDUAL=True),
    "embed_norms": case(embed_norms_kernel, EMBED, 4096, stride_ids_t=1),
}
