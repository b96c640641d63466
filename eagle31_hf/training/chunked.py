"""The loss over the rows of all depths without the logits of all rows: memory grows with the rows in work at once, not
with the vocabulary.

Gradients are taken chunk by chunk while the loss is computed, as in Liger Kernel's fused losses; backward only hands
them on. N rows, each a draft state (h) and the place of the target state it is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .losses import Drafts, Goal, mixed, overlap

# Of one fp32 matrix of logits: on a CPU what its allocator uses again and its caches nearly hold.
BYTES_AT_ONCE = {"cpu": 2**23, "cuda": 2**28}


@dataclass
class RowFigures:
    """Of every row, each (N,), no gradient: `loss`; `acceptance`, the chance that rejection sampling keeps a token
    drawn from q; `coverage`; `is_right`: q's likeliest token is p's. Where they are asked for: `guess`, the draft id of
    that token, and `greedy_acceptance`, the chance that the target draws it."""

    loss: Tensor
    acceptance: Tensor
    coverage: Tensor
    is_right: Tensor
    guess: Tensor | None = None
    greedy_acceptance: Tensor | None = None


FIGURE_DTYPES = (torch.float32, torch.float32, torch.float32, torch.bool, torch.long, torch.float32)  # of RowFigures


def chunked_loss(
    mixture: dict[str, float],
    states: Tensor,
    weights: Tensor,
    places: Tensor,
    goal_of: Callable[[Tensor], Goal],
    score: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    draft_vocab_size: int,
    with_guesses: bool = True,
    bytes_at_once: int | None = None,
) -> tuple[Tensor, RowFigures]:
    """-> sum over rows of weight times distance, a scalar, and the figures of every row.

    `states` (N, h) draft states after the norm; `weights` (N,); `places` (N,) what `goal_of` (places -> Goal) is asked
    for; `score`: states -> draft logits (n, Vd), by `parameters` alone, which get gradients where they require any.
    """
    order = places.argsort(stable=True)  # rows of one place together: its goal is computed once
    # Made before the first chunk: what a chunk leaves would stand between the blocks that the next could use again.
    found = RowFigures(
        *(
            torch.zeros(len(states), dtype=dtype, device=states.device)
            for dtype in FIGURE_DTYPES[: 6 if with_guesses else 4]
        )
    )
    bytes_at_once = bytes_at_once or BYTES_AT_ONCE.get(states.device.type, BYTES_AT_ONCE["cuda"])
    rows_at_once = max(1, bytes_at_once // (4 * draft_vocab_size))

    def loss_of(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        asked, which = places[rows].unique_consecutive(return_inverse=True)
        goal, drafts = goal_of(asked)[which], Drafts(logits)
        losses, pull = mixed(mixture, goal, drafts)
        found.loss[rows] = losses
        found.acceptance[rows] = overlap(goal, drafts)
        found.coverage[rows] = goal.coverage
        found.is_right[rows] = drafts.is_likeliest(goal.best)
        if found.guess is not None and found.greedy_acceptance is not None:
            guess = drafts.logits.argmax(-1)
            found.guess[rows], found.greedy_acceptance[rows] = guess, goal.p.gather(1, guess[:, None])[:, 0]
        return weights[rows] @ losses, pull.mul_(-weights[rows, None])

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _Chunked.apply(states, order, rows_at_once, score, loss_of, torch.is_grad_enabled(), *trained), found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        states: Tensor,
        order: Tensor,
        rows_at_once: int,
        score: Callable,
        loss_of: Callable,
        with_grad: bool,
        *parameters: Tensor,
    ) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        state_grads = torch.zeros_like(states) if with_grad else None
        grads = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters] if with_grad else []
        for rows in order.split(rows_at_once):
            part = states[rows].detach()
            with torch.set_grad_enabled(with_grad):
                logits = score(part.requires_grad_(with_grad))
            with torch.autocast(logits.device.type, enabled=False):  # p - q is a difference of nearly equal numbers
                loss, by_logits = loss_of(logits, rows)
            total += loss
            if with_grad:
                part_grad, *found = torch.autograd.grad(logits, (part, *parameters), by_logits.to(logits.dtype))
                state_grads[rows] = part_grad
                for grad, new in zip(grads, found, strict=True):
                    grad += new
        ctx.save_for_backward(
            state_grads, *(grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters, strict=bool(grads)))
        )
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor):
        state_grads, *grads = ctx.saved_tensors
        return upstream * state_grads, None, None, None, None, None, *(upstream * grad for grad in grads)
