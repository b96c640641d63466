"""The unroll (training-time test): every position of a text drafts `depth` tokens as it would when serving, all at
once.

B sequences, T tokens, S = T - 1 positions, k depth. The chain of position t at depth k embeds x[t+1+k], predicts
x[t+2+k] and sees the keys of depth 0 at positions up to t plus its own later keys. Source: EAGLE-3 (arXiv 2503.01840),
section 3.
"""

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ..modeling import Eagle31DrafterModel
from .attention import Attended, UnrollAttention
from .documents import positions_of


def unroll(
    drafter: Eagle31DrafterModel,
    input_ids: Tensor,
    states: Tensor,
    depth: int,
    documents: Tensor | None = None,
    recompute: bool = False,
    observe: Callable[[Attended], None] | None = None,
    skips: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, depth by depth, the states to score and the states fed to the next depth, both (B, S - k, h).

    Entry t of depth k is of the chain of position t; chains whose tokens would lie past the end are left out.
    `input_ids` (B, T); `states` (B, T, n*ht): aux hidden states of the target. `documents` (B, T): the number of the
    packed text each token belongs to; texts do not see each other, and each has positions of its own, to which `skips`
    (B, T), as `position_skips` draws them, are added. Gradients flow through all depths; with `recompute` the backward
    pass runs each depth again instead of keeping what it computed. `observe` sees layer 0 attend. Raises ValueError for
    a depth that no chain has tokens for, and for attention dropout.
    """
    num_positions = input_ids.shape[1] - 1
    if not 1 <= depth <= num_positions:
        raise ValueError(f"depth is {depth}; expected 1 to {num_positions} for rows of {num_positions + 1} tokens.")
    if drafter.training and drafter.config.attention_dropout:
        raise ValueError(f"attention_dropout is {drafter.config.attention_dropout}; expected 0, the unroll has none.")
    documents = None if documents is None else documents[:, :num_positions]
    positions = positions_of(documents, num_positions, input_ids.device)
    positions = positions if skips is None else positions + skips[:, :num_positions]
    attention = UnrollAttention(documents, observe)
    masks = dict.fromkeys(drafter.config.layer_types, attention)

    def step(k: int, states: Tensor) -> Tensor:
        attention.depth = k
        tokens = pad(input_ids[:, 1 + k :], (0, k))
        # the target's are cast here, so that no copy of them is kept where depths are computed again
        source = {"hidden_states": states} if k else {"target_hidden_states": states.to(drafter.norm.weight.dtype)}
        return drafter(
            tokens, **source, position_ids=positions + k, attention_mask=masks, logits_to_keep=None, return_dict=True
        ).last_hidden_state

    states = states[:, :num_positions]
    for k in range(depth):
        states = checkpoint(step, k, states, use_reentrant=False) if recompute else step(k, states)
        state = states[:, : num_positions - k]
        yield state if drafter.config.norm_output else drafter.norm(state), state
