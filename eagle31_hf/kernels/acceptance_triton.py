"""The kernel of acceptance: one program walks a sequence's tree in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operation import with_close_entries


@triton.jit
def accepted_path_kernel(
    ids,
    parents,
    depths,
    bits,
    chosen,
    spoiled,
    going,
    path,
    tokens,
    counts,
    stride_ids,
    stride_parents,
    stride_depths,
    stride_bits,
    stride_chosen,
    stride_spoiled,
    stride_going,
    num_nodes,
    width,
    N_BLOCK: tl.constexpr,
    M_BLOCK: tl.constexpr,
):
    """One program: a sequence. A node is on the path where all the nodes on the way to it agree; it and its token go to
    the place of its depth, what is left is padding."""
    b = tl.program_id(0).to(tl.int64)
    n, place = tl.arange(0, N_BLOCK), tl.arange(0, M_BLOCK)
    is_node, is_draft = n < num_nodes, (n > 0) & (n < num_nodes)
    parent = tl.load(parents + b * stride_parents + n - 1, mask=is_draft, other=0)
    draft = tl.load(ids + b * stride_ids + n - 1, mask=is_draft, other=0)
    wanted = tl.load(chosen + b * stride_chosen + parent, mask=is_draft, other=0)
    token = tl.load(chosen + b * stride_chosen + n, mask=is_node, other=0)
    depth = tl.load(depths + b * stride_depths + n, mask=is_node, other=0)
    way = tl.load(bits + b * stride_bits + n, mask=is_node, other=0)
    counts_for_nothing = tl.load(spoiled + b * stride_spoiled + n, mask=is_node, other=1).to(tl.int32) != 0
    agrees = (draft == wanted) & ~counts_for_nothing
    all_that_agree = tl.sum(agrees.to(tl.int64) << n.to(tl.int64), 0)
    is_on_path = is_node & ((way & ~all_that_agree) == 0)
    count = tl.sum(is_on_path.to(tl.int64), 0) * tl.load(going + b * stride_going)
    is_new = is_on_path & (depth < count)
    tl.store(path + b * width + depth, n.to(tl.int64), mask=is_new)
    tl.store(tokens + b * width + depth, token, mask=is_new)
    is_padding = (place >= count) & (place < width)
    tl.store(path + b * width + place, place.to(tl.int64), mask=is_padding)
    tl.store(tokens + b * width + place, tl.zeros((M_BLOCK,), tl.int64), mask=is_padding)
    tl.store(counts + b, count)


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
    """Launches the kernel; see the operation."""
    read = [with_close_entries(each) for each in (ids, parents, depths, bits, chosen, spoiled, going)]
    batch, num_nodes = chosen.shape
    path = torch.empty(batch, width, dtype=torch.long, device=ids.device)
    out = path, torch.empty_like(path), torch.empty(batch, 1, dtype=torch.long, device=ids.device)
    accepted_path_kernel[(batch,)](
        *read,
        *out,
        *(each.stride(0) for each in read),
        num_nodes,
        width,
        N_BLOCK=triton.next_power_of_2(num_nodes),
        M_BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out
