"""Distances between the target's distribution p and the draft's q, and their gradients, in fp32; `forward_kl` and
`cross_entropy` stand in `kernels/distillation_loss.py`, which has a kernel for them.

N predictions, Vd draft vocabulary, V target vocabulary. p is a distribution over the *target's* vocabulary: its mass S
on the draft vocabulary, the coverage, may be below 1, and no q reaches the rest. With a distance comes `neg_grad`, its
negative gradient by the draft's logits z, q = softmax(z): where the derivative by q_v is g_v it is q_v (<q, g> - g_v).
Written out, it takes a few passes over (N, Vd) where autograd takes some thirty. Source of `tv`, `lk_alpha` and
`lk_lambda`: LK losses (arXiv 2602.23881).
"""

import math
from collections.abc import Callable

import torch

from ..kernels.distillation_loss import (
    LEAST,
    Distance,
    DraftDistribution,
    TargetDistribution,
    cross_entropy,
    dot,
    forward_kl,
    overlap,
    weighted_sum,
)

LOG_2 = math.log(2)
LEAST_ACCEPTED = 1e-20  # below it 1 / acceptance and the overlap's gradient are noise
LK_DECAY = 3.0  # how fast `lk_lambda` turns from KL to total variation as acceptance rises


def reverse_kl(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """KL(q || p / S)."""
    log_p = (target.p.clamp(min=LEAST) / target.coverage.clamp(min=LEAST)[:, None]).log()
    ratio = draft.log_q - log_p
    return dot(draft.q, ratio), draft.neg_grad(ratio)


def jensen_shannon(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """Jensen-Shannon divergence: the mean of the KL divergences of p, all of it, and of q from their mean."""
    log_mean = ((target.p + draft.q) / 2).clamp(min=LEAST).log()
    ratio = draft.log_q.clamp(min=-1e4) - log_mean
    of_p = dot(target.p, target.p.clamp(min=LEAST).log() - log_mean) + (1 - target.coverage).clamp(min=0) * LOG_2
    return (of_p + dot(draft.q, ratio)) / 2, draft.neg_grad(ratio / 2)


def total_variation(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """1 - overlap: the probability that rejection sampling refuses a token drawn from q."""
    return 1 - overlap(target, draft), draft.neg_grad(-(draft.q < target.p).float())


def lk_alpha(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """-log overlap."""
    accepted = overlap(target, draft).clamp(min=LEAST)
    return -accepted.log(), total_variation(target, draft)[1] / accepted[:, None].clamp(min=LEAST_ACCEPTED)


def lk_lambda(target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """KL where little is accepted, total variation where much is: KL has the weight exp(-3 overlap) at each prediction,
    through which no gradient flows."""
    kl, kl_neg_grad = forward_kl(target, draft)
    tv, tv_neg_grad = total_variation(target, draft)
    weight = torch.exp(-LK_DECAY * (1 - tv))
    return torch.lerp(tv, kl, weight), torch.lerp(tv_neg_grad, kl_neg_grad, weight[:, None])


DEFAULT_LOSS = "kl=0.9,ce=0.1"
DISTANCES: dict[str, Callable[[TargetDistribution, DraftDistribution], Distance]] = {
    "kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon, "tv": total_variation, "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda, "ce": cross_entropy,
}  # fmt: skip


def mixed(mixture: dict[str, float], target: TargetDistribution, draft: DraftDistribution) -> Distance:
    """Returns a weighted sum of distances, and its neg_grad."""
    return weighted_sum([(weight, DISTANCES[name](target, draft)) for name, weight in mixture.items()])


def parse_mixture(text: str) -> dict[str, float]:
    """Parses a loss as "kl" or "kl=0.9,ce=0.1" into distances and their weights. Raises ValueError for others."""
    mixture: dict[str, float] = {}
    for part in text.split(","):
        name, _, written = part.strip().partition("=")
        if name not in DISTANCES:
            raise ValueError(
                f"loss {text!r} names {name!r}; expected some of {', '.join(DISTANCES)}, as in 'kl' or 'kl=0.9,ce=0.1'."
            )
        if name in mixture:
            raise ValueError(f"loss {text!r} names {name} twice; expected each once, as in 'kl=0.9,ce=0.1'.")
        try:
            mixture[name] = float(written or 1)
        except ValueError:  # it is no number
            mixture[name] = math.nan
        if not 0 <= mixture[name] < math.inf:
            raise ValueError(
                f"loss {text!r} weights {name} with {written!r}; expected a number of 0 or more, as in 'kl=0.9,ce=0.1'."
            )
    return mixture
