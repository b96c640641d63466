"""A draft tree as tensors: no model. N nodes; node 0, the root, is the token committed last; a parent comes before its children."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """`ids` (N,) target ids, `parents` (N,) node indices, -1 for the root, `depths` (N,), `ancestors` (N, N): is j on the path to i, i
    itself included."""

    ids: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor

    @classmethod
    def from_parents(cls, ids: Tensor, parents: Tensor, max_depth: int) -> "DraftTree":
        """The tree of node ids (N,) and parents (N,), each before its children, none deeper than `max_depth`."""
        count = len(ids)
        paths = torch.eye(count, device=ids.device)
        paths[torch.arange(1, count, device=ids.device), parents[1:]] = 1.0  # who is at most one step up
        for _ in range((max_depth - 1).bit_length()):
            paths = (paths @ paths).clamp(max=1.0)  # at most twice as many steps up
        ancestors = paths > 0
        return cls(ids, parents, ancestors.sum(1) - 1, ancestors)

    def to(self, device: torch.device) -> "DraftTree":
        return DraftTree(*(tensor.to(device) for tensor in (self.ids, self.parents, self.depths, self.ancestors)))

    def children(self) -> list[dict[int, int]]:
        """For every node, its children: token id -> node."""
        found: list[dict[int, int]] = [{} for _ in self.ids]
        for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.ids.tolist(), strict=True)):
            if parent >= 0:
                found[parent][token] = node
        return found

    @property
    def depth(self) -> int:
        return int(self.depths.max())


class Candidates:
    """What an expansion has scored so far: candidate 0 is the root; every level adds children of the frontier.

    Source: EAGLE-2 (arXiv 2406.16858), section 4: expand the best of each level, rerank all of them at the end.
    """

    def __init__(self, root: Tensor):
        self.ids, self.parents = [root.reshape(1)], [root.new_full((1,), -1)]
        self.scores = [torch.zeros(1, device=root.device)]
        self.count, self.levels = 1, 0
        # Of the frontier: candidate indices, token ids, scores.
        self.frontier, self.frontier_ids, self.frontier_scores = root.new_zeros(1), root.reshape(1), self.scores[0]

    def extend(self, log_probs: Tensor, ids: Tensor, width: int) -> Tensor:
        """Adds the children (F, k) of the F frontier nodes; the `width` best of them are the new frontier.

        `log_probs` and `ids` (F, k). Returns for each frontier node which row of the old one is its parent (F',).
        """
        scores, ids_flat = (log_probs + self.frontier_scores[:, None]).flatten(), ids.flatten()
        self.ids.append(ids_flat)
        self.parents.append(self.frontier.repeat_interleave(ids.shape[1]))
        self.scores.append(scores)
        self.frontier_scores, best = scores.topk(min(width, len(scores)))
        self.frontier, self.frontier_ids = best + self.count, ids_flat[best]
        self.count, self.levels = self.count + len(scores), self.levels + 1
        return best // ids.shape[1]

    def best(self, count: int) -> DraftTree:
        """The root and the `count` best candidates. A stable sort: a child never scores above its parent, and in a tie comes after."""
        ids, parents, scores = torch.cat(self.ids), torch.cat(self.parents), torch.cat(self.scores)
        kept = 1 + scores[1:].sort(descending=True, stable=True).indices[:count]
        kept = torch.cat((kept.new_zeros(1), kept.sort().values))
        place = torch.full_like(ids, -1)
        place[kept] = torch.arange(len(kept), device=ids.device)
        old = parents[kept]
        return DraftTree.from_parents(ids[kept], torch.where(old < 0, old, place[old]), self.levels)
