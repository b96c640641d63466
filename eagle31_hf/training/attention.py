"""Attention of the unroll: a position sees the keys of depth 0 up to itself, and of every later depth its own key
alone.

B sequences, H heads, S positions, D and V the widths of keys and values. The keys of depth 0 are attended to by one of
`attention_ways`, none of which holds (S, S); the later ones add one score a position each. Joined under one softmax
they give what a dense mask over the keys of all depths gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnostics.attention_mass import attention_mass, key_weights
from .attention_ways import WAYS, FirstKeys, Seen, way_of
from .documents import positions_of, runs


class UnrollAttention:
    """Attention that takes the place of a mask, and keeps the keys and values of every depth and layer.

    `documents` (B, S): numbers of packed texts, which do not see each other. `depth` is set by the caller before each
    depth; one that is computed a second time, from a checkpoint, finds its keys there already. `observe` is called with
    what layer 0 attends with.
    """

    def __init__(self, documents: Tensor | None = None, observe: Callable[["Attended"], None] | None = None):
        self.observe = observe
        self.seen = Seen()
        if documents is not None:
            spans = [(slice(b, b + 1), slice(start, end)) for _, (b, start, end) in runs(documents)]
            self.seen = Seen(documents, spans)
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
        pairs = [*depths[: self.depth], (k, v)]
        later = [pair for d, pair in enumerate(pairs) if d > 0 and (window is None or self.depth - d < window)]
        way = way_of(q, v, is_masked=window is not None)
        of_first = self.seen._replace(window=window, depth=self.depth)
        out, lse = JoinedAttention.apply(
            q, layer.scaling, of_first, way, *pairs[0], *(x for pair in later for x in pair)
        )
        if layer.layer_idx == 0 and self.observe is not None:
            keys = [for_all_heads(key, q) for key, _ in (pairs[0], *later)]
            self.observe(Attended(self.depth, q, lse, keys[0], keys[1:], layer.scaling, of_first))
        return out.transpose(1, 2)


def for_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeats keys or values (B, Hkv, S, ...) for the heads of queries (B, H, S, D) that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@dataclass
class Attended:
    """One depth of layer 0: queries (B, H, S, D), log-sum-exp of their scores (B, H, S), keys of depth 0, and the
    positions' later keys, each (B, H, S, D); `seen`: which keys of depth 0 they see."""

    depth: int
    queries: Tensor
    lse: Tensor
    first_keys: Tensor
    later_keys: list[Tensor]
    scale: float
    seen: Seen


class MassObserver:
    """Observes layer 0 in an unroll and keeps the attention masses of every chain at every depth.

    Costs a few products a position, not a dense attention. `documents` (B, S): numbers of the packed texts.
    """

    def __init__(self, documents: Tensor):
        self.positions = torch.arange(documents.shape[1], device=documents.device)
        # (B, S): the position at which the text begins
        self.first = self.positions - positions_of(documents, documents.shape[1], documents.device)
        self.masses: dict[int, Tensor] = {}  # of each depth (B, S, 4), by the sequence and position where chains begin

    @torch.no_grad()
    def observe(self, attended: Attended) -> None:
        """Keeps the masses of one depth."""
        keys = attended.first_keys
        index = self.first.expand(keys.shape[0], -1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])

        def weights(of: Tensor) -> Tensor:
            return key_weights(attended.queries, of, attended.lse, attended.scale)

        sink, own = weights(keys.gather(2, index)), weights(keys)
        sink = sink * attended.seen.in_window(self.positions, self.first)[:, None]
        own = own * attended.seen.in_window(self.positions, self.positions)
        own = own * (self.first != self.positions)[:, None]  # a text's first key is its sink
        made = sum((weights(key) for key in attended.later_keys), torch.zeros_like(own))
        self.masses[attended.depth] = attention_mass(sink, own, made)


class JoinedAttention(torch.autograd.Function):
    """One softmax over the keys of depth 0 that a position sees, see `FirstKeys`, and its own later keys; Hkv heads of
    keys and values, each for H / Hkv heads of queries, are repeated for these while they are attended to, not kept so.

    The backward pass of the first part is that of its way: given the joined output and log-sum-exp it takes the
    probabilities to be the joined ones, which they are. Also returns the log-sum-exp (B, H, S), without a gradient.
    """

    @staticmethod
    def forward(ctx, q: Tensor, scale: float, seen: Seen, way: str, k: Tensor, v: Tensor, *later: Tensor):
        """Returns output (B, H, S, V) and log-sum-exp; `way`: one of WAYS; `later`: a key and a value of every depth
        but the first."""
        out, lse = WAYS[way].forward(_first_keys(q, k, v, scale, seen))
        if later:
            shared = (k.shape[1], -1)  # heads: H -> (Hkv, H / Hkv)
            queries = q.float().unflatten(1, shared)
            # (B, Hkv, H / Hkv, S, j)
            scores = torch.stack([(queries * key.float()[:, :, None]).sum(-1) * scale for key in later[::2]], dim=-1)
            joined = torch.logaddexp(lse, scores.logsumexp(-1).flatten(1, 2))
            out = (out.float() * (lse - joined).exp()[..., None]).unflatten(1, shared)
            weights = (scores - joined.unflatten(1, shared)[..., None]).exp()
            for i, value in enumerate(later[1::2]):
                out = out + weights[..., i, None] * value.float()[:, :, None]
            out, lse = out.flatten(1, 2).to(q.dtype), joined
        ctx.save_for_backward(q, k, v, out, lse, *later)
        ctx.scale, ctx.seen = scale, seen
        ctx.way = way
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        """Gradients in the order of the arguments of `forward`."""
        q, k, v, out, lse, *later = ctx.saved_tensors
        shared = (k.shape[1], -1)
        first = _first_keys(q, k, v, ctx.scale, ctx.seen)
        of_q, *of_first = WAYS[ctx.way].backward(first, grad, out, lse)
        grads = [x.unflatten(1, shared).sum(2) for x in of_first]
        if not later:
            return of_q, None, None, None, *grads
        grad, queries, of_q = (x.float().unflatten(1, shared) for x in (grad, q, of_q))
        mean = (grad * out.float().unflatten(1, shared)).sum(-1)
        for key, value in zip(later[::2], later[1::2], strict=True):
            own_key, own_value = key.float()[:, :, None], value.float()[:, :, None]
            weight = ((queries * own_key).sum(-1) * ctx.scale - lse.unflatten(1, shared)).exp()
            by_score = (weight * ((grad * own_value).sum(-1) - mean) * ctx.scale)[..., None]
            of_q = of_q + by_score * own_key
            grads += [(by_score * queries).sum(2).to(q.dtype), (weight[..., None] * grad).sum(2).to(q.dtype)]
        return of_q.flatten(1, 2).to(q.dtype), None, None, None, *grads


def _first_keys(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen) -> FirstKeys:
    return FirstKeys(q, for_all_heads(k, q), for_all_heads(v, q), scale, seen)
