"""Training-time test: every slot drafts `depth` tokens as it would when serving, all slots at once.

B rows, T tokens, S = T - 1 slots, k depth. Slot t at depth k embeds x[t+1+k], predicts x[t+2+k] and sees the keys of depth 0 at
slots <= t plus the later keys of its own slot. Source: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..modeling import Eagle31DrafterModel
from .attention import UnrollAttention
from .chunked import chunked_loss
from .losses import Goal
from .rows import supervised


def unroll(
    drafter: Eagle31DrafterModel, input_ids: Tensor, states: Tensor, depth: int, documents: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens (B, T) and captured states (B, T, n*ht) -> per depth k the states to score and those fed back, both (B, S - k, h).

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
        tokens = pad(input_ids[:, 1 + k :], (0, k))
        state = drafter(tokens, **source, position_ids=positions + k, attention_mask=masks, logits_to_keep=None).last_hidden_state
        source = {"hidden_states": state}
        state = state[:, : num_slots - k]
        yield state if drafter.config.norm_output else drafter.norm(state), state


@dataclass
class DraftingLoss:
    """`loss` is what to minimise; the lists hold one figure per depth, averaged over the rows supervised there (0 where there are none)."""

    loss: Tensor
    distance: list[float]
    accuracy: list[float]  # argmax q == argmax p, which the draft vocabulary may lack
    acceptance: list[float]  # expected under rejection sampling


def drafting_loss(
    drafter: Eagle31DrafterModel,
    input_ids: Tensor,
    states: Tensor,
    target_logits: Tensor,
    depth: int,
    depth_decay: float = 0.8,
    mixture: dict[str, float] | None = None,
    answers: Tensor | None = None,
    documents: Tensor | None = None,
    convention: str = "serving",
) -> DraftingLoss:
    """A mixture of distances to the target (by default forward KL) at every depth, averaged over its rows, weighted `depth_decay ** k`.

    Tokens (B, T), captured states (B, T, n*ht), target logits (B, T, V). `answers` (B, T): which tokens are the target's to say, by default
    all; `documents` and `convention` as `rows.supervised` has them.
    """
    length, ids = input_ids.shape[1], drafter.draft_to_target_ids()
    answers = torch.ones_like(input_ids) if answers is None else answers
    targets = target_logits.flatten(0, 1)
    kept, places, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for k, (normed, _) in enumerate(unroll(drafter, input_ids, states, depth, documents)):
        row, slot = supervised(answers, k, convention, documents).nonzero(as_tuple=True)
        kept.append(normed[row, slot])
        places.append(row * length + slot + 1 + k)
        weights.append(torch.full((len(row),), depth_decay**k / max(1, len(row)), device=row.device))
    head = drafter.get_output_embeddings()
    loss, figures = chunked_loss(
        {"kl": 1.0} if mixture is None else mixture, torch.cat(kept), torch.cat(weights), torch.cat(places),
        lambda asked: Goal.of(targets[asked], ids), drafter.score, list(head.parameters()), drafter.config.draft_vocab_size,
    )  # fmt: skip
    counts = [len(rows) for rows in kept]

    def by_depth(figure: Tensor) -> list[float]:
        return [part.float().mean().item() if len(part) else 0.0 for part in figure.split(counts)]

    return DraftingLoss(loss, by_depth(figures.loss), by_depth(figures.is_right), by_depth(figures.acceptance))
