"""P-EAGLE: a drafter that drafts all levels in one forward.

After a sequence's last token it reads masks, one for each further level: the mask token, with a learnt state in the
place of the target's. The logits after each of them are those of a level, whatever was drafted before. Sources: P-EAGLE
(arXiv 2602.01469), vLLM's `mask_hidden`.

B sequences, F nodes of a level, K levels, h drafter width, Vd draft vocabulary.
"""

import torch
from torch import Tensor

from ..modeling import Eagle31DrafterModel
from .aux_states import AuxStates, gathered
from .drafter_runner import READ_AT_ONCE, DrafterRunner
from .tree import VisibleNodes

MOST_LEVELS = 8  # that auto drafts: such drafters are trained for about as many


def runner_of(drafter: Eagle31DrafterModel, first_positions: list[int]) -> DrafterRunner:
    """The runner that serves a drafter."""
    kind = DrafterRunner if drafter.config.mask_token_id is None else ParallelRunner
    return kind(drafter, first_positions)


class ParallelRunner(DrafterRunner):
    """Runs a P-EAGLE drafter: reading scores every level, and a step has nothing to run."""

    def read(self, unread: AuxStates, depth: int = 1) -> tuple[Tensor, Tensor]:
        """Reads states that are new to it, and a mask for each level after the first of `depth`. Returns as
        `DrafterRunner.read` does."""
        if depth == 1:
            return super().read(unread)
        if len(unread) > READ_AT_ONCE:  # masks follow every sequence's last token, so all of these are read together
            but_last = [max(count - 1, 0) for count in unread.counts.host]
            super().read(unread.at_most(but_last))
            unread = unread.without_first(but_last)
        device = self.like.device
        given = AuxStates(unread.states.to(self.like), unread.tokens.to(device), unread.counts)
        both = AuxStates.joined([given, self._masks_after(given, depth - 1)])
        last = (unread.counts.on(device) - 1).clamp_(min=0)
        out = self._forward(
            both.tokens,
            {"target_hidden_states": both.states},
            self._rope(len(both)),
            self._mask_of_text(len(both)),
            logits_to_keep=last + torch.arange(depth, device=device),
        )
        self._note_read(unread)
        self._logits = out.logits  # (B, K, Vd)
        return gathered(out.last_hidden_state, last), out.logits[:, :1]

    def step(self, ids: Tensor, state: Tensor, nodes: VisibleNodes, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logits of the next level (B, F, Vd), which was scored when states were read, and the states as given."""
        level = len(nodes.widths)
        return state, self._logits[:, level : level + 1].expand(-1, ids.shape[1], -1)

    def _masks_after(self, unread: AuxStates, count: int) -> AuxStates:
        """As many masks for every sequence."""
        assert self.drafter.mask_hidden is not None
        num_sequences = len(unread.tokens)
        states = self.drafter.mask_hidden.to(self.like).expand(num_sequences, count, -1)
        tokens = torch.full_like(unread.tokens[:, :1], self.drafter.config.mask_token_id).expand(-1, count)
        return AuxStates(states, tokens, [count] * num_sequences)
