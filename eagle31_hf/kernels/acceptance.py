"""Acceptance and compaction without the host: the path that the target takes through a tree, and its keys put together.

B sequences, K drafts of each, N = K + 1 nodes, node 0 the root; M the most nodes of a path; L layers, H heads, C slots.
"""

import torch
from torch import Tensor

from .operation import operation


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
