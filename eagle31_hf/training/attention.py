"""Attention of the unroll: a slot sees the keys of depth 0 up to itself, and of every later depth its own key alone.

B rows, H heads, S slots, D and V the widths of keys and values. The keys of depth 0 go through a kernel that never
holds (S, S), the later ones add one score a slot each; joined under one softmax they give what a dense mask over the
keys of all depths gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .rows import runs

QUERIES_AT_ONCE = 512  # where no kernel gives what the backward pass needs


def first_mask(num_slots: int, depth: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys of depth 0 the slots see at this depth: (S, S). A window counts tokens back from the query's own
    position, which at depth k is t + k."""
    slots = torch.arange(num_slots, device=device)
    seen = slots[None, :] <= slots[:, None]
    return seen if window is None else seen & (slots[None, :] > slots[:, None] + depth - window)


Span = tuple[slice, slice]  # of rows and of slots


class UnrollAttention:
    """Stands where a mask does, and attends itself, keeping the keys and values of every depth and layer.

    `documents` (B, S), numbers of packed texts, which do not see each other. `depth` is set by the caller before each;
    a depth that is computed a second time, from a checkpoint, finds its keys there already. `observers` are called with
    what layer 0 attends with.
    """

    def __init__(self, documents: Tensor | None = None, observers: Sequence[Callable[["Attended"], None]] = ()):
        self.documents, self.observers = documents, observers
        self.spans: list[Span] = [(slice(None), slice(None))]
        if documents is not None:
            self.spans = [(slice(row, row + 1), slice(start, end)) for row, _, start, end in runs(documents)]
        self.depth = 0
        self._layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, H, S, D), keys and values (B, Hkv, S, ...) of a depth -> (B, S, H, V)."""
        layer: Any = module
        q, k = q.to(v.dtype), k.to(v.dtype)  # rope promotes them under autocast
        depths = self._layers.setdefault(layer.layer_idx, [])
        if self.depth == len(depths):
            depths.append((k, v))
        window = layer.sliding_window
        seen = [*depths[: self.depth], (k, v)]
        later = [pair for d, pair in enumerate(seen) if d > 0 and (window is None or self.depth - d < window)]
        mask = None if window is None and has_kernel(q, v) else self.first_mask(q, window)
        groups = q.shape[1] // k.shape[1]
        flat = [x.repeat_interleave(groups, dim=1) for pair in (seen[0], *later) for x in pair]
        out, lse = JoinedAttention.apply(q, mask, layer.scaling, self.spans, *flat)
        if layer.layer_idx == 0:
            for observer in self.observers:
                observer(Attended(self.depth, q, lse, flat[0], flat[2::2], layer.scaling, mask))
        return out.transpose(1, 2)

    def first_mask(self, q: Tensor, window: int | None) -> Tensor:
        """Which keys of depth 0 are seen: (1 or B, 1, S, S)."""
        mask = first_mask(q.shape[2], self.depth, window, q.device)[None, None]
        if self.documents is None:
            return mask
        return mask & (self.documents[:, None, :, None] == self.documents[:, None, None, :])


@dataclass
class Attended:
    """One depth of layer 0: queries (B, H, S, D), log-sum-exp of their scores (B, H, S), keys of depth 0, and the
    slots' later keys, each (B, H, S, D); `mask` (1 or B, 1, S, S) or None: causal within `spans`."""

    depth: int
    queries: Tensor
    lse: Tensor
    first_keys: Tensor
    later_keys: list[Tensor]
    scale: float
    mask: Tensor | None


class JoinedAttention(torch.autograd.Function):
    """One softmax over the keys of depth 0 that `mask`, or causality within each of `spans`, lets a slot see, and its
    own later keys.

    The backward pass of the first part is flash attention's own: given the joined output and log-sum-exp it takes the
    probabilities to be the joined ones, which they are. Also returns the log-sum-exp (B, H, S), without a gradient.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, mask: Tensor | None, scale: float, spans: list[Span], k: Tensor, v: Tensor, *later: Tensor
    ):
        out, lse = _forward(q, k, v, mask, scale, spans)
        if later:
            # (B, H, S, j)
            scores = torch.stack([(q.float() * key.float()).sum(-1) * scale for key in later[::2]], dim=-1)
            joined = torch.logaddexp(lse, scores.logsumexp(-1))
            out = out.float() * (lse - joined).exp()[..., None]
            for i, value in enumerate(later[1::2]):
                out = out + (scores[..., i] - joined).exp()[..., None] * value.float()
            out, lse = out.to(q.dtype), joined
        ctx.save_for_backward(q, k, v, mask, out, lse, *later)
        ctx.scale, ctx.spans = scale, spans
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        q, k, v, mask, out, lse, *later = ctx.saved_tensors
        grad_q, grad_k, grad_v = _backward(grad, q, k, v, mask, out, lse, ctx.scale, ctx.spans)
        grad, grads = grad.float(), list[Tensor]()
        mean = (grad * out.float()).sum(-1)
        for key, value in zip(later[::2], later[1::2], strict=True):
            weight = ((q.float() * key.float()).sum(-1) * ctx.scale - lse).exp()
            push = (weight * ((grad * value.float()).sum(-1) - mean) * ctx.scale)[..., None]
            grad_q = grad_q + (push * key.float()).to(q.dtype)
            grads += [(push * q.float()).to(q.dtype), (weight[..., None] * grad).to(q.dtype)]
        return grad_q, None, None, None, grad_k, grad_v, *grads


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """Of torch's flash attention: on a CPU it returns the log-sum-exp and takes one back."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, spans: list[Span]
) -> tuple[Tensor, Tensor]:
    """-> output (B, H, S, V), log-sum-exp (B, H, S) in fp32."""
    if mask is None:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for rows, slots in spans:
            part = (x[rows, :, slots] for x in (q, k, v))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, True, scale=scale)
            out[rows, :, slots], lse[rows, :, slots] = found
        return out, lse
    outs, lses = [], []
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        end = start + QUERIES_AT_ONCE  # keys further on are not seen
        scores = _scores(q, k, mask, scale, start)
        lses.append(scores.logsumexp(-1).clamp(min=-1e30))  # a window may have left no key of depth 0
        outs.append((scores - lses[-1][..., None]).exp().to(v.dtype) @ v[:, :, :end])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    spans: list[Span],
) -> tuple[Tensor, Tensor, Tensor]:
    if mask is None:
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        for rows, slots in spans:
            part = (x[rows, :, slots] for x in (grad, q, k, v, out, lse))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*part, 0.0, True, scale=scale)
            for whole, new in zip(grads, found, strict=True):
                whole[rows, :, slots] = new
        return grads
    grad_q = torch.zeros_like(q)
    grad_k = torch.zeros_like(k, dtype=torch.float32)
    grad_v = torch.zeros_like(v, dtype=torch.float32)
    mean = (grad.float() * out.float()).sum(-1, keepdim=True)
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        end = start + QUERIES_AT_ONCE
        weights = (_scores(q, k, mask, scale, start) - lse[:, :, start:end, None]).exp()
        grad_v[:, :, :end] += weights.to(v.dtype).mT @ grad[:, :, start:end]
        push = weights * ((grad[:, :, start:end] @ v[:, :, :end].mT).float() - mean[:, :, start:end]) * scale
        grad_q[:, :, start:end] = push.to(q.dtype) @ k[:, :, :end]
        grad_k[:, :, :end] += push.to(q.dtype).mT @ q[:, :, start:end]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float, start: int) -> Tensor:
    """Of QUERIES_AT_ONCE queries from `start` on, in fp32, with the keys up to the last of them: (B, H, queries, keys)."""
    end = start + QUERIES_AT_ONCE
    scores = (q[:, :, start:end] @ k[:, :, :end].mT).float() * scale
    return scores.masked_fill(~mask[:, :, start:end, :end], float("-inf"))
