"""`tree_attention` at real sizes, for compile_ahead.py."""

from dataclasses import replace

from compile_ahead import Case

from eagle31_hf.kernels.tree_attention_triton import join_constants, join_kernel, parts, tile, tree_attention_kernel

STRIDES = [f"stride_{of}" for of in ("qb", "qh", "qt", "kb", "kh", "kc", "vb", "vh", "vc")]
FACTORS = {"scale": "fp32", "softcap": "fp32"}
NUMBERS = ("spans_b", "spans_t", "spans_column", "tokens", "capacity")


def case(rows: int, group: int, width: int, value_width: int, dtype: str = "bf16", softcap: bool = False) -> Case:
    """The first kernel for as many rows of a KV head."""
    cut, of_amd = (tile(rows, max(width, value_width), dtype == "fp32", is_amd) for is_amd in (False, True))
    types = dict.fromkeys(("q", "keys", "values"), f"*{dtype}")
    types |= {"spans": "*i64", "found": "*fp32", "masses": "*fp32"}
    types |= dict.fromkeys([*STRIDES, *NUMBERS], "i32") | FACTORS
    (d1, d2), (v1, v2) = parts(width), parts(value_width)
    constants = {"GROUP": group, "D": width, "D1": d1, "D2": d2, "V": value_width, "V1": v1, "V2": v2}
    constants |= {"HAS_SOFTCAP": softcap, "WIDEN": dtype == "fp32"}
    amd, nvidia = (
        Case(
            tree_attention_kernel,
            types,
            constants | {"M": each.rows, "BLOCK": each.slots},
            {"num_warps": each.num_warps, "num_stages": each.num_stages},
            is_wide=True,
            divisible=("capacity",),
        )
        for each in (of_amd, cut)
    )
    return replace(nvidia, of_amd=amd)


def joining(value_width: int, splits: int, has_sinks: bool) -> Case:
    """The second kernel."""
    types = {"found": "*fp32", "masses": "*fp32", "sinks": "*bf16", "out": "*bf16", "splits": "i32"}
    constants = {"V": value_width, "HAS_SINKS": has_sinks, "GROUP": 4, **join_constants(value_width, splits)}
    return Case(join_kernel, types, constants, is_wide=True)


CASES = {
    "tree_attention": case(8 * 4, 4, 128, 128),
    "tree_attention, one token": case(1 * 4, 4, 128, 128),
    "tree_attention, 16 tokens": case(16 * 4, 4, 128, 128),
    "tree_attention, 60 tokens": case(60 * 4, 4, 128, 128),
    "tree_attention, no groups": case(6, 1, 128, 128),
    "tree_attention, latent": case(192, 1, 576, 512),
    "tree_attention, narrow": case(8 * 4, 4, 64, 64),
    "tree_attention, broad with softcap": case(8 * 2, 2, 256, 256, softcap=True),
    "tree_attention, broad, 60 tokens": case(60 * 2, 2, 256, 256),
    "tree_attention, 192 wide": case(8, 1, 192, 128),
    "tree_attention, 80 wide": case(8, 1, 80, 80),
    "tree_attention, fp32": case(8 * 4, 4, 128, 128, "fp32"),
    "tree_attention, joined": joining(128, 32, False),
    "tree_attention, latent, joined with sinks": joining(512, 128, True),
}
