"""The bookkeeping of a round without the host: likeliest tokens, levels of a tree, the best nodes of all; then the path
that the target takes through them, and its keys put together.

B sequences, F nodes of a level, k children of each, Vd draft vocabulary, N nodes of a tree, node 0 the root, K = N - 1
drafts, M the most nodes of a path; L layers, H heads, C slots. A candidate is a child that was scored; those of a
sequence are numbered level by level, from 0.
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
    best_bits = bits.gather(1, best // log_probs.shape[2]) | own
    return totals, order.values[:, :width].contiguous(), best.contiguous(), best_bits


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


@operation()
def accepted_path(
    ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    bits: Tensor,
    chosen: Tensor,
    spoiled: Tensor,
    going: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The path of the target's own choices from the root down, as far as drafts go along with them.

    `ids` (B, K): the drafts; `parents` (B, K), `depths`, `bits` (B, N): the tree, see `best_tree`; `chosen` (B, N):
    the token the target chooses after each node; `spoiled` (B, N) bool: nodes whose choice counts for nothing, the
    path ends before them; `going` (B, 1) int64: 0 for a sequence that has ended, which gets no token. Siblings
    differ, so there is one path. Returns its nodes and the tokens chosen at them (B, width), and how many they are
    (B, 1); a path is padded with nodes that stay where they are, node i at place i, its tokens with 0. `width`
    exceeds every depth."""
    count = chosen.shape[1]
    agrees = torch.ones_like(chosen, dtype=torch.bool)
    agrees[:, 1:] = ids == chosen.gather(1, parents)
    agrees &= ~spoiled
    node = torch.arange(count, device=ids.device)
    is_above = ((bits[..., None] >> node) & 1) == 1  # (B, N, N)
    is_on_path = ~(is_above & ~agrees[:, None]).any(-1)
    num_tokens = is_on_path.sum(1, keepdim=True) * going
    place = torch.arange(width, device=ids.device)
    path = torch.zeros(len(ids), width + 1, dtype=torch.long, device=ids.device)
    path.scatter_(1, torch.where(is_on_path, depths, width), torch.where(is_on_path, node, 0))
    is_new = place < num_tokens
    path = torch.where(is_new, path[:, :width], place)
    tokens = chosen.gather(1, path.clamp(max=count - 1)).masked_fill(~is_new, 0)
    return path, tokens, num_tokens


def move_path(stacks: list[Tensor], starts: Tensor, path: Tensor, counts: Tensor) -> None:
    """Copies, in each stack of buffers (L, B, H, C, D), the slots `starts[b] + path[b, i]` to `starts[b] + i` for i <
    `counts[b]`. `path` (B, M), `starts`, `counts` (B, 1): int64. Stacks share B alone."""
    place = torch.arange(path.shape[1], device=path.device)
    source = starts + torch.where(place < counts, path, place)
    goal = starts + place
    for stack in stacks:
        shape = len(stack), -1, stack.shape[2], -1, stack.shape[4]
        moved = stack.gather(3, source[None, :, None, :, None].expand(shape))
        stack.scatter_(3, goal[None, :, None, :, None].expand(shape), moved)
