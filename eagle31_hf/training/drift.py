"""Attention drift in training: attention mass and growth of states in the unroll, and the losses against both.

B sequences, T tokens, S = T - 1 positions at which chains begin, R chosen ones of each sequence, K depths, H heads.
Source: Attention Drift (arXiv 2605.09992).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..diagnostics.attention_mass import attention_mass, key_weights
from ..diagnostics.growth import log_growth
from .attention import Attended
from .documents import positions_of


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
    def observe(self, seen: Attended) -> None:
        """Keeps the masses (B, S, 4) of one depth."""
        keys = seen.first_keys
        index = self.first.expand(keys.shape[0], -1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])

        def weights(of: Tensor) -> Tensor:
            return key_weights(seen.queries, of, seen.lse, seen.scale)

        sink, own = weights(keys.gather(2, index)), weights(keys)
        if seen.mask is not None:
            mask = seen.mask.expand(keys.shape[0], 1, -1, -1)
            sink = sink * mask.gather(3, index[:, :1, :, :1])[..., 0]
            own = own * mask.diagonal(dim1=2, dim2=3)
        own = own * (self.first != self.positions)[:, None]  # a text's first key is its sink
        made = sum((weights(key) for key in seen.later_keys), torch.zeros_like(own))
        self._masses[seen.depth] = attention_mass(sink, own, made)

    def of(self, depth: int, sequence: Tensor, position: Tensor) -> Tensor:
        """Returns the masses (N, 4) of the chains that begin at these sequences and positions, both (N,)."""
        return self._masses[depth][sequence, position]


def growth_penalty(norms: Tensor, first: Tensor) -> Tensor:
    """Returns the squared logarithm of the growth of states, 0 where they shrink: (B, S - k).

    `norms` (B, S - k): of depth k's states; `first` (B, S): of the first depth's, through which no gradient flows.
    """
    return log_growth(norms, first[:, : norms.shape[1]].detach()).clamp(min=0).square()


@dataclass
class Alignment:
    """Pulls the drafter's attention over the prompt toward the target's, at every depth, on R positions of a sequence.

    `positions` (B, R); `target_attention` (B, R, K, S): the target's attention, averaged over heads and layers, from
    the token that the position's chain embeds at depth k, on positions up to its own; all zero where there is none.
    What it lacks to 1 the target gives to the tokens after the position; the drafter is to give it to the keys it made,
    whichever of them.
    """

    positions: Tensor
    target_attention: Tensor
    _losses: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, seen: Attended) -> None:
        """Keeps the divergences (B, R) of the drafter's attention from the target's over the keys of depth 0, and over
        all the keys that the drafter made as if they were one."""
        scores, made = self._scores(seen)
        wanted = self.target_attention[:, :, seen.depth]
        rest = (1 - wanted.sum(-1, keepdim=True)).clamp(min=0)
        wanted = pad(wanted, (0, scores.shape[-1] - wanted.shape[-1]))
        is_seen = self._is_seen(seen) & (wanted > 0)  # what the target cannot see, another text, is left out
        scores, wanted = scores.masked_fill(~is_seen[:, None], -1e30), wanted * is_seen
        if made is not None:
            scores, wanted = torch.cat([scores, made], dim=-1), torch.cat([wanted, rest], dim=-1)
        wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-30)
        log_mean = scores.log_softmax(-1).logsumexp(1) - math.log(scores.shape[1])  # of the heads
        terms = torch.where(wanted > 0, wanted * (wanted.clamp(min=1e-30).log() - log_mean), 0.0)
        self._losses[seen.depth] = terms.sum(-1)

    def _scores(self, seen: Attended) -> tuple[Tensor, Tensor | None]:
        """Returns the drafter's scores of the keys of depth 0 (B, H, R, S) and, if any, of the keys it made together
        (B, H, R, 1)."""
        index = self.positions[:, None, :, None].expand(-1, seen.queries.shape[1], -1, seen.queries.shape[3])
        queries = seen.queries.gather(2, index).float()
        with torch.autocast(queries.device.type, enabled=False):
            scores = (queries @ seen.first_keys.float().mT) * seen.scale
            made = [(queries * keys.gather(2, index).float()).sum(-1) * seen.scale for keys in seen.later_keys]
        return scores, torch.stack(made, dim=-1).logsumexp(-1, keepdim=True) if made else None

    def _is_seen(self, seen: Attended) -> Tensor:
        """Returns which keys of depth 0 the drafter sees from the positions: (B, R, S) bool."""
        num_keys = seen.first_keys.shape[2]
        is_seen = torch.arange(num_keys, device=self.positions.device) <= self.positions[:, :, None]
        if seen.mask is None:
            return is_seen
        mask = seen.mask.expand(len(self.positions), 1, -1, -1)[:, 0]
        return is_seen & mask.gather(1, self.positions[:, :, None].expand(-1, -1, num_keys))

    def loss(self, depth: int) -> Tensor:
        """Returns the mean divergence (nats) at this depth, over the positions whose chain has a token to predict."""
        counts = self.target_attention[:, :, depth].any(-1)
        return (self._losses[depth] * counts).sum() / counts.sum().clamp(min=1)
