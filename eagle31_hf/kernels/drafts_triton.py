"""The kernels of drafting and acceptance. A program that ranks scores counts those that go before; one that takes the
k best takes the largest key k times. Nothing that a program stores is read by it again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operation import with_close_entries

# Columns of a slice, a program of `likeliest_tokens`, and its warps: so many that a row makes some 30 slices.
SLICE, SLICE_WARPS = 1024, 4
LARGE_VOCAB = 65536
LARGE_SLICE, LARGE_SLICE_WARPS = 4096, 8
JOIN_WARPS = 4
RANKED, AGAINST = 128, 16  # children that a program of `next_level` ranks, and those that it looks at together
LEVEL_WARPS = 4
TREE_WARPS = 8

LOWEST_32 = tl.constexpr(-(2**31))  # below the order of -inf
LOWEST_64 = tl.constexpr(-(2**63))


@triton.jit
def _order(x):
    """Integers that are ordered as the fp32 are, -0 being 0. NaN has no place among them."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _of_order(order):
    """The fp32 of such integers."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _largest(keys, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """The K largest of keys that all differ, descending, LOWEST_64 where there are fewer."""
    place = tl.arange(0, K_BLOCK)
    largest = tl.full((K_BLOCK,), LOWEST_64, tl.int64)
    for i in range(K):
        key = tl.max(keys, 0)
        largest = tl.where(place == i, key, largest)
        keys = tl.where(keys == key, LOWEST_64, keys)
    return largest


@triton.jit
def likeliest_in_slice_kernel(
    logits,
    keys,
    sums,
    temperature,
    num_nodes,
    num_columns,
    stride_b,
    stride_f,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a slice of a node's columns. Its K largest logits as keys, the order of the logit above the column
    counted backwards, so that the smaller of two equal columns has the larger key; its largest logit over the
    temperature, and the sum of exponentials below it, NaN where a logit is NaN or +inf, whose keys say nothing. Columns
    behind the last are -inf with keys below all others."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += row // num_nodes * stride_b + row % num_nodes * stride_f
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    y = tl.div_rn(x, temperature)
    high = tl.max(y, 0)
    total = tl.sum(tl.exp(y - tl.where(high == float("-inf"), 0.0, high)), 0)
    at = row * tl.num_programs(0) + part
    tl.store(sums + at * 2, high)
    tl.store(sums + at * 2 + 1, total)
    key = (_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    tl.store(keys + at * K + i, _largest(key, K, K_BLOCK), mask=i < K)


@triton.jit
def likeliest_of_slices_kernel(
    keys,
    sums,
    target_ids,
    values,
    ids,
    temperature,
    num_parts,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """One program: what the slices of a node found, joined."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    at = sums + (row * num_parts + part) * 2
    highs = tl.load(at, mask=part < num_parts, other=float("-inf"))
    totals = tl.load(at + 1, mask=part < num_parts, other=0.0)
    high = tl.max(highs, 0)
    total = tl.sum(totals * tl.exp(highs - tl.where(high == float("-inf"), 0.0, high)), 0)
    gives = total > 0.0  # NaN is not
    j = tl.arange(0, KEYS_BLOCK)
    found = tl.load(keys + row * num_parts * K + j, mask=j < num_parts * K, other=LOWEST_64)
    best = _largest(found, K, K_BLOCK)
    i = tl.arange(0, K_BLOCK)
    column = tl.where(gives, 0x7FFFFFFF - (best & 0x7FFFFFFF), i)
    value = tl.div_rn(_of_order((best >> 32).to(tl.int32)), temperature) - high - tl.log(total)
    tl.store(values + row * K + i, tl.where(gives, value, float("-inf")), mask=i < K)
    if HAS_IDS:
        column = tl.load(target_ids + column, mask=i < K, other=0)
    tl.store(ids + row * K + i, column.to(tl.int64), mask=i < K)


@triton.jit
def next_level_kernel(
    log_probs,
    scores,
    bits,
    totals,
    best_scores,
    best,
    best_bits,
    num_run,
    num_children,
    width,
    K: tl.constexpr,
    RANKED: tl.constexpr,
    AGAINST: tl.constexpr,
):
    """One program: a block of a sequence's children. Each goes to the place that the number of children before it says,
    the better ones and the equal ones that come first."""
    b = tl.program_id(1).to(tl.int64)
    log_probs += b * num_children
    scores += b * (num_children // K)
    bits += b * (num_children // K)
    j = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    inside = j < num_children
    mine = tl.load(log_probs + j, mask=inside, other=0.0) + tl.load(scores + j // K, mask=inside, other=0.0)
    before = tl.zeros((AGAINST, RANKED), tl.int32)
    for first in range(0, num_children, AGAINST):
        i = first + tl.arange(0, AGAINST)
        is_one = i < num_children
        theirs = tl.load(log_probs + i, mask=is_one, other=float("-inf"))
        theirs = (theirs + tl.load(scores + i // K, mask=is_one, other=0.0))[:, None]
        comes_first = i[:, None] < j[None, :]
        before += ((theirs > mine[None, :]) | ((theirs == mine[None, :]) & comes_first)).to(tl.int32)
    rank = tl.sum(before, 0)
    tl.store(totals + b * num_children + j, mine, mask=inside)
    is_best = inside & (rank < width)
    at = b * width + rank
    tl.store(best_scores + at, mine, mask=is_best)
    tl.store(best + at, j.to(tl.int64), mask=is_best)
    seen = tl.load(bits + j // K, mask=is_best, other=0)
    own = tl.full((RANKED,), 1, tl.int64) << (num_run + rank).to(tl.int64)
    tl.store(best_bits + at, seen | own, mask=is_best)


@triton.jit
def _are_best(order, count):
    """Returns which of the integers `order` are the `count` largest, of equal ones the first. Finds the least of these
    bit by bit: it is the greatest integer that `count` of them reach."""
    reached = tl.sum((order >= 0).to(tl.int32), 0) >= count
    least = tl.where(reached, 0, LOWEST_32)
    for i in range(31):
        tried = least + (1 << (30 - i))
        least = tl.where(tl.sum((order >= tried).to(tl.int32), 0) >= count, tried, least)
    is_above, is_least = order > least, order == least
    num_left = count - tl.sum(is_above.to(tl.int32), 0)
    return is_above | (is_least & (tl.cumsum(is_least.to(tl.int32), 0) <= num_left))


@triton.jit
def _taken(values, index, n):
    """values[index], both as long as n, which counts from 0: without memory, in which threads would race."""
    return tl.sum(tl.where(index[:, None] == n[None, :], values[None, :], 0), 1)


@triton.jit
def best_tree_kernel(
    scores,
    parents,
    kept,
    hangs_on,
    depths,
    bits,
    num_candidates,
    count,
    BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program: a sequence. Node n, from 1 on, is the n-th candidate that is kept. Depths and bits are summed up on
    the way to the root in steps of 1, 2, 4 ... nodes; the root leads to itself. 2**STEPS is N_BLOCK."""
    b = tl.program_id(0).to(tl.int64)
    j, n = tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    inside = j < num_candidates
    score = tl.load(scores + b * num_candidates + j, mask=inside, other=0.0)
    is_kept = _are_best(tl.where(inside, _order(score), LOWEST_32), count)
    node = tl.where(is_kept, tl.cumsum(is_kept.to(tl.int32), 0), 0)
    candidate = tl.sum(tl.where(node[None, :] == n[:, None], j[None, :], 0), 1)
    is_node = (n > 0) & (n <= count)
    parent = tl.load(parents + b * num_candidates + candidate, mask=is_node, other=-1).to(tl.int32)
    # A parent is the node that it is the how manieth of those that are kept.
    above = tl.sum((is_node[None, :] & (candidate[None, :] <= parent[:, None])).to(tl.int32), 1)
    jump, depth = above, is_node.to(tl.int32)
    seen = tl.full((N_BLOCK,), 1, tl.int64) << n.to(tl.int64)
    for _ in tl.static_range(STEPS):
        seen |= _taken(seen, jump, n)
        depth += _taken(depth, jump, n)
        jump = _taken(jump, jump, n)
    tl.store(kept + b * count + n - 1, candidate.to(tl.int64), mask=is_node)
    tl.store(hangs_on + b * count + n - 1, above.to(tl.int64), mask=is_node)
    tl.store(depths + b * (count + 1) + n, depth.to(tl.int64), mask=n <= count)
    tl.store(bits + b * (count + 1) + n, seen, mask=n <= count)


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


def slice_of(num_columns: int) -> tuple[int, int]:
    """Returns the columns of one slice of the vocabulary, and the warps of its program."""
    if num_columns > LARGE_VOCAB:
        return LARGE_SLICE, LARGE_SLICE_WARPS
    return SLICE, SLICE_WARPS


def join_blocks(num_parts: int, k: int) -> dict[str, int]:
    """The constants of `likeliest_of_slices_kernel` for so many slices."""
    return {
        "K": k,
        "K_BLOCK": triton.next_power_of_2(k),
        "PARTS_BLOCK": triton.next_power_of_2(num_parts),
        "KEYS_BLOCK": triton.next_power_of_2(num_parts * k),
    }


def tree_blocks(num_candidates: int, count: int) -> dict[str, int]:
    """The constants of `best_tree_kernel` for such a tree."""
    nodes = triton.next_power_of_2(count + 1)
    return {"BLOCK": triton.next_power_of_2(num_candidates), "N_BLOCK": nodes, "STEPS": nodes.bit_length() - 1}


def likeliest_tokens(logits: Tensor, k: int, temperature: float, target_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launches the kernels; see the operation."""
    logits = with_close_entries(logits)
    batch, num_nodes, num_columns = logits.shape
    block, warps = slice_of(num_columns)
    rows, num_parts = batch * num_nodes, triton.cdiv(num_columns, block)
    values = torch.empty(batch, num_nodes, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(values, dtype=torch.long)
    keys = torch.empty(rows, num_parts, k, dtype=torch.long, device=logits.device)
    sums = torch.empty(rows, num_parts, 2, dtype=torch.float32, device=logits.device)
    blocks = join_blocks(num_parts, k)
    temperature = float(temperature)  # an integer would be taken for one
    sizes = num_nodes, num_columns, logits.stride(0), logits.stride(1)
    likeliest_in_slice_kernel[(num_parts, rows)](
        logits, keys, sums, temperature, *sizes, K=k, K_BLOCK=blocks["K_BLOCK"], BLOCK=block, num_warps=warps
    )
    names = ids if target_ids is None else target_ids.contiguous()  # not read where there are none
    has_ids = target_ids is not None
    likeliest_of_slices_kernel[(rows,)](
        keys, sums, names, values, ids, temperature, num_parts, HAS_IDS=has_ids, **blocks, num_warps=JOIN_WARPS
    )
    return values, ids


def next_level(
    log_probs: Tensor, scores: Tensor, bits: Tensor, width: int, num_run: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel; see the operation."""
    log_probs, scores, bits = (each.contiguous() for each in (log_probs, scores, bits))
    batch, num_nodes, k = log_probs.shape
    num_children = num_nodes * k
    totals = torch.empty(batch, num_children, dtype=torch.float32, device=scores.device)
    best_scores = torch.empty(batch, width, dtype=torch.float32, device=scores.device)
    best = torch.empty(batch, width, dtype=torch.long, device=scores.device)
    out = totals, best_scores, best, torch.empty_like(best)
    grid = triton.cdiv(num_children, RANKED), batch
    blocks = {"K": k, "RANKED": RANKED, "AGAINST": AGAINST}
    next_level_kernel[grid](
        log_probs, scores, bits, *out, num_run, num_children, width, **blocks, num_warps=LEVEL_WARPS
    )
    return out


def best_tree(scores: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel; see the operation."""
    scores, parents = scores.contiguous(), parents.contiguous()
    batch, num_candidates = scores.shape
    kept = torch.empty(batch, count, dtype=torch.long, device=scores.device)
    depths = torch.empty(batch, count + 1, dtype=torch.long, device=scores.device)
    out = kept, torch.empty_like(kept), depths, torch.empty_like(depths)
    best_tree_kernel[(batch,)](
        scores, parents, *out, num_candidates, count, **tree_blocks(num_candidates, count), num_warps=TREE_WARPS
    )
    return out


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
    sizes = *(each.stride(0) for each in read), num_nodes, width
    blocks = {"N_BLOCK": triton.next_power_of_2(num_nodes), "M_BLOCK": triton.next_power_of_2(width)}
    accepted_path_kernel[(batch,)](*read, *out, *sizes, **blocks, num_warps=1)
    return out
