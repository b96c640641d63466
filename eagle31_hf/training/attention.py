"""Attention of the unroll: a position sees the keys of depth 0 up to itself, and of every later depth its own key
alone.

B sequences, H heads, S positions, D and V the widths of keys and values. The keys of depth 0 go through a kernel that
never holds (S, S), the later ones add one score a position each; joined under one softmax they give what a dense mask
over the keys of all depths gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .documents import runs

QUERIES_AT_ONCE = 512  # where no kernel gives what the backward pass needs


def first_mask(num_positions: int, depth: int, window: int | None, device: torch.device) -> Tensor:
    """Returns which keys of depth 0 the positions see at this depth: (S, S) bool.

    A window counts tokens back from the query's own, which at depth k is k tokens after the chain's position.
    """
    positions = torch.arange(num_positions, device=device)
    seen = positions[None, :] <= positions[:, None]
    return seen if window is None else seen & (positions[None, :] > positions[:, None] + depth - window)


Span = tuple[slice, slice]  # of sequences and of positions


class UnrollAttention:
    """Attention that takes the place of a mask, and keeps the keys and values of every depth and layer.

    `documents` (B, S): numbers of packed texts, which do not see each other. `depth` is set by the caller before each
    depth; one that is computed a second time, from a checkpoint, finds its keys there already. `observers` are called
    with what layer 0 attends with.
    """

    def __init__(self, documents: Tensor | None = None, observers: Sequence[Callable[["Attended"], None]] = ()):
        self.documents = documents
        self.observers = observers
        self.spans: list[Span] = [(slice(None), slice(None))]
        if documents is not None:
            self.spans = [(slice(run.sequence, run.sequence + 1), slice(run.start, run.end)) for run in runs(documents)]
        self.depth = 0
        self._layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends at one depth: queries (B, H, S, D), keys and values (B, Hkv, S, ...) -> output (B, S, H, V)."""
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
        """Returns which keys of depth 0 are seen: (1 or B, 1, S, S)."""
        mask = first_mask(q.shape[2], self.depth, window, q.device)[None, None]
        if self.documents is None:
            return mask
        return mask & (self.documents[:, None, :, None] == self.documents[:, None, None, :])


@dataclass
class Attended:
    """One depth of layer 0: queries (B, H, S, D), log-sum-exp of their scores (B, H, S), keys of depth 0, and the
    positions' later keys, each (B, H, S, D); `mask` (1 or B, 1, S, S) or None: causal within the texts."""

    depth: int
    queries: Tensor
    lse: Tensor
    first_keys: Tensor
    later_keys: list[Tensor]
    scale: float
    mask: Tensor | None


class FirstKeys(NamedTuple):
    """Queries (B, H, S, D) with the keys (B, H, S, D) and values (B, H, S, V) of depth 0; they see what `mask` (1 or B,
    1, S, S) lets them, or, where it is None, causally within each of `spans`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    spans: list[Span]


class JoinedAttention(torch.autograd.Function):
    """One softmax over the keys of depth 0 that a position sees, see `FirstKeys`, and its own later keys.

    The backward pass of the first part is flash attention's own: given the joined output and log-sum-exp it takes the
    probabilities to be the joined ones, which they are. Also returns the log-sum-exp (B, H, S), without a gradient.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, mask: Tensor | None, scale: float, spans: list[Span], k: Tensor, v: Tensor, *later: Tensor
    ):
        """Returns output (B, H, S, V) and log-sum-exp; `later`: a key and a value of every depth but the first."""
        out, lse = _forward(FirstKeys(q, k, v, mask, scale, spans))
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
        """Gradients in the order of the arguments of `forward`."""
        q, k, v, mask, out, lse, *later = ctx.saved_tensors
        grad_q, grad_k, grad_v = _backward(FirstKeys(q, k, v, mask, ctx.scale, ctx.spans), grad, out, lse)
        grad = grad.float()
        grads = list[Tensor]()
        mean = (grad * out.float()).sum(-1)
        for key, value in zip(later[::2], later[1::2], strict=True):
            weight = ((q.float() * key.float()).sum(-1) * ctx.scale - lse).exp()
            by_score = (weight * ((grad * value.float()).sum(-1) - mean) * ctx.scale)[..., None]
            grad_q = grad_q + (by_score * key.float()).to(q.dtype)
            grads += [(by_score * q.float()).to(q.dtype), (weight[..., None] * grad).to(q.dtype)]
        return grad_q, None, None, None, grad_k, grad_v, *grads


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """Returns True where torch's flash attention returns its log-sum-exp and takes another one back: on a CPU."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _forward(first: FirstKeys) -> tuple[Tensor, Tensor]:
    """Returns the output (B, H, S, V) and the log-sum-exp (B, H, S) in fp32."""
    q, v = first.q, first.v
    if first.mask is None:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for sequences, positions in first.spans:
            part = (x[sequences, :, positions] for x in first[:3])
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, True, scale=first.scale)
            out[sequences, :, positions], lse[sequences, :, positions] = found
        return out, lse
    outs, lses = [], []
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        end = start + QUERIES_AT_ONCE  # keys further on are not seen
        scores = _scores(first, start)
        lses.append(scores.logsumexp(-1).clamp(min=-1e30))  # a window may have left no key of depth 0
        outs.append((scores - lses[-1][..., None]).exp().to(v.dtype) @ v[:, :, :end])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _backward(first: FirstKeys, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of queries, keys and values from that of the output, all (B, H, S, ...)."""
    if first.mask is None:
        return _flash_backward(first, grad, out, lse)
    q, k, v = first[:3]
    grad_q = torch.zeros_like(q)
    grad_k = torch.zeros_like(k, dtype=torch.float32)
    grad_v = torch.zeros_like(v, dtype=torch.float32)
    mean = (grad.float() * out.float()).sum(-1, keepdim=True)
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        end = start + QUERIES_AT_ONCE
        weights = (_scores(first, start) - lse[:, :, start:end, None]).exp()
        grad_v[:, :, :end] += weights.to(v.dtype).mT @ grad[:, :, start:end]
        by_score = (grad[:, :, start:end] @ v[:, :, :end].mT).float() - mean[:, :, start:end]
        by_score = (weights * by_score * first.scale).to(q.dtype)
        grad_q[:, :, start:end] = by_score @ k[:, :, :end]
        grad_k[:, :, :end] += by_score.mT @ q[:, :, start:end]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _flash_backward(first: FirstKeys, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    grads = tuple(torch.empty_like(x) for x in first[:3])
    for sequences, positions in first.spans:
        part = (x[sequences, :, positions] for x in (grad, *first[:3], out, lse))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*part, 0.0, True, scale=first.scale)
        for whole, new in zip(grads, found, strict=True):
            whole[sequences, :, positions] = new
    return grads


def _scores(first: FirstKeys, start: int) -> Tensor:
    """Returns the scores, in fp32, of QUERIES_AT_ONCE queries from `start` on with the keys up to the last of them: (B,
    H, queries, keys)."""
    end = start + QUERIES_AT_ONCE
    scores = (first.q[:, :, start:end] @ first.k[:, :, :end].mT).float() * first.scale
    return scores.masked_fill(~first.mask[:, :, start:end, :end], float("-inf"))
