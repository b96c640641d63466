"""Attention of the unroll: a slot sees the keys of depth 0 up to itself, and of every later depth its own key alone.

B rows, H heads, S slots, D and V the widths of keys and values. The keys of depth 0 go through a kernel that never holds (S, S), the
later ones add one score a slot each; joined under one softmax they give what a dense mask over the keys of all depths gives.
"""

from typing import Any

import torch
from torch import Tensor, nn

QUERIES_AT_ONCE = 512  # where no kernel gives what the backward pass needs


def first_mask(num_slots: int, depth: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys of depth 0 the slots see at this depth: (S, S). A window counts tokens back from the query's own position, which at
    depth k is t + k."""
    slots = torch.arange(num_slots, device=device)
    seen = slots[None, :] <= slots[:, None]
    return seen if window is None else seen & (slots[None, :] > slots[:, None] + depth - window)


class UnrollAttention:
    """Stands where a mask does, and attends itself, keeping the keys and values of every depth and layer.

    `documents` (B, S), numbers of packed texts, which do not see each other.
    """

    def __init__(self, documents: Tensor | None = None):
        self.documents = documents
        self._layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, H, S, D), keys and values (B, Hkv, S, ...) of a depth, depth by depth -> (B, S, H, V)."""
        layer: Any = module
        depths = self._layers.setdefault(layer.layer_idx, [])
        depths.append((k, v))
        depth, window = len(depths) - 1, layer.sliding_window
        later = [pair for d, pair in enumerate(depths) if d > 0 and (window is None or depth - d < window)]
        mask = None
        if window is not None:
            mask = first_mask(q.shape[2], depth, window, q.device)[None, None]
        if self.documents is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            mask = same & (first_mask(q.shape[2], depth, None, q.device) if mask is None else mask)
        groups = q.shape[1] // k.shape[1]
        flat = [x.repeat_interleave(groups, dim=1) for pair in (depths[0], *later) for x in pair]
        return JoinedAttention.apply(q, mask, layer.scaling, *flat).transpose(1, 2)


class JoinedAttention(torch.autograd.Function):
    """One softmax over the keys of depth 0 that `mask` (or causality) lets a slot see, and its own later keys.

    The backward pass of the first part is flash attention's own: given the joined output and log-sum-exp it takes the probabilities to be
    the joined ones, which they are.
    """

    @staticmethod
    def forward(ctx, q: Tensor, mask: Tensor | None, scale: float, k: Tensor, v: Tensor, *later: Tensor) -> Tensor:
        out, lse = _forward(q, k, v, mask, scale)
        if later:
            scores = torch.stack([(q.float() * key.float()).sum(-1) * scale for key in later[::2]], dim=-1)  # (B, H, S, j)
            joined = torch.logaddexp(lse, scores.logsumexp(-1))
            out = out.float() * (lse - joined).exp()[..., None]
            for i, value in enumerate(later[1::2]):
                out = out + (scores[..., i] - joined).exp()[..., None] * value.float()
            out, lse = out.to(q.dtype), joined
        ctx.save_for_backward(q, k, v, mask, out, lse, *later)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, mask, out, lse, *later = ctx.saved_tensors
        grad_q, grad_k, grad_v = _backward(grad, q, k, v, mask, out, lse, ctx.scale)
        grad, grads = grad.float(), list[Tensor]()
        mean = (grad * out.float()).sum(-1)
        for key, value in zip(later[::2], later[1::2], strict=True):
            weight = ((q.float() * key.float()).sum(-1) * ctx.scale - lse).exp()
            push = (weight * ((grad * value.float()).sum(-1) - mean) * ctx.scale)[..., None]
            grad_q = grad_q + (push * key.float()).to(q.dtype)
            grads += [(push * q.float()).to(q.dtype), (weight[..., None] * grad).to(q.dtype)]
        return grad_q, None, None, grad_k, grad_v, *grads


def _has_kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Of torch's flash attention: on a CPU it returns the log-sum-exp and takes one back."""
    return q.device.type == "cpu" and mask is None and q.shape[-1] == v.shape[-1]


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """-> output (B, H, S, V), log-sum-exp (B, H, S) in fp32."""
    if _has_kernel(q, v, mask):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    outs, lses = [], []
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        end = start + QUERIES_AT_ONCE  # keys further on are not seen
        scores = _scores(q, k, mask, scale, start)
        lses.append(scores.logsumexp(-1).clamp(min=-1e30))  # a window may have left no key of depth 0
        outs.append((scores - lses[-1][..., None]).exp().to(v.dtype) @ v[:, :, :end])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_kernel(q, v, mask):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    mean = (grad.float() * out.float()).sum(-1, keepdim=True)
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        end = start + QUERIES_AT_ONCE
        weights = (_scores(q, k, mask, scale, start) - lse[:, :, start:end, None]).exp()
        grad_v[:, :, :end] += weights.to(v.dtype).mT @ grad[:, :, start:end]
        push = weights * ((grad[:, :, start:end] @ v[:, :, :end].mT).float() - mean[:, :, start:end]) * scale
        grad_q[:, :, start:end] = push.to(q.dtype) @ k[:, :, :end]
        grad_k[:, :, :end] += push.to(q.dtype).mT @ q[:, :, start:end]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, start: int) -> Tensor:
    """Of QUERIES_AT_ONCE queries from `start` on, in fp32, with the keys up to the last of them: (B, H, queries, keys)."""
    end = start + QUERIES_AT_ONCE
    scores = (q[:, :, start:end] @ k[:, :, :end].mT).float() * scale
    if mask is None:
        slots = torch.arange(q.shape[2], device=q.device)
        seen = slots[None, :end] <= slots[start:end, None]
    else:
        seen = mask[:, :, start:end, :end]
    return scores.masked_fill(~seen, float("-inf"))
