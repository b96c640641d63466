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
        groups = q.shape[1] // k.shape[1]
        flat = [x.repeat_interleave(groups, dim=1) for pair in (pairs[0], *later) for x in pair]
        out, lse = JoinedAttention.apply(q, layer.scaling, of_first, way, *flat)
        if layer.layer_idx == 0 and self.observe is not None:
            self.observe(Attended(self.depth, q, lse, flat[0], flat[2::2], layer.scaling, of_first))
        return out.transpose(1, 2)


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
        self._masses: dict[int, Tensor] = {}

    @torch.no_grad()
    def observe(self, attended: Attended) -> None:
        """Keeps the masses (B, S, 4) of one depth."""
        keys = attended.first_keys
        index = self.first.expand(keys.shape[0], -1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])

        def weights(of: Tensor) -> Tensor:
            return key_weights(attended.queries, of, attended.lse, attended.scale)

        sink, own = weights(keys.gather(2, index)), weights(keys)
        sink = sink * attended.seen.in_window(self.positions, self.first)[:, None]
        own = own * attended.seen.in_window(self.positions, self.positions)
        own = own * (self.first != self.positions)[:, None]  # a text's first key is its sink
        made = sum((weights(key) for key in attended.later_keys), torch.zeros_like(own))
        self._masses[attended.depth] = attention_mass(sink, own, made)

    def of(self, depth: int, sequence: Tensor, position: Tensor) -> Tensor:
        """Returns the masses (N, 4) of the chains that begin at these sequences and positions, both (N,)."""
        return self._masses[depth][sequence, position]


class JoinedAttention(torch.autograd.Function):
    """One softmax over the keys of depth 0 that a position sees, see `FirstKeys`, and its own later keys.

    The backward pass of the first part is that of its way: given the joined output and log-sum-exp it takes the
    probabilities to be the joined ones, which they are. Also returns the log-sum-exp (B, H, S), without a gradient.
    """

    @staticmethod
    def forward(ctx, q: Tensor, scale: float, seen: Seen, way: str, k: Tensor, v: Tensor, *later: Tensor):
        """Returns output (B, H, S, V) and log-sum-exp; `way`: one of WAYS; `later`: a key and a value of every depth
        but the first."""
        out, lse = WAYS[way].forward(FirstKeys(q, k, v, scale, seen))
        if later:
            # (B, H, S, j)
            scores = torch.stack([(q.float() * key.float()).sum(-1) * scale for key in later[::2]], dim=-1)
            joined = torch.logaddexp(lse, scores.logsumexp(-1))
            out = out.float() * (lse - joined).exp()[..., None]
            for i, value in enumerate(later[1::2]):
                out = out + (scores[..., i] - joined).exp()[..., None] * value.float()
            out, lse = out.to(q.dtype), joined
        ctx.save_for_backward(q, k, v, out, lse, *later)
        ctx.scale, ctx.seen = scale, seen
        ctx.way = way
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        """Gradients in the order of the arguments of `forward`."""
        q, k, v, out, lse, *later = ctx.saved_tensors
        first = FirstKeys(q, k, v, ctx.scale, ctx.seen)
        grad_q, grad_k, grad_v = WAYS[ctx.way].backward(first, grad, out, lse)
        grad = grad.float()
        grads = list[Tensor]()
        mean = (grad * out.float()).sum(-1)
        for key, value in zip(later[::2], later[1::2], strict=True):
            weight = ((q.float() * key.float()).sum(-1) * ctx.scale - lse).exp()
            by_score = (weight * ((grad * value.float()).sum(-1) - mean) * ctx.scale)[..., None]
            grad_q = grad_q + (by_score * key.float()).to(q.dtype)
            grads += [(by_score * q.float()).to(q.dtype), (weight[..., None] * grad).to(q.dtype)]
        return grad_q, None, None, None, grad_k, grad_v, *grads
