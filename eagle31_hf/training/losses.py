"""Distances between the target's distribution p and the draft's q, in fp32.

N rows, of any leading shape, Vd draft vocabulary, V target vocabulary. p is a distribution over the *target's* vocabulary: its mass S on
the draft vocabulary, the coverage, may be below 1, and no q reaches the rest. Source of `tv`, `lk_alpha` and `lk_lambda`: LK losses (arXiv
2602.23881).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAST = torch.finfo(torch.float32).tiny
LK_DECAY = 3.0  # how fast `lk_lambda` turns from KL to total variation as acceptance rises


@dataclass
class Goal:
    """What the target says about N tokens: `log_p` (N, Vd), normalised over all of its vocabulary; `best` (N,): the draft id of its
    likeliest token, -1 where the draft vocabulary lacks it."""

    log_p: Tensor
    best: Tensor

    @classmethod
    def of(cls, logits: Tensor, draft_ids: Tensor | None) -> "Goal":
        """Target logits (N, V), and the target id of every draft id (Vd,), or None where the vocabularies are one."""
        logits = logits.float()
        best, total = logits.argmax(-1), logits.logsumexp(-1, keepdim=True)
        if draft_ids is None:
            return cls(logits - total, best)
        draft_of = torch.full((logits.shape[-1],), -1, device=logits.device)
        draft_of[draft_ids] = torch.arange(len(draft_ids), device=logits.device)
        return cls(logits[..., draft_ids] - total, draft_of[best])

    def __getitem__(self, rows: Any) -> "Goal":
        return Goal(self.log_p[rows], self.best[rows])

    @property
    def log_coverage(self) -> Tensor:
        """log S (N,)."""
        return self.log_p.logsumexp(-1)


def overlap(goal: Goal, log_q: Tensor) -> Tensor:
    """Chance that rejection sampling keeps a token drawn from q: sum_v min(p_v, q_v), at most S; (N, Vd) -> (N,)."""
    return torch.minimum(goal.log_p, log_q).exp().sum(-1)


def forward_kl(goal: Goal, log_q: Tensor) -> Tensor:
    """S KL(p / S || q): what the draft vocabulary lacks cannot be learnt, and pulls at nothing."""
    p, rest = goal.log_p.exp(), goal.log_coverage[..., None]
    return torch.where(p > 0, p * (goal.log_p - rest - log_q), 0.0).sum(-1)


def reverse_kl(goal: Goal, log_q: Tensor) -> Tensor:
    """KL(q || p / S)."""
    log_p = (goal.log_p - goal.log_coverage[..., None]).clamp(min=math.log(LEAST))
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(goal: Goal, log_q: Tensor) -> Tensor:
    """Of p, all of it, and q: the mean of their divergences from their mean, which is between 0 and log 2."""
    log_mean = torch.logaddexp(goal.log_p, log_q) - math.log(2)
    p, q = goal.log_p.exp(), log_q.exp()
    of_p = torch.where(p > 0, p * (goal.log_p - log_mean), 0.0).sum(-1) + (1 - p.sum(-1)).clamp(min=0) * math.log(2)
    return (of_p + (q * (log_q - log_mean)).sum(-1)) / 2


def total_variation(goal: Goal, log_q: Tensor) -> Tensor:
    """Chance that rejection sampling refuses a token drawn from q."""
    return 1 - overlap(goal, log_q)


def lk_alpha(goal: Goal, log_q: Tensor) -> Tensor:
    """-log of the chance of acceptance."""
    return -overlap(goal, log_q).clamp(min=LEAST).log()


def lk_lambda(goal: Goal, log_q: Tensor) -> Tensor:
    """KL while little is accepted, total variation as more is: token by token weighted exp(-3 acceptance)."""
    accepted = overlap(goal, log_q)
    weight = torch.exp(-LK_DECAY * accepted.detach())
    return weight * forward_kl(goal, log_q) + (1 - weight) * (1 - accepted)


def cross_entropy(goal: Goal, log_q: Tensor) -> Tensor:
    """-log q of the target's likeliest token; 0 where the draft vocabulary lacks it."""
    return -log_q.gather(-1, goal.best.clamp(min=0)[..., None])[..., 0] * (goal.best >= 0)


DISTANCES: dict[str, Callable[[Goal, Tensor], Tensor]] = {
    "kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon, "tv": total_variation, "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda, "ce": cross_entropy,
}  # fmt: skip


def parse_mixture(text: str) -> dict[str, float]:
    """ "kl", or "kl=0.9,tv=0.1": distances and their weights. Raises ValueError for others."""
    mixture = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in DISTANCES:
            raise ValueError(f"loss {text!r} names {name!r}; expected some of {', '.join(DISTANCES)}, as in 'kl' or 'kl=0.9,tv=0.1'.")
        try:
            mixture[name] = float(weight or 1.0)
        except ValueError:
            raise ValueError(f"loss {text!r} weights {name} with {weight!r}; expected a number, as in 'kl=0.9,tv=0.1'.") from None
    return mixture
