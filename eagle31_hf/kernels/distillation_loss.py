"""The distillation loss: how far the draft's distribution is from the target's, and how unlikely it makes the target's
likeliest token, with its gradient and the overlap of both.

N predictions, Vd draft vocabulary, V target vocabulary. p is a distribution over the *target's* vocabulary: its mass S
on the draft vocabulary, the coverage, may be below 1, and no q = softmax(z) reaches the rest.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .operation import operation

LEAST = torch.finfo(torch.float32).tiny
Distance = tuple[Tensor, Tensor]  # of every prediction (N,), and its neg_grad (N, Vd)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the inner products (N,) of a and b, both (N, Vd)."""
    return (a * b).sum(-1)


@dataclass
class TargetDistribution:
    """The target's distributions at N predictions: `p` (N, Vd), its probabilities of draft ids; `coverage` S (N,),
    their sum; `best` (N,), the draft id of its likeliest token, -1 where the draft vocabulary lacks it; `negentropy`
    (N,): sum_v p_v log(p_v / S)."""

    p: Tensor
    coverage: Tensor
    best: Tensor
    negentropy: Tensor

    @classmethod
    def from_logits(cls, logits: Tensor, draft_ids: Tensor | None) -> "TargetDistribution":
        """Builds them from the target's logits (N, V). `draft_ids` (Vd,): the target id of every draft id; None where
        the vocabularies are one."""
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

    def __getitem__(self, index: Any) -> "TargetDistribution":
        return TargetDistribution(self.p[index], self.coverage[index], self.best[index], self.negentropy[index])


class DraftDistribution:
    """The draft's distributions at N predictions: their logits z (N, Vd); `q` (N, Vd); `total` (N,), log sum_v exp z_v;
    `highest` (N,), the largest z."""

    def __init__(self, logits: Tensor):
        self.logits = logits.detach().float()
        self.q = self.logits.softmax(-1)
        self.highest = self.logits.amax(-1)
        self.total = self.highest - self.q.amax(-1).log()

    @cached_property
    def log_q(self) -> Tensor:
        return self.logits - self.total[:, None]

    def neg_grad(self, by_q: Tensor) -> Tensor:
        """Returns the negative gradient by the logits (N, Vd) of what has the derivatives `by_q` (N, Vd) by q."""
        return self.q * (dot(self.q, by_q)[:, None] - by_q)

    def is_likeliest(self, ids: Tensor) -> Tensor:
        """Returns whether no token is likelier than `ids` (N,); False for -1. Without an argmax, which is slow on a
        CPU."""
        return (self.logits.gather(1, ids.clamp(min=0)[:, None])[:, 0] >= self.highest) & (ids >= 0)


def overlap(target: TargetDistribution, draft: DraftDistribution) -> Tensor:
    """Returns sum_v min(p_v, q_v) (N,), the probability that rejection sampling keeps a token drawn from q."""
    return torch.minimum(target.p, draft.q).sum(-1)


def forward_kl(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """Returns S KL(p / S || q) and its neg_grad. What the draft vocabulary lacks cannot be learnt and has no part in
    it; neg_grad is p - S q."""
    distance = target.negentropy - dot(target.p, draft.logits) + target.coverage * draft.total
    return distance, torch.addcmul(target.p, draft.q, target.coverage[:, None], value=-1)


def cross_entropy(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """Returns -log q of the target's likeliest token, 0 where the draft vocabulary lacks it, and its neg_grad: 1 - q at
    that token, -q elsewhere."""
    known, column = target.best >= 0, target.best.clamp(min=0)[:, None]
    distance = torch.where(known, draft.total - draft.logits.gather(1, column)[:, 0], 0.0)
    ones = known.float()[:, None]
    return distance, (draft.q * -ones).scatter_add_(1, column, ones)


def weighted_sum(parts: list[tuple[float, Distance]]) -> Distance:
    """Returns the sum of weight times distance and of weight times neg_grad, which are written over."""
    distance = torch.stack([weight * distance for weight, (distance, _) in parts]).sum(0)
    neg_grads = [neg_grad.mul_(weight) for weight, (_, neg_grad) in parts]
    return distance, sum(neg_grads[1:], neg_grads[0])


@operation()
def distillation_loss(
    logits: Tensor,
    p: Tensor,
    coverage: Tensor,
    negentropy: Tensor,
    best: Tensor,
    which: Tensor,
    weights: Tensor,
    hard: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the distance (1 - hard) `forward_kl` + hard `cross_entropy` of predictions, and its gradient: weight
    ((1 - hard) (S q - p) + hard (q - 1 at the target's likeliest token)); where the draft vocabulary lacks that token,
    the second term is 0.

    `logits` z (N, Vd), in any dtype. M target distributions: `p` (M, Vd), its coverage S, negentropy and best, as in
    `TargetDistribution`; `which` (N,): the one each prediction is compared with. `weights` (N,): of their distances.
    `hard`, 0 to 1: the cross-entropy's share. Returns distance (N,), overlap (N,), whether no draft is likelier than
    `best` (N,), and the gradient of weight times distance by the logits (N, Vd), in their dtype.
    """
    target, draft = TargetDistribution(p, coverage, best, negentropy)[which], DraftDistribution(logits)
    terms = (1 - hard, forward_kl), (hard, cross_entropy)
    distance, neg_grad = weighted_sum([(share, term(target, draft)) for share, term in terms if share])
    by_logits = neg_grad.mul_(-weights[:, None]).to(logits.dtype)
    return distance, overlap(target, draft), draft.is_likeliest(target.best), by_logits
