"""Which drafted tokens the target accepts. p is the target's distribution, q the draft's; K drafted tokens, V target vocabulary.

Positions are visited in order and only while drafts are accepted, so the logits processors see exactly the prefixes, each once, that
plain decoding would show them: processors that keep state of their own stay correct.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .tree import DraftTree


@dataclass
class Verdict:
    """`tokens`: the accepted drafts, then the target's own token unless a draft ended the text; `scores`: one processed row (1, V) each.

    `path`: the rows of the verifying forward that hold the root and the accepted drafts.
    """

    tokens: Tensor
    accepted_len: int
    scores: list[Tensor]
    path: list[int]


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
            return Verdict(torch.cat((drafted[:, :i], token[:, None]), dim=1), i, scores, list(range(i + 1)))
        if eos_token_ids is not None and torch.isin(token, eos_token_ids).any():
            return Verdict(drafted[:, : i + 1], i + 1, scores, list(range(i + 2)))  # the text ends with an accepted draft
    raise AssertionError("the position after the last draft always ends the round")


def _accept_greedy(drafted: Tensor, logits: Tensor) -> Verdict:
    """Without processors all positions are compared at once."""
    chosen = logits.argmax(-1)  # (1, K + 1)
    accepted_len = int((drafted == chosen[:, :-1]).long().cumprod(-1).sum())
    scores = list(logits[:, : accepted_len + 1].unbind(1))
    return Verdict(chosen[:, : accepted_len + 1], accepted_len, scores, list(range(accepted_len + 1)))


def accept_tree(
    prefix: Tensor,
    tree: DraftTree,
    logits: Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    eos_token_ids: Tensor | None = None,
) -> Verdict:
    """Prefix (1, L), a tree whose root is its last token, target logits (1, N, V) in fp32 -> the tokens to commit.

    At every node the target's own token is drawn; while it is a child, the walk descends. Nothing is ever rejected, so the tokens are
    the target's, whatever the tree: it only has to be a function of the prefix.
    """
    chosen = logits[0].argmax(-1).tolist() if not do_sample and not processors else None  # all nodes at once
    children = tree.children()
    ended_by = set() if eos_token_ids is None else set(eos_token_ids.tolist())
    tokens: list[int] = []
    path, scores = [0], list[Tensor]()
    while True:
        node = path[-1]
        if chosen is not None:
            scores.append(logits[:, node])
            token = chosen[node]
        else:
            sequence = torch.cat((prefix, prefix.new_tensor([tokens], dtype=prefix.dtype)), dim=1)
            scores.append(processors(sequence, logits[:, node]))  # type: ignore[arg-type]
            token = int(_sample(scores[-1], None, None) if do_sample else scores[-1].argmax(-1))
        tokens.append(token)
        if token not in children[node]:
            break
        path.append(children[node][token])
        if token in ended_by:
            break
    return Verdict(prefix.new_tensor([tokens]), len(path) - 1, scores, path)


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
