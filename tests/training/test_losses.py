"""Distances between p and q, and their negative gradients, against plain formulas over the whole target vocabulary and
their autograd gradients; p may have mass the draft vocabulary lacks."""

import math

import pytest
import torch
from close import assert_close
from torch.nn.functional import kl_div, log_softmax

from eagle31_hf.training.losses import (
    DEFAULT_LOSS,
    DISTANCES,
    DraftDistribution,
    TargetDistribution,
    mixed,
    overlap,
    parse_mixture,
)

N = 7
V = 23
VD = 9
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:VD]  # in no order
BOTH = pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["same_vocabulary", "pruned"])


def pair(draft_ids=DRAFT_IDS, spread: float = 2.0):
    """The target's logits (N, V) and the draft's (N, Vd)."""
    generator = torch.Generator().manual_seed(0)
    size = V if draft_ids is None else VD
    return spread * torch.randn(N, V, generator=generator), spread * torch.randn(N, size, generator=generator)


def on_target(q, draft_ids):
    """Returns q over all of V: (N, V)."""
    return q if draft_ids is None else torch.zeros(N, V).index_copy(1, draft_ids, q)


def plain_kl(p, q, s):
    inside = torch.where(q > 0, p / s[:, None], 1.0)
    return s * torch.where(q > 0, inside * (inside / q.clamp(min=1e-30)).log(), 0.0).sum(-1)


def plain_tv(p, q, s):
    return 1 - torch.minimum(p, q).sum(-1)


def plain_lk_lambda(p, q, s):
    weight = torch.exp(-3 * torch.minimum(p, q).sum(-1)).detach()
    return weight * plain_kl(p, q, s) + (1 - weight) * plain_tv(p, q, s)


EXPECTED = {  # p, q over all of V, S
    "kl": plain_kl,
    "reverse_kl": lambda p, q, s: torch.where(q > 0, q * (q.clamp(min=1e-30) / (p / s[:, None])).log(), 0.0).sum(-1),
    "jsd": lambda p, q, s: (
        sum(torch.where(x > 0, x * (x.clamp(min=1e-30) / ((p + q) / 2)).log(), 0.0).sum(-1) for x in (p, q)) / 2
    ),
    "tv": plain_tv,
    "lk_alpha": lambda p, q, s: -torch.minimum(p, q).sum(-1).log(),
    "lk_lambda": plain_lk_lambda,
    "ce": lambda p, q, s: (
        torch.where((best := p.argmax(-1, keepdim=True)) >= 0, -q.gather(1, best).clamp(min=1e-30).log(), 0.0)[:, 0]
        * (q.gather(1, best)[:, 0] > 0)
    ),
}


def test_every_distance_has_its_formula():
    assert EXPECTED.keys() == DISTANCES.keys()


@BOTH
@pytest.mark.parametrize("name", EXPECTED)
def test_distance_and_negative_gradient(name, draft_ids):
    target_logits, logits = pair(draft_ids)
    p = target_logits.softmax(-1)
    covered = p.sum(-1) if draft_ids is None else p[:, draft_ids].sum(-1)
    leaf = logits.clone().requires_grad_()
    expected = EXPECTED[name](p, on_target(leaf.softmax(-1), draft_ids), covered)
    expected.sum().backward()
    distance, neg_grad = DISTANCES[name](
        TargetDistribution.from_logits(target_logits, draft_ids), DraftDistribution(logits)
    )
    assert_close(name, distance, expected.detach(), 1e-5)
    assert_close(f"neg_grad of {name}", neg_grad, -leaf.grad, 1e-5)


def test_kl_of_one_vocabulary_is_torchs():
    target_logits, logits = pair(None)
    distance, _ = DISTANCES["kl"](TargetDistribution.from_logits(target_logits, None), DraftDistribution(logits))
    expected = kl_div(log_softmax(logits, -1), target_logits.softmax(-1), reduction="none").sum(-1)
    assert_close("kl", distance, expected, 1e-5)


@BOTH
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "lk_lambda"])
def test_least_where_q_is_the_renormalised_p(name, draft_ids):
    """Its gradient is zero there."""
    target_logits, _ = pair(draft_ids)
    best = target_logits if draft_ids is None else target_logits[:, draft_ids]
    distance, neg_grad = DISTANCES[name](
        TargetDistribution.from_logits(target_logits, draft_ids), DraftDistribution(best)
    )
    if name != "lk_lambda":
        assert_close("distance", distance, torch.zeros(N), 1e-6, scale=1.0)
        assert_close("neg_grad", neg_grad, torch.zeros_like(neg_grad), 1e-6, scale=1.0)
    else:  # total variation is as small anywhere between p and p / S
        assert bool((distance >= -1e-6).all())


def test_a_mixture_is_the_weighted_sum():
    target_logits, logits = pair()
    target, draft = TargetDistribution.from_logits(target_logits, DRAFT_IDS), DraftDistribution(logits)
    parts = {name: DISTANCES[name](target, draft) for name in ("kl", "tv", "jsd")}
    distance, neg_grad = mixed({"kl": 0.5, "tv": 0.25, "jsd": 2.0}, target, draft)
    for i, found in enumerate((distance, neg_grad)):
        assert_close("mixture", found, 0.5 * parts["kl"][i] + 0.25 * parts["tv"][i] + 2.0 * parts["jsd"][i], 1e-6)
    assert_close("half of one", mixed({"tv": 0.5}, target, draft)[1], 0.5 * parts["tv"][1], 1e-6)


def test_cross_entropy_leaves_out_what_the_vocabulary_lacks():
    logits = torch.full((2, V), -5.0)
    lacking = next(i for i in range(V) if i not in DRAFT_IDS.tolist())
    logits[0, DRAFT_IDS[3]], logits[1, lacking] = 5.0, 5.0
    draft = torch.randn(2, VD, generator=torch.Generator().manual_seed(1))
    target = TargetDistribution.from_logits(logits, DRAFT_IDS)
    assert target.best.tolist() == [3, -1]
    distance, neg_grad = DISTANCES["ce"](target, DraftDistribution(draft))
    assert_close("distance", distance, torch.stack([-log_softmax(draft[0], -1)[3], torch.tensor(0.0)]), 1e-6)
    assert not neg_grad[1].any()


def test_acceptance_is_of_the_whole_target_distribution():
    """A distribution renormalised to the draft vocabulary would promise more than is served."""
    target_logits, _ = pair()
    covered = target_logits.softmax(-1)[:, DRAFT_IDS].sum(-1)
    target = TargetDistribution.from_logits(target_logits, DRAFT_IDS)
    assert_close("coverage", target.coverage, covered, 1e-6)
    assert_close("acceptance", overlap(target, DraftDistribution(target_logits[:, DRAFT_IDS])), covered, 1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_finite_where_p_is_certain_and_q_is_not(name):
    """p is certain to the last bit and underflows elsewhere; q is certain of another token."""
    logits = torch.full((2, V), -1e4)
    logits[0, DRAFT_IDS[0]] = logits[1, DRAFT_IDS[1]] = 1e4
    draft = torch.full((2, VD), -1e4).index_fill(1, torch.tensor([0]), 1e4)
    distance, neg_grad = DISTANCES[name](TargetDistribution.from_logits(logits, DRAFT_IDS), DraftDistribution(draft))
    assert bool(distance.isfinite().all())
    assert bool(neg_grad.isfinite().all())


def test_finite_where_the_vocabulary_lacks_everything_p_says():
    logits = torch.full((1, V), -1e4)
    logits[0, next(i for i in range(V) if i not in DRAFT_IDS.tolist())] = 1e4
    target, draft = TargetDistribution.from_logits(logits, DRAFT_IDS), DraftDistribution(pair()[1][:1])
    for name, distance in DISTANCES.items():
        assert all(bool(part.isfinite().all()) for part in distance(target, draft)), name


def test_what_the_draft_says():
    _, logits = pair()
    draft = DraftDistribution(logits)
    assert_close("q", draft.q, logits.softmax(-1), 1e-6)
    assert_close("log q", draft.log_q, log_softmax(logits, -1), 1e-5)
    best = logits.argmax(-1)
    assert draft.is_likeliest(best).all()
    assert not draft.is_likeliest((best + 1) % VD).any()
    assert not draft.is_likeliest(torch.full((N,), -1)).any()


def test_in_fp32_whatever_comes_in():
    """bf16 would round p - q away."""
    target_logits, logits = (x.bfloat16() for x in pair())
    target, draft = TargetDistribution.from_logits(target_logits, DRAFT_IDS), DraftDistribution(logits)
    assert target.p.dtype == draft.q.dtype == DISTANCES["kl"](target, draft)[1].dtype == torch.float32
    assert_close("p", target.p, TargetDistribution.from_logits(target_logits.float(), DRAFT_IDS).p, 0.0)
    assert math.isclose(float(draft.q.sum()), N, rel_tol=1e-6)


def test_mixtures():
    assert parse_mixture("kl") == {"kl": 1.0}
    assert parse_mixture("kl=0.9, tv=0.1") == {"kl": 0.9, "tv": 0.1}
    assert parse_mixture(DEFAULT_LOSS) == {"kl": 0.9, "ce": 0.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kll", "names 'kll'; expected some of kl, "),
        ("", "names ''; expected some of kl, "),
        ("kl=x", "weights kl with 'x'; expected a number of 0 or more"),
        ("kl=1.5,ce=-0.5", "weights ce with '-0.5'; expected a number of 0 or more"),
        ("kl=nan", "weights kl with 'nan'; expected a number of 0 or more"),
        ("kl=inf", "weights kl with 'inf'; expected a number of 0 or more"),
        ("kl=0.9,kl=0.1", "names kl twice"),
    ],
)
def test_no_mixture(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mixture(text)
