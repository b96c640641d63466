"""Training-time test: every slot drafts `depth` tokens as it would when serving, all slots at once.

B rows, T tokens, S = T - 1 slots, k depth. Slot t at depth k embeds x[t+1+k], predicts x[t+2+k] and sees the keys of
depth 0 at slots <= t plus the later keys of its own slot. Source: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ..modeling import Eagle31DrafterModel
from .attention import Attended, UnrollAttention


def unroll(
    drafter: Eagle31DrafterModel,
    input_ids: Tensor,
    states: Tensor,
    depth: int,
    documents: Tensor | None = None,
    recompute: bool = False,
    observers: Sequence[Callable[[Attended], None]] = (),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens (B, T) and captured states (B, T, n*ht) -> per depth k the states to score and those fed back, both (B, S
    - k, h).

    Row t of depth k is slot t; slots whose tokens would lie past the end are left out. `documents` (B, T): the number
    of the packed text each token belongs to; they do not see each other, and each has positions of its own. Gradients
    flow through all depths; with `recompute` the backward pass runs each depth again instead of keeping what it
    computed. `observers` see layer 0 attend. Raises ValueError for a depth no slot has tokens for, and for attention
    dropout.
    """
    num_slots = input_ids.shape[1] - 1
    if not 1 <= depth <= num_slots:
        raise ValueError(f"depth is {depth}; expected 1 to {num_slots} for rows of {num_slots + 1} tokens.")
    if drafter.training and drafter.config.attention_dropout:
        raise ValueError(f"attention_dropout is {drafter.config.attention_dropout}; expected 0, the unroll has none.")
    states = states.to(drafter.norm.weight.dtype)
    documents = None if documents is None else documents[:, :num_slots]
    positions = positions_of(documents, num_slots, input_ids.device)
    attention = UnrollAttention(documents, observers)
    masks, source = (
        dict.fromkeys(drafter.config.layer_types, attention),
        {"target_hidden_states": states[:, :num_slots]},
    )

    def step(k: int, source: dict[str, Tensor]) -> Tensor:
        attention.depth, tokens = k, pad(input_ids[:, 1 + k :], (0, k))
        return drafter(
            tokens, **source, position_ids=positions + k, attention_mask=masks, logits_to_keep=None, return_dict=True
        ).last_hidden_state

    for k in range(depth):
        state = checkpoint(step, k, source, use_reentrant=False) if recompute else step(k, source)
        source = {"hidden_states": state}
        state = state[:, : num_slots - k]
        yield state if drafter.config.norm_output else drafter.norm(state), state


def positions_of(documents: Tensor | None, num_slots: int, device: torch.device) -> Tensor:
    """Position of every slot in its text: (1 or B, S)."""
    slots = torch.arange(num_slots, device=device)[None]
    if documents is None:
        return slots
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return slots - torch.where(is_first, slots, 0).cummax(dim=1).values
