"""Drafted tokens as tensors: no model. B sequences, K drafted tokens of each, N = K + 1 nodes of its tree; node 0, the
root, is the token committed last; a parent comes before its children. A chain is a tree of width one."""

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ..cache.masks import ancestors_of
from ..cache.transfer import to_host
from .unread_states import gathered


@dataclass(frozen=True)
class DraftTokens:
    """The tokens drafted in one round; a chain where `parents` is None: every node hangs on the one before it.

    `ids` (B, K): target ids; `depth`: levels, at most. Of trees: `parents` (B, K), nodes; `depths` (B, N), the
    root's being 0; `ancestors` (B, N, N): whether node j is on the path to node i, i itself included. `log_probs`
    (B, K): the scores of each, given its parent, as `DraftSampler.scored` returns them. `logits` (B, K, V): those
    that the tokens of a chain were drawn from, where rejection sampling needs them. `guess`: of sequences for which
    nothing is drafted, the likeliest next token (B, 1), `guess_log_probs` (B, 1) its log-probability. `is_plain`:
    nothing is drafted, and no earlier draft is left in the cache, so the target's logits are those of plain decoding.
    """

    ids: Tensor
    depth: int
    parents: Tensor | None = None
    depths: Tensor | None = None
    ancestors: Tensor | None = None
    log_probs: Tensor | None = None
    logits: Tensor | None = None
    guess: Tensor | None = None
    guess_log_probs: Tensor | None = None
    is_plain: bool = False

    @classmethod
    def none(cls, like: Tensor, is_plain: bool = False) -> "DraftTokens":
        """Makes the drafts of a round without any; `like` (B, L) gives batch size, dtype and device."""
        return cls(like[:, :0], 0, is_plain=is_plain)

    @classmethod
    def tree(cls, ids: Tensor, parents: Tensor, depth: int, log_probs: Tensor | None = None) -> "DraftTokens":
        """The trees of drafts (B, K) and their parents (B, K), each before its children, none deeper than `depth`."""
        ancestors = ancestors_of(parents, depth)
        return cls(ids, depth, parents, ancestors.sum(2) - 1, ancestors, log_probs)

    @property
    def num_nodes(self) -> int:
        """Tokens of each sequence in the forward that verifies them: the one committed last and every draft."""
        return 1 + self.ids.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    def to(self, device: torch.device) -> "DraftTokens":
        if self.ids.device == device:
            return self
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def on_host(self, *others: Tensor) -> tuple["HostDrafts", list[Any]]:
        """The drafts, and further tensors, as lists; read from the device by one copy."""
        wanted = {f.name: getattr(self, f.name) for f in fields(HostDrafts)}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor is not None and tensor.numel()}
        lists = to_host(*wanted.values(), *others)
        found = dict(zip(wanted, lists, strict=False))
        found.setdefault("ids", [[]] * len(self.ids))
        return HostDrafts(**found), lists[len(wanted) :]


@dataclass
class HostDrafts:
    """The drafts of one round as lists, by sequence: see `DraftTokens`."""

    ids: list[list[int]]
    parents: list[list[int]] | None = None
    log_probs: list[list[float]] | None = None
    guess: list[list[int]] | None = None
    guess_log_probs: list[list[float]] | None = None

    @cached_property
    def children(self) -> list[list[dict[int, int]]]:
        """Returns for every node of each sequence, the root first, its children: token id -> node."""
        found: list[list[dict[int, int]]] = [[{} for _ in range(len(ids) + 1)] for ids in self.ids]
        for b, ids in enumerate(self.ids):
            parents = range(len(ids)) if self.parents is None else self.parents[b]
            for node, (token, parent) in enumerate(zip(ids, parents, strict=True), start=1):
                found[b][parent][token] = node
        return found

    def depths(self) -> list[int]:
        """Returns the levels of each sequence's tree."""
        if self.parents is None:
            return [len(ids) for ids in self.ids]
        found = []
        for parents in self.parents:
            depths = [0]  # of every node, the root first
            for parent in parents:
                depths.append(depths[parent] + 1)
            found.append(max(depths))
        return found


class Expansion:
    """The candidates that an expansion has scored so far, for B sequences alike; every level adds the k children of
    each node of the frontier. Of a chain k is 1.

    The drafter runs every frontier but the root. `widths`: its nodes, by level; `visible` (B, F, `num_run`): which of
    all the nodes it runs those of the last level see, their ancestors and themselves, in the order they ran; None: a
    chain so far, where every node sees all.

    Source: EAGLE-2 (arXiv 2406.16858), section 4: expand the best of each level, rerank all of them at the end.
    """

    def __init__(self, root: Tensor):
        """The roots' token ids (B, 1)."""
        self.root = root
        self.top_k = 1
        self.ids = list[Tensor]()  # by level, (B, F k)
        self.scores = list[Tensor]()
        self.log_probs = list[Tensor]()
        self._count = 1  # nodes and candidates so far, the root included
        self._frontiers = list[Tensor]()  # by level, (B, F): the numbers of the nodes whose children it adds
        self._frontier_scores: Tensor | None = None  # (B, F), None: that of the root, 0
        self.widths = list[int]()
        self.visible: Tensor | None = None

    @property
    def levels(self) -> int:
        return len(self.ids)

    @property
    def num_run(self) -> int:
        return sum(self.widths)

    def depths_run(self) -> Tensor:
        """The level (1, `num_run`) of every node that the drafter runs, the first being 0."""
        sizes = enumerate(self.widths)
        return torch.cat([torch.full((1, width), level, device=self.root.device) for level, width in sizes], dim=1)

    def extend(self, ids: Tensor, log_probs: Tensor | None = None, scores: Tensor | None = None) -> None:
        """Adds a level: the children (B, F, k) of the frontier's nodes. `scores` (B, F, k): what a child adds to its
        parent's score, by default its log-probability."""
        self.top_k = ids.shape[2]
        self.ids.append(ids.flatten(1))
        own = log_probs if scores is None else scores
        if log_probs is not None and own is not None:
            total = own if self._frontier_scores is None else own + self._frontier_scores[..., None]
            self.scores.append(total.flatten(1))
            self.log_probs.append(log_probs.flatten(1))

    def advance(self, width: int) -> tuple[Tensor, Tensor | None]:
        """Makes the best `width` candidates of the last level the new frontier. Returns their ids (B, F), and the nodes
        (B, F) of the old frontier that are their parents, None where there is but one child of one node."""
        ids = self.ids[-1]
        if ids.shape[1] == 1:
            self._frontier_scores = self.scores[-1] if self.scores else None
            self._run(None, 1)
            return ids, None
        self._frontier_scores, best = self.scores[-1].topk(min(width, ids.shape[1]), dim=1)
        if not self._frontiers:
            self._frontiers.append(torch.zeros_like(self.root))
        self._frontiers.append(best + self._count)
        self._count += ids.shape[1]
        from_node = best // self.top_k
        self._run(from_node, best.shape[1])
        return ids.gather(1, best), from_node

    def _run(self, from_node: Tensor | None, width: int) -> None:
        """Adds a level of `width` nodes to those that the drafter runs, children of the nodes `from_node` (B, F) of the
        last one (None: of its only one)."""
        if self.visible is not None or width > 1:
            size, device = len(self.root), self.root.device
            if self.visible is None:
                above = torch.ones(size, width, self.num_run, dtype=torch.bool, device=device)
            else:
                above = pick(self.visible, from_node)
            self.visible = torch.cat((above, identity(width, device).expand(size, -1, -1)), dim=2)
        self.widths.append(width)

    def best(self, count: int, depth: int | None = None, is_chain: bool = False) -> DraftTokens:
        """The `count` best candidates, as a tree or chain. A stable sort: a child never scores above its parent, and in
        a tie comes after it. `depth`: how many levels they lie in, where it is known; `is_chain`: in each level one."""
        if count == 0:
            return DraftTokens(self.ids[0][:, :0], 0, log_probs=self.log_probs[0][:, :0] if self.log_probs else None)
        if self.top_k == 1:
            ids = torch.cat(self.ids[:count], dim=1)
            log_probs = torch.cat(self.log_probs[:count], dim=1) if self.log_probs else None
            return DraftTokens(ids, ids.shape[1], log_probs=log_probs)
        scores = torch.cat(self.scores, dim=1)
        kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
        ids = torch.cat(self.ids, dim=1).gather(1, kept)
        log_probs = torch.cat(self.log_probs, dim=1).gather(1, kept)
        num_kept = kept.shape[1]
        if is_chain:
            return DraftTokens(ids, num_kept, log_probs=log_probs)
        parents = self._parents_among(kept, scores.shape[1])
        return DraftTokens.tree(ids, parents, min(depth or self.levels, num_kept), log_probs)

    def _parents_among(self, kept: Tensor, count: int) -> Tensor:
        """The parents (B, K) of the candidates that are kept (B, K), of `count`, as nodes of their tree. Candidates are
        numbered from 0, as frontiers' nodes from 1: the root is their 0."""
        frontiers = self._frontiers or [torch.zeros_like(self.root)]
        parents = torch.cat(frontiers, dim=1).gather(1, kept // self.top_k)
        node = kept.new_zeros(len(kept), count + 1)  # of each candidate that is kept, from 1 on; of the root 0
        node.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept))
        return node.gather(1, parents)


@cache
def identity(size: int, device: torch.device) -> Tensor:
    """The identity matrix (size, size) of booleans, which every level of every round reads."""
    return torch.eye(size, dtype=torch.bool, device=device)


def pick(x: Tensor, nodes: Tensor | None) -> Tensor:
    """Entries `nodes` (B, F') of dimension 1 of x (B, F, n); None: x itself."""
    return x if nodes is None else gathered(x, nodes)
