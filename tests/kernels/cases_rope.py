"""Rotary embedding at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.layer_parts_triton import rope_append_kernel, rope_blocks


def types(kernel, **others: str) -> dict[str, str]:
    """The types of a kernel's arguments by their names: sizes, strides, and pointers to bf16."""
    found = {}
    for name in kernel.arg_names:
        if name.startswith("stride_") or name in ("num_tokens", "capacity"):
            found[name] = "i32"
        elif not name.isupper():
            found[name] = "*bf16"
    return found | others


def rotated(width: int, part: int, is_normed: bool, **others: str) -> Case:
    """A model of 32 heads and 8 of keys."""
    constants = rope_blocks(width, width, part) | {"H": 32, "HKV": 8, "NORMED": is_normed}
    kinds = types(rope_append_kernel, starts="*i64", eps="fp32", **others)
    return Case(rope_append_kernel, kinds, constants, {"num_warps": 1}, is_wide=True)


CASES = {
    "rope_append": rotated(128, 128, False),
    "rope_append, normed": rotated(128, 128, True, cos="*fp32", sin="*fp32"),
    "rope_append, a part of 96": rotated(96, 64, True),
    "rope_append, 256 wide": rotated(256, 256, True),
}
