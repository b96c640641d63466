"""Training-time test: every slot drafts `depth` tokens as it would when serving, all slots at once.

B rows, T tokens, S = T - 1 slots, k depth. Slot t at depth k embeds x[t+1+k], predicts x[t+2+k] and sees the keys of depth 0 at
slots <= t plus the later keys of its own slot. Source: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad

from ..modeling import Eagle31DrafterModel
from .attention import UnrollAttention
from .losses import Goal, forward_kl, overlap


def unroll(
    drafter: Eagle31DrafterModel, input_ids: Tensor, states: Tensor, depth: int, documents: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens (B, T) and captured states (B, T, n*ht) -> per depth k the logits (B, S - k, Vd) and fed-back states (B, S - k, h).

    Row t of depth k is slot t; slots whose tokens would lie past the end are left out. `documents` (B, T): the number of the packed text
    each token belongs to; they do not see each other. Gradients flow through all depths.
    Raises ValueError for a depth no slot has tokens for, under gradient checkpointing, and for attention dropout.
    """
    num_slots = input_ids.shape[1] - 1
    if not 1 <= depth <= num_slots:
        raise ValueError(f"depth is {depth}; expected 1 to {num_slots} for rows of {num_slots + 1} tokens.")
    if drafter.training and drafter.layers[0].gradient_checkpointing:
        raise ValueError("the unroll cannot be recomputed layer by layer; expected no gradient checkpointing of the drafter.")
    if drafter.training and drafter.config.attention_dropout:
        raise ValueError(f"attention_dropout is {drafter.config.attention_dropout}; expected 0, the unroll has none.")
    states = states.to(drafter.norm.weight.dtype)
    positions = torch.arange(num_slots, device=input_ids.device)[None]
    attention = UnrollAttention(None if documents is None else documents[:, :num_slots])
    masks, source = dict.fromkeys(drafter.config.layer_types, attention), {"target_hidden_states": states[:, :num_slots]}
    for k in range(depth):
        out = drafter(pad(input_ids[:, 1 + k :], (0, k)), **source, position_ids=positions + k, attention_mask=masks)
        source = {"hidden_states": out.last_hidden_state}
        yield out.logits[:, : num_slots - k], out.last_hidden_state[:, : num_slots - k]


@dataclass
class DraftingLoss:
    """`loss` is what to minimise; the lists hold one figure per depth, averaged over rows."""

    loss: Tensor
    kl: list[float]
    accuracy: list[float]  # argmax q == argmax p, which the draft vocabulary may lack
    acceptance: list[float]  # expected under rejection sampling


def drafting_loss(
    drafter: Eagle31DrafterModel,
    input_ids: Tensor,
    states: Tensor,
    target_logits: Tensor,
    depth: int,
    depth_decay: float = 0.8,
    with_metrics: bool = True,
) -> DraftingLoss:
    """Forward KL to the target at every depth, weighted `depth_decay ** k` and averaged over all supervised slots.

    Tokens (B, T), captured states (B, T, n*ht), target logits (B, T, V). Every token counts as text to predict.
    `with_metrics=False` leaves accuracy and acceptance empty and saves their time.
    """
    goal = Goal.of(target_logits, drafter.draft_to_target_ids())
    result = DraftingLoss(target_logits.new_zeros((), dtype=torch.float32), [], [], [])
    for k, (logits, _) in enumerate(unroll(drafter, input_ids, states, depth)):
        wanted, log_q = goal[:, 1 + k :], log_softmax(logits.float(), dim=-1)
        kl = forward_kl(wanted, log_q).mean()
        result.loss = result.loss + depth_decay**k * kl
        result.kl.append(kl.item())
        if with_metrics:
            with torch.no_grad():
                result.accuracy.append((log_q.argmax(-1) == wanted.best).float().mean().item())
                result.acceptance.append(overlap(wanted, log_q).mean().item())
    return result
