"""The bookkeeping of drafting: likeliest tokens, levels of a tree, the best nodes of all.

B sequences, F nodes of a level, k children of a node, Vd draft vocabulary, N nodes of a tree, the root included. A
candidate is a child that was scored; those of a sequence are numbered level by level, from 0.
"""

import torch
from torch import Tensor

from .operation import operation

IMPOSSIBLE = float("-inf")


@operation()
def likeliest_tokens(logits: Tensor, k: int, temperature: float, target_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft logits (B, F, Vd) -> the log-probabilities of the k largest in softmax(logits / temperature), fp32 and
    descending, and their ids, both (B, F, k). Of equal logits the smaller column comes first. Where a node's logits
    give no distribution (NaN, all -inf or +inf among them) its log-probabilities are -inf, its columns the first k.

    `temperature` is above 0. `target_ids` (Vd,): the target id of each column; None: the columns are target ids. k is
    at most Vd."""
    logits = logits.float()
    log_probs = (logits / temperature).log_softmax(-1)
    gives_none = log_probs.isnan().any(-1, keepdim=True)
    order = logits.masked_fill(gives_none, IMPOSSIBLE).sort(dim=-1, descending=True, stable=True)
    columns = order.indices[..., :k].contiguous()
    values = log_probs.masked_fill(gives_none, IMPOSSIBLE).gather(-1, columns)
    return values, columns if target_ids is None else target_ids[columns]


@operation()
def next_level(
    log_probs: Tensor, scores: Tensor, bits: Tensor, width: int, num_run: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The children (B, F, k) of a level's nodes, fp32, of which the best `width` are run next, at most F k.

    `scores` (B, F): log-probability of each node's path, finite or -inf, as the children's are; `bits` (B, F) int64:
    which of the nodes run so far a node sees, itself included; `num_run`: how many have been run, with `width` at most
    64. Returns the scores of the children (B, F k), each its parent's and its own added; and of the best: their scores,
    their places among the children, and their bits, their parent's and bit `num_run` + i of the i-th, each (B, width).
    Of equal ones the first comes first."""
    totals = (log_probs + scores[..., None]).flatten(1)
    order = totals.sort(dim=1, descending=True, stable=True)
    best = order.indices[:, :width]
    own = 1 << torch.arange(num_run, num_run + width, device=bits.device)
    return (
        totals,
        order.values[:, :width].contiguous(),
        best.contiguous(),
        bits.gather(1, best // log_probs.shape[2]) | own,
    )


@operation()
def best_tree(scores: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree of the `count` best candidates, at most 63, of C.

    `scores` (B, C) fp32, finite or -inf, none above its parent's, or all alike of a chain; `parents` (B, C) int64: the
    candidate whose child it is, which comes before it, -1: the root. Of equal ones the first comes first, so a parent
    is among the best where its child is. Returns the candidates that are kept (B, count), ascending; the node each
    hangs on (B, count), the root being node 0 and the i-th that is kept node i + 1; and of all nodes (B, count + 1)
    their depths, and the bits of the nodes on the way to them, the root's bit 0 and their own included. All int64."""
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    node = kept.new_zeros(len(kept), scores.shape[1] + 1)  # of each candidate that is kept, from 1 on; of the root 0
    node.scatter_(1, kept + 1, torch.arange(1, count + 1, device=kept.device).expand_as(kept))
    hangs_on = node.gather(1, parents.gather(1, kept) + 1)
    depths, bits = [torch.zeros_like(kept[:, 0])], [torch.ones_like(kept[:, 0])]
    for i in range(count):
        above = hangs_on[:, i, None]
        depths.append(torch.stack(depths, 1).gather(1, above)[:, 0] + 1)
        bits.append(torch.stack(bits, 1).gather(1, above)[:, 0] | (1 << (i + 1)))
    return kept, hangs_on, torch.stack(depths, 1), torch.stack(bits, 1)
