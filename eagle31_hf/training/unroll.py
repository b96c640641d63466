"""Training-time test: every slot drafts `depth` tokens as it would when serving, all slots at once.

B rows, T tokens, S = T - 1 slots, k depth. Slot t at depth k embeds x[t+1+k], predicts x[t+2+k] and sees the keys of depth 0 at
slots <= t plus the later keys of its own slot. Source: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from ..modeling import Eagle31DrafterModel
from .losses import acceptance, draft_log_probs, forward_kl


def unroll_mask(num_slots: int, depth: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask (1, 1, S, (depth + 1) * S): causal over the keys of depth 0, then one diagonal per later depth.

    A sliding window counts tokens back from the query's own position, which at depth k is t + k.
    """
    slots = torch.arange(num_slots, device=device)
    first = slots[None, :] <= slots[:, None]
    if window is not None:
        first &= slots[None, :] > slots[:, None] + depth - window
    own = torch.eye(num_slots, dtype=torch.bool, device=device)
    blocks = [own if window is None or depth - d < window else torch.zeros_like(own) for d in range(1, depth + 1)]
    allowed = torch.cat([first, *blocks], dim=1)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def unroll(drafter: Eagle31DrafterModel, input_ids: Tensor, states: Tensor, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens (B, T) and captured states (B, T, n*ht) -> per depth k the logits (B, S - k, Vd) and fed-back states (B, S - k, h).

    Row t of depth k is slot t; slots whose tokens would lie past the end are left out. Gradients flow through all depths.
    Raises ValueError for a depth no slot has tokens for, and under gradient checkpointing.
    """
    num_slots = input_ids.shape[1] - 1
    if not 1 <= depth <= num_slots:
        raise ValueError(f"depth is {depth}; expected 1 to {num_slots} for rows of {num_slots + 1} tokens.")
    if drafter.training and drafter.layers[0].gradient_checkpointing:
        raise ValueError("the unroll cannot be recomputed, its keys are in a cache; expected no gradient checkpointing of the drafter.")
    states = states.to(drafter.norm.weight.dtype)
    positions = torch.arange(num_slots, device=input_ids.device)[None]
    cache, state = DynamicCache(), None
    windows = {"full_attention": None, "sliding_attention": drafter.config.sliding_window}
    for k in range(depth):
        tokens = pad(input_ids[:, 1 + k :], (0, k))
        masks = {kind: unroll_mask(num_slots, k, windows[kind], states.dtype, states.device) for kind in set(drafter.config.layer_types)}
        source = {"target_hidden_states": states[:, :num_slots]} if state is None else {"hidden_states": state}
        out = drafter(tokens, **source, position_ids=positions + k, attention_mask=masks, past_key_values=cache)
        state = out.last_hidden_state
        yield out.logits[:, : num_slots - k], state[:, : num_slots - k]


@dataclass
class DraftingLoss:
    """`loss` is what to minimise; the lists hold one figure per depth, averaged over rows."""

    loss: Tensor
    kl: list[float]
    accuracy: list[float]  # argmax q == argmax p
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
    log_p = draft_log_probs(target_logits, drafter.draft_to_target_ids())
    result = DraftingLoss(log_p.new_zeros(()), [], [], [])
    for k, (logits, _) in enumerate(unroll(drafter, input_ids, states, depth)):
        wanted = log_p[:, 1 + k :]
        kl = forward_kl(logits, wanted).mean()
        result.loss = result.loss + depth_decay**k * kl
        result.kl.append(kl.item())
        if with_metrics:
            with torch.no_grad():
                result.accuracy.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean().item())
                result.acceptance.append(acceptance(logits, wanted).mean().item())
    return result
