"""Acceptance at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.drafts_triton import accepted_path_kernel

BYTES = {"spoiled": "*i1"}


def accepted(num_nodes: int, width: int) -> Case:
    """A tree of at most so many nodes."""
    kernel = accepted_path_kernel
    kinds = {}
    for name in kernel.arg_names:
        if not name.isupper():
            is_size = name.startswith("stride_") or name in ("num_nodes", "width")
            kinds[name] = "i32" if is_size else BYTES.get(name, "*i64")
    return Case(kernel, kinds, {"N_BLOCK": num_nodes, "M_BLOCK": width}, {"num_warps": 1})


CASES = {"accepted_path": accepted(64, 8), "accepted_path, a chain": accepted(64, 64)}
