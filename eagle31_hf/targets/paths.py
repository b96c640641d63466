"""The paths of trees from the root to each leaf, as sequences of a batch. B trees of N nodes, P paths of each, D nodes
long."""

from typing import Any

import torch
from torch import Tensor


class Paths:
    """All paths (B P, D): `nodes` of each, and `rows`, the tree that it is of. A shorter path goes on with its leaf; a
    tree with fewer paths has its first one several times. `parents`: of every node but the root, by tree."""

    def __init__(self, parents: list[list[int]]):
        by_tree = [paths_of([-1, *of_drafts]) for of_drafts in parents]
        num_paths = max(map(len, by_tree))
        self.num_trees = len(parents)
        self.depth = max(len(path) for paths in by_tree for path in paths)
        self.rows = [b for b in range(self.num_trees) for _ in range(num_paths)]
        self.nodes = list[list[int]]()
        places = list[list[int]]()  # of each node among those of its tree's paths
        for paths, of_drafts in zip(by_tree, parents, strict=True):
            paths += paths[:1] * (num_paths - len(paths))
            padded = [path + path[-1:] * (self.depth - len(path)) for path in paths]
            order = [node for path in padded for node in path]
            self.nodes += padded
            places.append([order.index(node) for node in range(len(of_drafts) + 1)])
        self._places = torch.tensor(places, device="cpu")

    def to_nodes(self, output: Any) -> Any:
        """Tensors along the paths (B P, D, ...), be it in tuples or lists -> those of the nodes (B, N, ...)."""
        if isinstance(output, tuple | list):
            return type(output)(map(self.to_nodes, output))
        if not isinstance(output, Tensor) or output.shape[:2] != (len(self.rows), self.depth):
            return output
        tree = torch.arange(self.num_trees, device=output.device)[:, None]
        return output.unflatten(0, (self.num_trees, -1)).flatten(1, 2)[tree, self._places.to(output.device)]


def paths_of(parents: list[int]) -> list[list[int]]:
    """The paths from a tree's root to its leaves, as lists of nodes; `parents`: of every node, -1 of the root."""
    paths = []
    for leaf in sorted({*range(len(parents))} - {*parents}):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths
