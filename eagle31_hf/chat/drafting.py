"""Trees that a user of a chat chooses, as arguments of generate()."""

from typing import Any

from ..bench import TREE_SHAPE, Shape

MIN_NODES, MAX_NODES = 2, 64


def trees(depth: int, nodes: int, begun: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for trees of that depth and of so many nodes, the root included. How many children a node
    has is kept from `begun`, the arguments of the command line, where these draft trees."""
    top_k = begun.get("draft_tree_top_k")
    is_tree = isinstance(top_k, int) and top_k > 1
    return Shape(depth, top_k if is_tree else TREE_SHAPE.top_k, nodes).knobs
