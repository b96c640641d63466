"""Draft trees as tensors: no model. B rows with a tree each, N nodes; node 0, the root, is the token committed last; a
parent comes before its children."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """`ids` (B, N) target ids, `parents` (B, N) nodes, -1 for the root, `depths` (B, N), `ancestors` (B, N, N): is j on
    the path to i, i itself included, `log_probs` (B, N): the drafter's, given the parent."""

    ids: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    log_probs: Tensor

    @classmethod
    def from_parents(cls, ids: Tensor, parents: Tensor, max_depth: int, log_probs: Tensor | None = None) -> "DraftTree":
        """The trees of node ids (B, N) and parents (B, N), each before its children, none deeper than `max_depth`."""
        rows, count = ids.shape
        paths = torch.eye(count, device=ids.device).repeat(rows, 1, 1)
        paths.scatter_(2, parents.clamp(min=0)[:, :, None], 1.0)  # who is at most one step up
        for _ in range((max_depth - 1).bit_length()):
            paths = (paths @ paths).clamp(max=1.0)  # at most twice as many steps up
        ancestors = paths > 0
        return cls(
            ids,
            parents,
            ancestors.sum(2) - 1,
            ancestors,
            torch.zeros_like(paths[..., 0]) if log_probs is None else log_probs,
        )

    def to(self, device: torch.device) -> "DraftTree":
        return DraftTree(*(getattr(self, field.name).to(device) for field in fields(self)))

    def children(self) -> list[list[dict[int, int]]]:
        """For every row and node, the children: token id -> node."""
        rows = []
        for ids, parents in zip(self.ids.tolist(), self.parents.tolist(), strict=True):
            found: list[dict[int, int]] = [{} for _ in ids]
            for node, (parent, token) in enumerate(zip(parents, ids, strict=True)):
                if parent >= 0:
                    found[parent][token] = node
            rows.append(found)
        return rows

    @property
    def depth(self) -> int:
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs on the one before it."""
        return bool((self.depths[:, -1] == self.depths.shape[1] - 1).all())


class Candidates:
    """What an expansion has scored so far, for B rows alike: candidate 0 is the root; every level adds children of the
    frontier.

    Source: EAGLE-2 (arXiv 2406.16858), section 4: expand the best of each level, rerank all of them at the end.
    """

    def __init__(self, root: Tensor):
        """The roots' token ids (B, 1)."""
        self.rows = len(root)
        zero = torch.zeros(root.shape, device=root.device)
        self.ids = [root]
        self.parents = [torch.full_like(root, -1)]
        self.scores = [zero]
        self.log_probs = [zero]
        self.count, self.levels = 1, 0
        # Of the frontier (B, F): candidate indices, token ids, scores.
        self.frontier = torch.zeros_like(root)
        self.frontier_ids = root
        self.frontier_scores = zero

    def extend(self, log_probs: Tensor, ids: Tensor, width: int, scores: Tensor | None = None) -> Tensor:
        """Adds the children (B, F, k) of the F frontier nodes; the `width` best of them are the new frontier.

        `scores` (B, F, k): what a child adds to its parent's score, by default its log-probability. Returns for each
        frontier node which row of the old one is its parent (B, F').
        """
        own = log_probs if scores is None else scores
        totals, flat = (own + self.frontier_scores[..., None]).flatten(1), ids.flatten(1)
        self.ids.append(flat)
        self.parents.append(self.frontier[..., None].expand(ids.shape).flatten(1))
        self.scores.append(totals)
        self.log_probs.append(log_probs.flatten(1))
        self.frontier_scores, best = totals.topk(min(width, totals.shape[1]), dim=1)
        self.frontier, self.frontier_ids = best + self.count, flat.gather(1, best)
        self.count, self.levels = self.count + totals.shape[1], self.levels + 1
        return best // ids.shape[2]

    def narrow(self, width: int) -> Tensor:
        """Keeps but the best `width` of the frontier. Returns their ids (B, F')."""
        self.frontier, self.frontier_ids, self.frontier_scores = (
            part[:, :width] for part in (self.frontier, self.frontier_ids, self.frontier_scores)
        )
        return self.frontier_ids

    def best(self, count: int) -> DraftTree:
        """The root and the `count` best candidates. A stable sort: a child never scores above its parent, and in a tie
        comes after."""
        ids, parents, scores, log_probs = (
            torch.cat(parts, dim=1) for parts in (self.ids, self.parents, self.scores, self.log_probs)
        )
        kept = 1 + scores[:, 1:].sort(dim=1, descending=True, stable=True).indices[:, :count]
        kept = torch.cat((kept.new_zeros(self.rows, 1), kept.sort(dim=1).values), dim=1)
        place = torch.full_like(ids, -1).scatter_(
            1, kept, torch.arange(kept.shape[1], device=ids.device).expand_as(kept)
        )
        old = parents.gather(1, kept)
        parents = torch.where(old < 0, old, place.gather(1, old.clamp(min=0)))
        return DraftTree.from_parents(ids.gather(1, kept), parents, self.levels, log_probs.gather(1, kept))


class Paths:
    """Which of the nodes a drafter has run each node of the last level descends from, the node itself included; in the
    order they ran."""

    def __init__(self, num_rows: int, device: torch.device):
        self.num_rows, self.device = num_rows, device
        self.depths: list[int] = []  # by node
        self._seen: Tensor | None = None  # of a chain, every node sees all

    @property
    def count(self) -> int:
        return len(self.depths)

    def extend(self, from_row: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Runs a level whose nodes hang on those (B, F) of the last one. Returns which nodes each of them sees (B, F,
        count), and the depths (B, count) of these; None, None for a chain."""
        width = from_row.shape[1]
        level = 1 + max(self.depths, default=-1)
        before = self.count
        self.depths += [level] * width
        if self._seen is None and width == 1:
            return None, None
        seen = (
            torch.ones(self.num_rows, 1, before, dtype=torch.bool, device=self.device)
            if self._seen is None
            else self._seen
        )
        itself = torch.eye(width, dtype=torch.bool, device=self.device).expand(self.num_rows, -1, -1)
        self._seen = torch.cat((pick(seen, from_row), itself), dim=2)
        return self._seen, torch.tensor(self.depths, device=self.device).expand(self.num_rows, -1)


def pick(x: Tensor, rows: Tensor) -> Tensor:
    """Of x (B, F, n) the rows (B, F') of dimension 1."""
    return x if x.shape[1] == rows.shape[1] == 1 else x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
