"""Acceptance at real sizes, for compile_ahead.py."""

from compile_ahead import Case

from eagle31_hf.kernels.acceptance_triton import COLUMNS, ROWS, WORDS, accepted_path_kernel, move_path_kernel

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


def moved(word: int, columns: int) -> Case:
    """Rows of so many words of so many bytes."""
    kernel = move_path_kernel
    kinds = dict.fromkeys(("table", "starts", "path", "counts"), "*i64")
    kinds |= dict.fromkeys(("stride_starts", "stride_path", "stride_counts", "heads"), "i32")
    constants = {"WORD": WORDS[word], "COLUMNS": columns, "ROWS": ROWS}
    return Case(kernel, kinds, constants, {"num_warps": 1})


CASES = {
    "accepted_path": accepted(64, 8),
    "accepted_path, a chain": accepted(64, 64),
    "move_path": moved(8, 32),
    "move_path, rows of a kilobyte": moved(8, COLUMNS),
    "move_path, rows of an odd width": moved(2, COLUMNS),
}
