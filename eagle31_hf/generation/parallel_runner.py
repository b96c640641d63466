"""P-EAGLE: a drafter that drafts all levels in one forward.

After a sequence's last token it reads masks, one for each further level: the mask token, with a learnt state in the
place of the target's. The logits after each of them are those of a level, whatever was drafted before. Sources: P-EAGLE
(arXiv 2602.01469), vLLM's `mask_hidden`.

B sequences, F nodes of a level, K levels, h drafter width, Vd draft vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..modeling import Eagle31DrafterModel
from .drafter_runner import DrafterRunner
from .tree import VisibleNodes
from .unread_states import AuxStates, gathered

MOST_LEVELS = 8  # that auto drafts: such drafters are trained for about as many


def runner_of(drafter: Eagle31DrafterModel, first_positions: list[int]) -> DrafterRunner:
    """The runner that serves a drafter."""
    runner_class = ParallelRunner if drafter.config.is_parallel else DrafterRunner
    return runner_class(drafter, first_positions)


class ParallelRunner(DrafterRunner):
    """Runs a P-EAGLE drafter: reading scores every level, and a step has nothing to run."""

    def __init__(self, drafter: Eagle31DrafterModel, first_positions: list[int]):
        super().__init__(drafter, first_positions)
        self._logits = torch.empty(0)  # of all levels (B, K, Vd), scored when states were read last

    def read(self, unread: AuxStates, depth: int = 1) -> tuple[Tensor, Tensor]:
        """Reads states that are new to it, and a mask for each level after the first of `depth`, which it scores, too.
        Returns what `DrafterRunner.read` does."""
        if depth == 1:
            return super().read(unread)
        device, length = self.like.device, len(unread) + depth - 1
        counts = unread.counts.on(device)
        is_mask = torch.arange(length, device=device) >= counts  # also what pads shorter sequences: these have more
        tokens = pad(unread.tokens.to(device), (0, depth - 1)).masked_fill(is_mask, self.drafter.config.mask_token_id)
        last = (counts - 1).clamp_(min=0)
        out = self._forward(
            tokens,
            {"target_hidden_states": pad(unread.states.to(self.like), (0, 0, 0, depth - 1)), "is_mask": is_mask},
            self._rope(length),
            self._mask_of_text(length),
            logits_to_keep=last + torch.arange(depth, device=device),
        )
        self._note_read(unread)
        self._logits = out.logits
        return gathered(out.last_hidden_state, last), out.logits[:, :1]

    def step(self, ids: Tensor, state: Tensor, nodes: VisibleNodes, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states as given, and the logits (B, F, Vd) after the level that `nodes` ends with, which were scored when
        states were read: 0 are those that `read` returned."""
        level = len(nodes.widths)
        return state, self._logits[:, level : level + 1].expand(-1, ids.shape[1], -1)
