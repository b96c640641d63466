"""The kernels of tree attention: programs share out the keys of a sequence, a second kernel joins what they found.

A row is a query of one head; the rows of a KV head are its T x group queries, token by token. Scores are in units of
log 2, as exp2 takes them.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operation import with_close_entries

# Programs that share the slots of a layer's arena, about one for each multiprocessor of an H100 or H200, which have
# 132, and from so many slots on two.
PROGRAMS, LONG = 128, 8192
MAX_SPLITS = 128
LEAST = 16  # of a side of tl.dot
JOINED = 4096  # values that a program of the second kernel holds at once
LOG2_E = math.log2(math.e)
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _tanh(x):
    """tanh, close to 0 by its series: 1 - exp(-2x) would lose there what a softcap then magnifies."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    return tl.where(y < 0.0625, x * near, tl.where(x < 0.0, -far, far))


@triton.jit
def _part(at, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr):
    """Loads the columns from FIRST on, up to BLOCK of them, of rows at `at` that are WIDTH wide; 0 where a row has
    ended."""
    column = FIRST + tl.arange(0, BLOCK)
    if FIRST + BLOCK <= WIDTH:
        x = tl.load(at[:, None] + column[None, :])
    else:
        x = tl.load(at[:, None] + column[None, :], mask=(column < WIDTH)[None, :], other=0.0)
    return x.to(tl.float32) if WIDEN else x


@triton.jit
def _store_part(at, x, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores what `_part` loads."""
    column = FIRST + tl.arange(0, BLOCK)
    tl.store(at[:, None] + column[None, :], x, mask=mask[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _seen(span, spans_column, capacity):
    """The spans of rows and what comes of them: the start that all share, begin and bits of each, the bits of any, and
    the slots from `low` up to `end`, the last of which some row sees, and outside of which none sees any."""
    start = tl.minimum(tl.max(tl.load(span), 0).to(tl.int32), capacity)
    begin = tl.load(span + spans_column).to(tl.int32)
    told = tl.minimum(63, capacity - start).to(tl.int64)  # bits that stand for slots, MOST_NEW at most
    bits = tl.load(span + 2 * spans_column) & ~(tl.full((), -1, tl.int64) << told)
    any_bits, new = tl.reduce(bits, 0, _either), tl.arange(0, 64)
    end = start + tl.max(tl.where((any_bits >> new.to(tl.int64)) & 1 != 0, new + 1, 0), 0)
    low = tl.minimum(tl.maximum(tl.min(begin, 0), 0), start)
    return start, begin, bits, any_bits, low, end


@triton.jit
def tree_attention_kernel(
    q,
    keys,
    values,
    spans,
    found,
    masses,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kc,
    stride_vb,
    stride_vh,
    stride_vc,
    spans_b,
    spans_t,
    spans_column,
    tokens,
    capacity,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program: M rows of a KV head over one share of the slots that any of them sees. D1 columns of a key and D2
    more, where its width is no power of two."""
    blocks = tl.cdiv(tokens * GROUP, M)
    head, b = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = tl.program_id(0) % blocks * M + tl.arange(0, M)
    is_row, row = row < tokens * GROUP, tl.minimum(row, tokens * GROUP - 1)  # the last one over again, not stored
    token = (row // GROUP).to(tl.int64)
    start, begin, bits, any_bits, low, end = _seen(spans + b * spans_b + token * spans_t, spans_column, capacity)
    steps = tl.cdiv(end - low, BLOCK)
    first = low + steps * split // tl.num_programs(2) * BLOCK
    last = tl.minimum(low + steps * (split + 1) // tl.num_programs(2) * BLOCK, end)

    at_q = q + b * stride_qb + (head * GROUP + row % GROUP).to(tl.int64) * stride_qh + token * stride_qt
    q1 = _part(at_q, 0, D, D1, WIDEN)
    if D2 > 0:
        q2 = _part(at_q, D1, D, D2, WIDEN)
    acc1 = tl.zeros((M, V1), tl.float32)
    if V2 > 0:
        acc2 = tl.zeros((M, V2), tl.float32)
    best, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    at_keys = keys + b * stride_kb + head.to(tl.int64) * stride_kh
    at_values = values + b * stride_vb + head.to(tl.int64) * stride_vh
    for at in range(first, last, BLOCK):
        slot = at + tl.arange(0, BLOCK)
        place = tl.minimum(tl.maximum(slot - start, 0), 63).to(tl.int64)
        is_seen = (slot < start) | ((any_bits >> place) & 1 != 0)
        # A slot that is not seen may hold NaN, which a weight of 0 lets through: the last, which is, in its place.
        place_read = tl.where(is_seen, slot, end - 1).to(tl.int64)
        at_k, at_v = at_keys + place_read * stride_kc, at_values + place_read * stride_vc
        scores = tl.dot(q1, tl.trans(_part(at_k, 0, D, D1, WIDEN)), input_precision="ieee")
        if D2 > 0:
            scores = tl.dot(q2, tl.trans(_part(at_k, D1, D, D2, WIDEN)), scores, input_precision="ieee")
        scores = softcap * _tanh(scores * scale) if HAS_SOFTCAP else scores * scale
        is_new = (bits[:, None] >> place[None, :]) & 1 != 0
        sees = tl.where((slot < start)[None, :], slot[None, :] >= begin[:, None], is_new)
        scores = tl.where(sees, scores, float("-inf"))
        high = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(high == float("-inf"), 0.0, high)
        shrink, weights = tl.exp2(best - safe), tl.exp2(scores - safe[:, None])
        best, total = high, total * shrink + tl.sum(weights, 1)
        v1 = _part(at_v, 0, V, V1, WIDEN)
        acc1 = tl.dot(weights.to(v1.dtype), v1, acc1 * shrink[:, None], input_precision="ieee")
        if V2 > 0:
            v2 = _part(at_v, V1, V, V2, WIDEN)
            acc2 = tl.dot(weights.to(v2.dtype), v2, acc2 * shrink[:, None], input_precision="ieee")
    heads = tl.num_programs(0) // blocks
    at_mass = ((b * heads + head) * tokens * GROUP + row) * tl.num_programs(2) + split
    whole, has_found = tl.where(total == 0.0, 1.0, total), is_row & (total != 0.0)
    tl.store(masses + at_mass, best + tl.log2(whole), mask=is_row)  # -inf of a row that sees nothing here
    _store_part(found + at_mass * V, acc1 / whole[:, None], has_found, 0, V, V1)
    if V2 > 0:
        _store_part(found + at_mass * V, acc2 / whole[:, None], has_found, V1, V, V2)


@triton.jit
def join_kernel(
    found,
    masses,
    sinks,
    out,
    splits,
    V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    ALL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: what all splits found for a query of one head, each by its share of the softmax."""
    head, token = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    heads, tokens = tl.num_programs(0), tl.num_programs(1)
    row = (b * heads + head // GROUP * GROUP) * tokens + token * GROUP + head % GROUP
    i, column = tl.arange(0, ALL), tl.arange(0, BLOCK)
    mass = tl.load(masses + row * splits + i, mask=i < splits, other=float("-inf"))
    high = tl.max(mass, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(high, sink)
    high = tl.where(high == float("-inf"), 0.0, high)
    total = tl.sum(tl.exp2(mass - high), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - high)
    acc = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, splits, CHUNK):
        split = at + tl.arange(0, CHUNK)
        share = tl.load(masses + row * splits + split, mask=split < splits, other=float("-inf"))
        has_found = share != float("-inf")  # what the others did not write may be NaN
        at_found = found + (row * splits + split)[:, None] * V + column[None, :]
        x = tl.load(at_found, mask=has_found[:, None] & (column < V)[None, :], other=0.0)
        acc += tl.sum(x * tl.exp2(share - high)[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    at_out = out + ((b * tokens + token) * heads + head) * V + column
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=column < V)


class Tile(NamedTuple):
    """Sizes by which the kernel cuts query rows and slots into programs, and the warps and stages of each."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int


def parts(width: int) -> tuple[int, int]:
    """Powers of two that together hold a width: one, and 0, unless two are fewer columns."""
    whole = max(triton.next_power_of_2(width), LEAST)
    rest = max(triton.next_power_of_2(width - whole // 2), LEAST)
    return (whole, 0) if whole // 2 + rest >= whole else (whole // 2, rest)


def tile(rows: int, width: int, is_widened: bool, is_amd: bool = False) -> Tile:
    """The tile for as many rows of a KV head and keys and values up to so wide; `is_widened`: multiplied in fp32, which
    takes registers. For widths up to 128 those that an H200 found the fastest; the others are estimates."""
    least = max(triton.next_power_of_2(rows), LEAST)
    if is_widened:
        return Tile(LEAST, 16, 4 if width <= 128 else 8, 1)
    if width > 256:
        return Tile(min(least, 32), 16, 8, 2)
    if width > 128 or is_amd:
        return Tile(min(least, 64), 32, 4 if least == LEAST else 8, 2)
    return {16: Tile(16, 32, 4, 2), 32: Tile(32, 64, 4, 3)}.get(least, Tile(64, 32, 4, 3))


def num_splits(capacity: int, programs: int, slots: int) -> int:
    """Returns the number of programs that share the slots of a sequence; `programs`: how many there are without
    sharing. It follows from the capacity. The length is known to the device alone, and a result would depend on it."""
    wanted = PROGRAMS * (1 if capacity < LONG else 2) // programs
    return max(min(wanted, triton.cdiv(capacity, slots), MAX_SPLITS), 1)


def join_constants(value_width: int, splits: int) -> dict[str, int]:
    """The sizes of the second kernel."""
    block = triton.next_power_of_2(value_width)
    return {"ALL": triton.next_power_of_2(splits), "CHUNK": max(JOINED // block, 1), "BLOCK": block}


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launches both kernels; see the operation."""
    spans = spans[:, 0]
    q, keys, values = (with_close_entries(x) for x in (q, keys, values))
    batch, heads, tokens, width = q.shape
    kv_heads, capacity, value_width = values.shape[1:]
    group = heads // kv_heads
    is_widened = q.dtype == torch.float32 or not q.dtype == keys.dtype == values.dtype
    cut = tile(tokens * group, max(width, value_width), is_widened, torch.version.hip is not None)
    programs = kv_heads * triton.cdiv(tokens * group, cut.rows)
    splits = num_splits(capacity, programs * batch, cut.slots)
    found = q.new_empty((batch, heads, tokens, splits, value_width), dtype=torch.float32)
    masses = q.new_empty((batch, heads, tokens, splits), dtype=torch.float32)
    strides = *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *spans.stride()
    factors = (scale / softcap, softcap * LOG2_E) if softcap > 0 else (scale * LOG2_E, 0.0)
    widths = width, *parts(width), value_width, *parts(value_width)
    tree_attention_kernel[(programs, batch, splits)](
        *(q, keys, values, spans, found, masses, *strides, tokens, capacity, *factors, group, *widths),
        HAS_SOFTCAP=softcap > 0,
        M=cut.rows,
        BLOCK=cut.slots,
        WIDEN=INTERPRETED or is_widened,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    out = q.new_empty((batch, tokens, heads, value_width))
    join_kernel[(heads, tokens, batch)](
        *(found, masses, masses if sinks is None else sinks.contiguous(), out, splits, value_width),
        HAS_SINKS=sinks is not None,
        GROUP=group,
        **join_constants(value_width, splits),
    )
    return out
