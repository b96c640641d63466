"""The per-row distances against their closed forms."""

import pytest
import torch
from close import assert_close

from eagle31_hf.training.losses import acceptance, draft_log_probs, forward_kl

ROUNDING = 1e-6  # fp32 sums of 17 terms below 1
PRUNED = torch.tensor([16, 3, 0, 9, 4])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ids", [None, PRUNED], ids=["full_vocabulary", "pruned"])
def test_target_probabilities_are_renormalised_over_the_draft_vocabulary(ids):
    logits = draw(2, 3, 17)
    p = logits.softmax(-1)
    kept = p if ids is None else torch.stack([p[..., i] for i in ids.tolist()], dim=-1)
    log_p = draft_log_probs(logits, ids)
    assert_close("p", log_p.exp(), kept / kept.sum(-1, keepdim=True), ROUNDING)
    assert_close("of bf16 logits", draft_log_probs(logits.bfloat16(), ids), draft_log_probs(logits.bfloat16().float(), ids))


def test_kl_is_its_definition():
    q_logits, p_logits = draw(2, 3, 17, seed=1), draw(2, 3, 17)
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    kl = forward_kl(q_logits, draft_log_probs(p_logits, None))
    assert_close("kl", kl, (p * (p / q).log()).sum(-1).float(), ROUNDING * 10)
    assert (kl > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kl_is_zero_for_the_target_itself(dtype):
    logits = draw(2, 3, 17).to(dtype)
    kl = forward_kl(logits + 3, draft_log_probs(logits + 3, None))  # a common shift is no difference
    assert_close("kl", kl, torch.zeros(2, 3), ROUNDING)


@pytest.mark.parametrize("ids", [None, PRUNED], ids=["full_vocabulary", "pruned"])
def test_the_gradient_of_kl_is_q_minus_p(ids):
    log_p = draft_log_probs(draw(2, 3, 17), ids)
    q_logits = draw(2, 3, log_p.shape[-1], seed=1).requires_grad_()
    forward_kl(q_logits, log_p).sum().backward()
    assert_close("gradient", q_logits.grad, q_logits.detach().softmax(-1) - log_p.exp(), ROUNDING)


def test_acceptance_is_the_overlap():
    q_logits, p_logits = draw(2, 3, 17, seed=1), draw(2, 3, 17)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    overlap = acceptance(q_logits, draft_log_probs(p_logits, None))
    assert_close("overlap", overlap, torch.minimum(p, q).sum(-1), ROUNDING)
    assert_close("one minus half the distance", overlap, 1 - 0.5 * (p - q).abs().sum(-1), ROUNDING)
    assert_close("of the target itself", acceptance(p_logits, p.log()), torch.ones(2, 3), ROUNDING)
