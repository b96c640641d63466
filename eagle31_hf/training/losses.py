"""Distances between the target's distribution p and the draft's q, and their gradients, in fp32.

N rows, Vd draft vocabulary, V target vocabulary. p is a distribution over the *target's* vocabulary: its mass S on the
draft vocabulary, the coverage, may be below 1, and no q reaches the rest. With a distance comes its `pull`, the
negative gradient by the draft's logits z, q = softmax(z): where the derivative by q_v is g_v it is q_v (<q, g> - g_v).
Written out, it takes a few passes over (N, Vd) where autograd takes some thirty. Source of `tv`, `lk_alpha` and
`lk_lambda`: LK losses (arXiv 2602.23881).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LEAST = torch.finfo(torch.float32).tiny
LOG_2 = math.log(2)
LEAST_ACCEPTED = 1e-20  # below it 1 / acceptance and the overlap's gradient are noise
LK_DECAY = 3.0  # how fast `lk_lambda` turns from KL to total variation as acceptance rises
Distance = tuple[Tensor, Tensor]  # of every row (N,), and its pull on the draft's logits (N, Vd)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row: (N, Vd), (N, Vd) -> (N,)."""
    return (a * b).sum(-1)


@dataclass
class Goal:
    """What the target says about N tokens: `p` (N, Vd), of all of its vocabulary; `coverage` S (N,); `best` (N,), the
    draft id of its likeliest token, -1 where the draft vocabulary lacks it; `negentropy` (N,): sum_v p_v log(p_v / S).
    """

    p: Tensor
    coverage: Tensor
    best: Tensor
    negentropy: Tensor

    @classmethod
    def of(cls, logits: Tensor, draft_ids: Tensor | None) -> "Goal":
        """Target logits (N, V), and the target id of every draft id (Vd,), or None where the vocabularies are one."""
        logits = logits.float()
        best, total = logits.argmax(-1), logits.logsumexp(-1)
        if draft_ids is not None:
            draft_of = torch.full((logits.shape[-1],), -1, device=logits.device)
            draft_of[draft_ids] = torch.arange(len(draft_ids), device=logits.device)
            best, logits = draft_of[best], logits[:, draft_ids]
        logits = logits - total[:, None]
        p = logits.exp()
        coverage = p.sum(-1)
        # p underflows before log p does; their product is then nothing.
        negentropy = dot(p, logits.clamp(min=-1e4)) - coverage * coverage.clamp(min=LEAST).log()
        return cls(p, coverage, best, negentropy)

    def __getitem__(self, rows: Any) -> "Goal":
        return Goal(self.p[rows], self.coverage[rows], self.best[rows], self.negentropy[rows])


class Drafts:
    """What the draft says about N tokens: its logits z (N, Vd); `q`; `total` (N,), log sum_v exp z_v; `highest` (N,),
    the largest z."""

    def __init__(self, logits: Tensor):
        self.logits = logits.detach().float()
        self.q, self.highest = self.logits.softmax(-1), self.logits.amax(-1)
        self.total = self.highest - self.q.amax(-1).log()

    @cached_property
    def log_q(self) -> Tensor:
        return self.logits - self.total[:, None]

    def pull(self, by_q: Tensor) -> Tensor:
        """Derivatives by q (N, Vd) -> the pull on the logits (N, Vd)."""
        return self.q * (dot(self.q, by_q)[:, None] - by_q)

    def is_likeliest(self, ids: Tensor) -> Tensor:
        """Whether no token is likelier than these (N,); false for -1. Without an argmax, which is slow on a CPU."""
        return (self.logits.gather(1, ids.clamp(min=0)[:, None])[:, 0] >= self.highest) & (ids >= 0)


def overlap(goal: Goal, drafts: Drafts) -> Tensor:
    """Chance that rejection sampling keeps a token drawn from q: sum_v min(p_v, q_v), at most S; (N,)."""
    return torch.minimum(goal.p, drafts.q).sum(-1)


def forward_kl(goal: Goal, drafts: Drafts) -> Distance:
    """S KL(p / S || q): what the draft vocabulary lacks cannot be learnt, and pulls at nothing. The pull is p - S q."""
    distance = goal.negentropy - dot(goal.p, drafts.logits) + goal.coverage * drafts.total
    return distance, torch.addcmul(goal.p, drafts.q, goal.coverage[:, None], value=-1)


def reverse_kl(goal: Goal, drafts: Drafts) -> Distance:
    """KL(q || p / S)."""
    log_p = (goal.p.clamp(min=LEAST) / goal.coverage.clamp(min=LEAST)[:, None]).log()
    ratio = drafts.log_q - log_p
    return dot(drafts.q, ratio), drafts.pull(ratio)


def jensen_shannon(goal: Goal, drafts: Drafts) -> Distance:
    """Of p, all of it, and q: the mean of their divergences from their mean, which is between 0 and log 2."""
    log_mean = ((goal.p + drafts.q) / 2).clamp(min=LEAST).log()
    ratio = drafts.log_q.clamp(min=-1e4) - log_mean
    of_p = dot(goal.p, goal.p.clamp(min=LEAST).log() - log_mean) + (1 - goal.coverage).clamp(min=0) * LOG_2
    return (of_p + dot(drafts.q, ratio)) / 2, drafts.pull(ratio / 2)


def total_variation(goal: Goal, drafts: Drafts) -> Distance:
    """Chance that rejection sampling refuses a token drawn from q."""
    return 1 - overlap(goal, drafts), drafts.pull(-(drafts.q < goal.p).float())


def lk_alpha(goal: Goal, drafts: Drafts) -> Distance:
    """-log of the chance of acceptance."""
    accepted = overlap(goal, drafts).clamp(min=LEAST)
    return -accepted.log(), total_variation(goal, drafts)[1] / accepted[:, None].clamp(min=LEAST_ACCEPTED)


def lk_lambda(goal: Goal, drafts: Drafts) -> Distance:
    """KL while little is accepted, total variation as more is: token by token weighted exp(-3 acceptance), a weight
    nothing pulls at."""
    (kl, kl_pull), (tv, tv_pull) = forward_kl(goal, drafts), total_variation(goal, drafts)
    weight = torch.exp(-LK_DECAY * (1 - tv))
    return torch.lerp(tv, kl, weight), torch.lerp(tv_pull, kl_pull, weight[:, None])


def cross_entropy(goal: Goal, drafts: Drafts) -> Distance:
    """-log q of the target's likeliest token; 0 where the draft vocabulary lacks it. The pull is 1 - q there, -q
    elsewhere."""
    known, column = (goal.best >= 0).float(), goal.best.clamp(min=0)[:, None]
    pull = (drafts.q * -known[:, None]).scatter_add_(1, column, known[:, None])
    return (drafts.total - drafts.logits.gather(1, column)[:, 0]) * known, pull


DISTANCES: dict[str, Callable[[Goal, Drafts], Distance]] = {
    "kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon, "tv": total_variation, "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda, "ce": cross_entropy,
}  # fmt: skip


def mixed(mixture: dict[str, float], goal: Goal, drafts: Drafts) -> Distance:
    """A weighted sum of distances, and its pull."""
    parts = [(weight, *DISTANCES[name](goal, drafts)) for name, weight in mixture.items()]
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1:]
    distance = torch.stack([weight * distance for weight, distance, _ in parts]).sum(0)
    for weight, _, pull in parts:
        pull.mul_(weight)
    return distance, sum((pull for _, _, pull in parts[1:]), parts[0][2])


def parse_mixture(text: str) -> dict[str, float]:
    """ "kl", or "kl=0.9,tv=0.1": distances and their weights. Raises ValueError for others."""
    mixture = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in DISTANCES:
            raise ValueError(
                f"loss {text!r} names {name!r}; expected some of {', '.join(DISTANCES)}, as in 'kl' or 'kl=0.9,tv=0.1'."
            )
        try:
            mixture[name] = float(weight or 1.0)
        except ValueError:
            raise ValueError(
                f"loss {text!r} weights {name} with {weight!r}; expected a number, as in 'kl=0.9,tv=0.1'."
            ) from None
    return mixture
