"""Attention drift in training: the attention mass of every chain in the unroll.

B sequences, S positions at which chains begin, k depth. Source: Attention Drift (arXiv 2605.09992).
"""

import torch
from torch import Tensor

from ..diagnostics.attention_mass import attention_mass, key_weights
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
