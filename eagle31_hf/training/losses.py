"""Distances between the draft distribution q and the target distribution p, per row, in fp32."""

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax


def draft_log_probs(target_logits: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Target logits (..., V) -> log p over the draft vocabulary (..., Vd), renormalised; `draft_ids` (Vd,) or None for all of V."""
    logits = target_logits.float() if draft_ids is None else target_logits[..., draft_ids].float()
    return log_softmax(logits, dim=-1)


def forward_kl(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v): (..., Vd), (..., Vd) -> (...)."""
    log_q = log_softmax(draft_logits.float(), dim=-1)
    return kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def acceptance(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    """Chance that rejection sampling keeps a token drawn from q: sum_v min(p_v, q_v), (..., Vd), (..., Vd) -> (...)."""
    return draft_logits.float().softmax(-1).minimum(log_p.exp()).sum(-1)
