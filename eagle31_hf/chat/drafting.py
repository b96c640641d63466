"""Ways of drafting that a user of a chat chooses from, as arguments of generate()."""

from typing import Any

from ..bench import TREE_SHAPE

MIN_NODES, MAX_NODES = 2, 64


def chains(depth: int) -> dict[str, Any]:
    """Returns the arguments for chains of so many tokens."""
    return {"num_assistant_tokens": depth, "draft_tree_top_k": 1}


def trees(depth: int, nodes: int, begun: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for trees of that depth and of so many nodes, the root included. How many children a node
    has is kept from `begun`, the arguments of the command line, where these draft trees."""
    top_k = begun.get("draft_tree_top_k")
    is_tree = isinstance(top_k, int) and top_k > 1
    return {
        "num_assistant_tokens": depth,
        "draft_tree_top_k": top_k if is_tree else TREE_SHAPE.top_k,
        "draft_tree_total_tokens": nodes,
    }
