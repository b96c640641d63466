"""Rivals of `tree_attention`: a chain's tokens over a cache of which a part is written, by torch's own attention.

T tokens, H heads, Hkv of keys, D width, C slots.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eagle31_hf.kernels.tree_attention import seen_slots, tree_attention

from .inputs import Inputs, Size
from .machine import bandwidth
from .operations import many_inputs, real_sizes
from .run import Row, Run, Task
from .subprocesses import in_subprocess
from .timing import milliseconds

FLEX_LIMIT = 45.0  # seconds, compiling included


def attention(run: Run) -> Iterator[Task]:
    """Every rival at every size that `tree_attention` is timed at."""
    rivals = {"tree_attention": _ours, "sdpa with a mask": _by_sdpa, "varlen_attn": _by_varlen}
    for size in real_sizes(run, "tree_attention"):
        where = f"{size.tokens} tokens after {size.context}"
        for name, rival in rivals.items():
            yield f"{name}, {where}", partial(timed, run, size, rival)
    yield "flex_attention, compiled", partial(_flex, run)


def timed(run: Run, size: Size, rival: Any) -> Row:
    """Milliseconds of a rival, and how far its result is from the reference's."""
    made = many_inputs(run, "tree_attention", size)
    first = made[0]
    works = [rival(written(inputs), size) for inputs in made]
    if works[0] is None:
        return {"left_out": "not in this version of torch, or not on this device"}
    expected = tree_attention.reference(*first.args).double()
    error = float((works[0]().double().view_as(expected) - expected).abs().max() / expected.abs().max())
    figures = milliseconds(works, run.device)
    floor = 1000 * first.num_bytes / bandwidth(run)
    return {**figures, "floor_ms": floor, "over_floor": figures["ms"] / floor, "error_of_scale": error}


def written(inputs: Inputs) -> Inputs:
    """Returns the inputs with 0 for every NaN in their buffers: a rival reads slots that no query sees, and multiplies
    them by a weight of 0."""
    q, keys, values, *rest = inputs.args
    return Inputs((q, keys.nan_to_num(0.0), values.nan_to_num(0.0), *rest), inputs.num_bytes)


def _ours(inputs: Inputs, size: Size) -> Any:
    return partial(tree_attention, *inputs.args)


def _by_sdpa(inputs: Inputs, size: Size) -> Any:
    """Attends by torch's `scaled_dot_product_attention`, with a mask over the whole buffers, made before."""
    q, keys, values, spans, num_new, *_ = inputs.args
    mask = seen_slots(spans, keys.shape[2], num_new)[:, None]

    def run() -> Tensor:
        out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    return run


def _by_varlen(inputs: Inputs, size: Size) -> Any:
    """Attends to a chain by torch's `varlen_attn`, with the length on the device. None where torch has none, or an
    older one without lengths."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    q, keys, values = inputs.args[:3]
    if not {"seqused_k", "window_size"} <= known.keys() or q.device.type != "cuda" or q.dtype == torch.float32:
        return None
    has_groups = "enable_gqa" in known
    times = 1 if has_groups else q.shape[1] // keys.shape[1]
    k, v = (x[0].transpose(0, 1).repeat_interleave(times, dim=1).contiguous() for x in (keys, values))
    of_q, of_k = (torch.tensor([0, end], dtype=torch.int32, device=q.device) for end in (q.shape[2], keys.shape[2]))
    lengths = torch.tensor([size.context + size.tokens], dtype=torch.int32, device=q.device)
    options: dict[str, Any] = {"seqused_k": lengths, "window_size": (-1, 0)} | (
        {"enable_gqa": True} if has_groups else {}
    )
    queries = q[0].transpose(0, 1).contiguous()
    return partial(varlen_attn, queries, k, v, of_q, of_k, q.shape[2], keys.shape[2], **options)


def _flex(run: Run) -> Row:
    """flex_attention at the largest context, in a process of its own: compiling may take longer than there is."""
    if not run.is_gpu:
        return {"left_out": "no GPU"}
    size = max(real_sizes(run, "tree_attention"), key=lambda size: (size.context, size.tokens == 6))
    facts = {name: getattr(size, name) for name in ("tokens", "context", "capacity", "heads", "kv_heads", "head_dim")}
    return facts | in_subprocess("flex", min(FLEX_LIMIT, run.left()), str(run.device), facts)
