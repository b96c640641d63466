"""The kernels of acceptance. One program walks a sequence's tree in registers; what of the cache is moved, is moved by
one launch for all buffers, whose addresses lie in a table on the device."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # words of a row, a program of `move_path`
ROWS = 8  # that it holds at once
MAX_TABLES = 256
FIELDS = tl.constexpr(6)  # of a buffer in a table


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


@triton.jit
def move_path_kernel(
    table,
    starts,
    path,
    counts,
    stride_starts,
    stride_path,
    stride_counts,
    heads,
    WORD: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: a block of columns of a head of a sequence in a buffer, its rows moved in ascending order.

    A row's slot may be the goal of a later row: it must be read before that is written. Within ROWS rows all are read,
    then all are written, with a barrier between them, since a row that is written by one thread may be read by another.
    Later rows are read from slots that earlier ones are not moved to, path[b, i] being i or more."""
    entry = table + tl.program_id(1) * FIELDS
    head, block = tl.program_id(0) % heads, tl.program_id(0) // heads
    b = tl.program_id(2).to(tl.int64)
    buffer = tl.load(entry).to(tl.pointer_type(WORD))
    buffer += b * tl.load(entry + 1) + head * tl.load(entry + 2)
    stride_slot = tl.load(entry + 3)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < tl.where(head < tl.load(entry + 4), tl.load(entry + 5), 0)
    start = tl.load(starts + b * stride_starts)
    count = tl.load(counts + b * stride_counts).to(tl.int32)
    for first in range(0, count, ROWS):
        i = first + tl.arange(0, ROWS)
        node = tl.load(path + b * stride_path + i, mask=i < count, other=0)
        moves = is_column[None, :] & ((i < count) & (node != i))[:, None]
        source = buffer + (start + node)[:, None] * stride_slot + column[None, :]
        rows = tl.load(source, mask=moves)
        tl.debug_barrier()
        tl.store(buffer + (start + i)[:, None] * stride_slot + column[None, :], rows, mask=moves)


@dataclass(frozen=True)
class Table:
    """Buffers as `move_path_kernel` reads them. `entries` (len, FIELDS) int64, on their device: address, strides of a
    sequence, a head and a slot in words, heads, words of a row. `word`: the bytes of a word, which divide all of it;
    `heads` and `columns`: the most of them."""

    entries: Tensor
    word: int
    heads: int
    columns: int


# By addresses, shapes and strides, all that a table is made of: one that is found is right.
_tables = dict[tuple[object, ...], Table]()
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def prepare(buffers: list[Tensor]) -> Table:
    """The table of buffers, copied to their device at the first call with them.

    Do this before a CUDA graph with `move_path` is captured, and keep what it returns as long as the graph: only the
    last MAX_TABLES are kept here."""
    key = (buffers[0].device, *((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in buffers))
    table = _tables.pop(key, None)
    if table is None:
        table = _made(buffers)
        if len(_tables) >= MAX_TABLES:
            del _tables[next(iter(_tables))]
    _tables[key] = table  # behind all others: those that were not used for longest come first
    return table


def _made(buffers: list[Tensor]) -> Table:
    if any(buffer.stride(-1) != 1 for buffer in buffers):
        raise ValueError("buffers must be contiguous in their last dimension")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("prepare(buffers) must be called before the capture of a CUDA graph that moves their rows")
    sizes = []  # in bytes, but for heads
    for buffer in buffers:
        bytes_each = buffer.element_size()
        strides = [stride * bytes_each for stride in buffer.stride()[:3]]
        sizes.append((buffer.data_ptr(), *strides, buffer.shape[1], buffer.shape[3] * bytes_each))
    word = max(each for each in WORDS if all(size % each == 0 for row in sizes for size in (*row[:4], row[5])))
    entries = [[row[0], *(stride // word for stride in row[1:4]), row[4], row[5] // word] for row in sizes]
    table = torch.tensor(entries, dtype=torch.long).to(buffers[0].device)
    return Table(table, word, max(row[4] for row in entries), max(row[5] for row in entries))


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
    read = [
        each if each.shape[1] < 2 or each.stride(1) == 1 else each.contiguous()
        for each in (ids, parents, depths, bits, chosen, spoiled, going)
    ]
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


def move_path(buffers: list[Tensor], starts: Tensor, path: Tensor, counts: Tensor) -> None:
    """Launches the kernel; see the operation."""
    if not buffers:
        return
    table = prepare(buffers)
    path = path if path.shape[1] < 2 or path.stride(1) == 1 else path.contiguous()
    columns = min(COLUMNS, triton.next_power_of_2(table.columns))
    grid = table.heads * triton.cdiv(table.columns, columns), len(buffers), len(path)
    move_path_kernel[grid](
        table.entries,
        starts,
        path,
        counts,
        starts.stride(0),
        path.stride(0),
        counts.stride(0),
        table.heads,
        WORD=WORDS[table.word],
        COLUMNS=columns,
        ROWS=ROWS,
        num_warps=1,
    )
