"""Drafting at real sizes, for compile_ahead.py."""

import triton
from compile_ahead import Case

from eagle31_hf.kernels.drafts_triton import (
    AGAINST,
    JOIN_WARPS,
    LEVEL_WARPS,
    RANKED,
    TREE_WARPS,
    best_tree_kernel,
    join_blocks,
    likeliest_in_slice_kernel,
    likeliest_of_slices_kernel,
    next_level_kernel,
    slice_of,
    tree_blocks,
)


def types(kernel, **pointers: str) -> dict[str, str]:
    """The types of a kernel's arguments: pointers as given, and integers."""
    return {name: pointers.get(name, "i32") for name in kernel.arg_names if not name.isupper()}


def sliced(num_columns: int, k: int, dtype: str) -> Case:
    block, warps = slice_of(num_columns)
    kernel = likeliest_in_slice_kernel
    kinds = types(kernel, logits=f"*{dtype}", keys="*i64", sums="*fp32", temperature="fp32")
    constants = {"K": k, "K_BLOCK": triton.next_power_of_2(k), "BLOCK": block}
    return Case(kernel, kinds, constants, {"num_warps": warps}, is_wide=True, divisible=("num_columns",))


def joined(num_columns: int, k: int, has_ids: bool) -> Case:
    kernel = likeliest_of_slices_kernel
    pointers = {"keys": "*i64", "sums": "*fp32", "target_ids": "*i64", "values": "*fp32", "ids": "*i64"}
    constants = join_blocks(triton.cdiv(num_columns, slice_of(num_columns)[0]), k) | {"HAS_IDS": has_ids}
    return Case(kernel, types(kernel, temperature="fp32", **pointers), constants, {"num_warps": JOIN_WARPS})


def leveled(k: int) -> Case:
    floats = dict.fromkeys(("log_probs", "scores", "totals", "best_scores"), "*fp32")
    kinds = types(next_level_kernel, bits="*i64", best="*i64", best_bits="*i64", **floats)
    constants = {"K": k, "RANKED": RANKED, "AGAINST": AGAINST}
    return Case(next_level_kernel, kinds, constants, {"num_warps": LEVEL_WARPS})


def tree(num_candidates: int, count: int) -> Case:
    integers = dict.fromkeys(("parents", "kept", "hangs_on", "depths", "bits"), "*i64")
    kinds = types(best_tree_kernel, scores="*fp32", **integers)
    return Case(best_tree_kernel, kinds, tree_blocks(num_candidates, count), {"num_warps": TREE_WARPS})


CASES = {
    "likeliest_tokens, a slice of 32000": sliced(32000, 10, "bf16"),
    "likeliest_tokens, a slice of 151936 in fp32": sliced(151936, 16, "fp32"),
    "likeliest_tokens, joined": joined(151936, 16, True),
    "next_level": leveled(10),
    "best_tree": tree(610, 59),
    "best_tree, small": tree(30, 7),
}
