"""Distances between p and q against plain formulas over the whole target vocabulary; p may have mass the draft vocabulary lacks."""

import math

import pytest
import torch
from close import assert_close
from torch.nn.functional import kl_div, log_softmax

from eagle31_hf.training.losses import DISTANCES, Goal, overlap, parse_mixture

N, V, VD = 7, 23, 9
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:VD]  # in no order


def pair(draft_ids=DRAFT_IDS, spread: float = 2.0):
    """A goal, its p over all of V (N, V), and log q."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(N, V, generator=generator)
    size = V if draft_ids is None else VD
    log_q = log_softmax(spread * torch.randn(N, size, generator=generator), dim=-1)
    return Goal.of(logits, draft_ids), logits.softmax(-1), log_q


def on_target(log_q, draft_ids):
    """q over all of V (N, V)."""
    if draft_ids is None:
        return log_q.exp()
    return torch.zeros(N, V).index_copy(1, draft_ids, log_q.exp())


EXPECTED = {  # p, q over all of V, S
    "kl": lambda p, q, s: s * torch.where(q > 0, p / s[:, None] * (p / s[:, None] / q.clamp(min=1e-30)).log(), 0.0).sum(-1),
    "reverse_kl": lambda p, q, s: torch.where(q > 0, q * (q.clamp(min=1e-30) / (p / s[:, None])).log(), 0.0).sum(-1),
    "jsd": lambda p, q, s: sum(
        torch.where(x > 0, x * (x.clamp(min=1e-30) / ((p + q) / 2)).log(), 0.0).sum(-1) for x in (p, q)
    ) / 2,
    "tv": lambda p, q, s: (p - q).abs().sum(-1) / 2,
    "lk_alpha": lambda p, q, s: -torch.minimum(p, q).sum(-1).log(),
}  # fmt: skip


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["same_vocabulary", "pruned"])
@pytest.mark.parametrize("name", EXPECTED)
def test_distance(name, draft_ids):
    goal, p, log_q = pair(draft_ids)
    covered = p.sum(-1) if draft_ids is None else p[:, draft_ids].sum(-1)
    assert_close(name, DISTANCES[name](goal, log_q), EXPECTED[name](p, on_target(log_q, draft_ids), covered), 1e-5)


def test_kl_of_one_vocabulary_is_torchs():
    goal, p, log_q = pair(None)
    assert_close("kl", DISTANCES["kl"](goal, log_q), kl_div(log_q, p, reduction="none").sum(-1), 1e-5)


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["same_vocabulary", "pruned"])
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "lk_lambda"])
def test_least_where_q_is_the_renormalised_p(name, draft_ids):
    """And the gradient with respect to the draft's logits is then nothing."""
    goal, _, _ = pair(draft_ids)
    logits = goal.log_p.clone().requires_grad_()
    distance = DISTANCES[name](goal, log_softmax(logits, dim=-1))
    if name != "lk_lambda":
        assert_close("distance", distance, torch.zeros(N), 1e-6)
        distance.sum().backward()
        assert_close("gradient", logits.grad, torch.zeros_like(logits), 1e-6)
    else:  # total variation is as small anywhere between p and p / S
        assert bool((distance >= -1e-6).all())


def test_lk_lambda_goes_from_kl_to_total_variation():
    goal, _, log_q = pair()
    accepted = overlap(goal, log_q)
    weight = torch.exp(-3 * accepted)
    expected = weight * DISTANCES["kl"](goal, log_q) + (1 - weight) * DISTANCES["tv"](goal, log_q)
    assert_close("lk_lambda", DISTANCES["lk_lambda"](goal, log_q), expected, 1e-6)


def test_the_weight_of_lk_lambda_is_not_pulled_at():
    goal, _, log_q = pair()
    log_q.requires_grad_()
    (mixed,) = torch.autograd.grad(DISTANCES["lk_lambda"](goal, log_q).sum(), log_q)
    weight = torch.exp(-3 * overlap(goal, log_q).detach())
    parts = (weight * DISTANCES["kl"](goal, log_q) + (1 - weight) * DISTANCES["tv"](goal, log_q)).sum()
    (expected,) = torch.autograd.grad(parts, log_q)
    assert_close("gradient", mixed, expected, 1e-6)


def test_cross_entropy_leaves_out_what_the_vocabulary_lacks():
    logits = torch.full((2, V), -5.0)
    lacking = next(i for i in range(V) if i not in DRAFT_IDS.tolist())
    logits[0, DRAFT_IDS[3]], logits[1, lacking] = 5.0, 5.0
    goal, log_q = Goal.of(logits, DRAFT_IDS), log_softmax(torch.randn(2, VD, generator=torch.Generator().manual_seed(1)), dim=-1)
    assert goal.best.tolist() == [3, -1]
    assert DISTANCES["ce"](goal, log_q).tolist() == [-float(log_q[0, 3]), 0.0]


def test_acceptance_is_of_the_whole_target_distribution():
    """Renormalised to the draft vocabulary it would promise more than is served."""
    goal, p, _ = pair()
    covered = p[:, DRAFT_IDS].sum(-1)
    assert_close("coverage", goal.log_coverage.exp(), covered, 1e-6)
    best_q = goal.log_p - goal.log_coverage[:, None]
    assert_close("acceptance", overlap(goal, best_q), covered, 1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_finite_where_p_is_certain_and_q_is_not(name):
    """Certain to the last bit: p underflows elsewhere; and q is certain of another token."""
    logits = torch.full((2, V), -1e4)
    logits[0, DRAFT_IDS[0]] = logits[1, DRAFT_IDS[1]] = 1e4
    draft = torch.full((2, VD), -1e4).index_fill(1, torch.tensor([0]), 1e4).requires_grad_()
    distance = DISTANCES[name](Goal.of(logits, DRAFT_IDS), log_softmax(draft, dim=-1))
    assert bool(distance.isfinite().all())
    distance.sum().backward()
    assert bool(draft.grad.isfinite().all())


def test_in_fp32_whatever_comes_in():
    """bf16 would round p - q away."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator).bfloat16()
    assert Goal.of(logits, DRAFT_IDS).log_p.dtype == torch.float32
    assert_close("log p", Goal.of(logits, DRAFT_IDS).log_p, Goal.of(logits.float(), DRAFT_IDS).log_p, 0.0)


def test_mixtures():
    assert parse_mixture("kl") == {"kl": 1.0}
    assert parse_mixture("kl=0.9, tv=0.1") == {"kl": 0.9, "tv": 0.1}
    with pytest.raises(ValueError, match="'kll'; expected some of kl, "):
        parse_mixture("kll")
    with pytest.raises(ValueError, match="weights kl with 'x'"):
        parse_mixture("kl=x")


def test_log_probabilities_sum_to_the_coverage():
    goal, p, _ = pair()
    assert math.isclose(float(goal.log_p.exp().sum()), float(p[:, DRAFT_IDS].sum()), rel_tol=1e-5)
