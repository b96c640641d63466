"""Acceptance and compaction without the host: the path that the target takes through a tree, and its keys put together.

B sequences, K drafts of each, N = K + 1 nodes, node 0 the root; M the most nodes of a path; C slots of a buffer.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .operation import operation, why_torch


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


@operation(mutates=("buffers",))
def move_path(buffers: list[Tensor], starts: Tensor, path: Tensor, counts: Tensor) -> None:
    """Copies, in each buffer (B, H, C, D), the slots `starts[b] + path[b, i]` to `starts[b] + i` for i < `counts[b]`.

    `path` (B, M) int64 ascends, and path[b, i] >= i: no slot is written before it is read. `starts`, `counts` (B, 1)
    int64. Buffers of one call share B and dtype; C, H and D may differ."""
    place = torch.arange(path.shape[1], device=path.device)
    source = starts + torch.where(place < counts, path, place)
    goal = starts + place
    for buffer in buffers:
        shape = -1, buffer.shape[1], -1, buffer.shape[3]
        moved = buffer.gather(2, source[:, None, :, None].expand(shape))
        buffer.scatter_(2, goal[:, None, :, None].expand(shape), moved)


def table_of(buffers: list[Tensor]) -> Any:
    """Makes the table of buffers that the kernel of `move_path` reads; returns None where that kernel does not run.
    Call it before a graph is captured, and keep the table as long as the graph."""
    if not buffers or why_torch("move_path", buffers[0].device) is not None:
        return None
    return import_module(f"{__name__}_triton").prepare(buffers)
