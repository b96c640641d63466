"""Which drafted tokens the target accepts. p is the target's distribution, q the draft's; K drafted tokens, V target vocabulary.

Positions are visited in order and only while drafts are accepted, so the logits processors see exactly the prefixes, each once, that
plain decoding would show them: processors that keep state of their own stay correct.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList


@dataclass
class Verdict:
    """`tokens`: the accepted drafts, then the target's own token unless a draft ended the text; `scores`: one processed row (1, V) each."""

    tokens: Tensor
    accepted_len: int
    scores: list[Tensor]


def accept(
    prefix: Tensor,
    drafted: Tensor,
    draft_logits: Tensor | None,
    logits: Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    eos_token_ids: Tensor | None = None,
) -> Verdict:
    """Prefix (1, L), drafted ids (1, K), target logits (1, K + 1, V) in fp32, overwritten -> the tokens to commit.

    `draft_logits` (1, K, V) are the logits each drafted id was sampled from, None for drafts chosen by argmax. The committed tokens
    are distributed exactly as the target alone would emit them (arXiv 2211.17192).
    """
    if not do_sample and not processors:
        return _accept_greedy(drafted, logits)
    sequence = torch.cat((prefix, drafted), dim=1)
    scores: list[Tensor] = []
    num_drafted = drafted.shape[1]
    for i in range(num_drafted + 1):
        context = sequence[:, : prefix.shape[1] + i]
        scores.append(processors(context, logits[:, i]))  # type: ignore[arg-type]
        candidate = drafted[:, i] if i < num_drafted else None
        q_logits = None if draft_logits is None or candidate is None else draft_logits[:, i]
        token = _sample(scores[-1], candidate, q_logits) if do_sample else scores[-1].argmax(-1)
        if candidate is None or token != candidate:
            return Verdict(torch.cat((drafted[:, :i], token[:, None]), dim=1), i, scores)
        if eos_token_ids is not None and torch.isin(token, eos_token_ids).any():
            return Verdict(drafted[:, : i + 1], i + 1, scores)  # the text ends with an accepted draft
    raise AssertionError("the position after the last draft always ends the round")


def _accept_greedy(drafted: Tensor, logits: Tensor) -> Verdict:
    """Without processors all positions are compared at once."""
    chosen = logits.argmax(-1)  # (1, K + 1)
    accepted_len = int((drafted == chosen[:, :-1]).long().cumprod(-1).sum())
    return Verdict(chosen[:, : accepted_len + 1], accepted_len, list(logits[:, : accepted_len + 1].unbind(1)))


def _sample(p_logits: Tensor, candidate: Tensor | None, q_logits: Tensor | None) -> Tensor:
    """One token (1,) distributed as p: the candidate with chance min(1, p/q), else a draw from the residual max(p - q, 0).

    An argmax draft (`q_logits` None) has q = 1 at the candidate, for which the same law reads: draw from p, keep the draft if equal.
    """
    p = p_logits.softmax(-1)
    if candidate is None or q_logits is None:
        return torch.multinomial(p, 1)[:, 0]
    q = q_logits.softmax(-1)
    x = candidate[:, None]
    if torch.rand((), device=p.device) * q.gather(1, x) < p.gather(1, x):
        return candidate
    residual = (p - q).clamp(min=0)
    # Where p and q agree to the last bit nothing is left to draw from; p itself is then the right distribution.
    return torch.multinomial(residual if residual.sum() > 0 else p, 1)[:, 0]
