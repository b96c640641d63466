"""The loss over the predictions of all depths, chunk by chunk: the logits of one chunk are in memory, never those of
all predictions.

Gradients are taken chunk by chunk while the loss is computed, as in Liger Kernel's fused losses; backward only hands
them on. N predictions, h drafter width, V and Vd the vocabularies of target and draft.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.distillation_loss import distillation_loss
from ..modeling import Eagle31DrafterModel
from .losses import DraftDistribution, TargetDistribution, mixed, overlap

BYTES_AT_ONCE = 2**29  # of a chunk's fp32 logits, the drafter's and the target's
# Of a chunk's draft logits on a CPU, at least and at most: about what its caches hold, and the largest block that its
# allocator uses again.
CACHED_BYTES, REUSED_BYTES = 2**23, 2**25


@dataclass(frozen=True)
class Predictions:
    """N predictions: draft states after the norm (N, h), the weights (N,) of their distances, and `at` (N,), the index
    of the target state each is compared with."""

    states: Tensor
    weights: Tensor
    at: Tensor


@dataclass
class PredictionFigures:
    """Figures of every prediction, each (N,), without gradient; p is the target's distribution, q the drafter's.

    `loss`; `acceptance`, the probability that rejection sampling keeps a token drawn from q; `coverage`; `is_right`:
    p's likeliest token is q's, too. Where they are asked for: `guess`, the draft id of q's likeliest token, and
    `greedy_acceptance`, the probability that the target draws it."""

    loss: Tensor
    acceptance: Tensor
    coverage: Tensor
    is_right: Tensor
    guess: Tensor | None = None
    greedy_acceptance: Tensor | None = None

    @classmethod
    def empty(cls, states: Tensor, with_guesses: bool) -> "PredictionFigures":
        """Makes figures of zero for states (N, h)."""
        dtypes = [torch.float32, torch.float32, torch.float32, torch.bool]
        dtypes += [torch.long, torch.float32] if with_guesses else []
        return cls(*(torch.zeros(len(states), dtype=dtype, device=states.device) for dtype in dtypes))


def chunked_loss(
    mixture: dict[str, float],
    predictions: Predictions,
    drafter: Eagle31DrafterModel,
    target_at: Callable[[Tensor], TargetDistribution],
    with_guesses: bool = True,
    at_once: int | None = None,
) -> tuple[Tensor, PredictionFigures]:
    """Returns the sum over predictions of weight times distance, a scalar, and the figures of every prediction.

    `drafter`: scores the states; its head gets gradients where it requires any. `target_at`: indices of target states
    (n,) -> the target's distributions there. `at_once`: predictions of a chunk; by default what suits the device.
    """
    states, unit = predictions.states, unit_of(predictions.weights)
    weights = predictions.weights / unit
    order = predictions.at.argsort(stable=True)
    # One target distribution serves all predictions compared with it, which follow one another.
    targets, target_of = predictions.at[order].unique_consecutive(return_inverse=True)
    size = at_once or predictions_at_once(drafter.config, states, len(targets))
    # Of each chunk the first of `targets`, and at the end the last one: the host waits here, and for no chunk.
    bounds = [*(target_of[::size].tolist() or [0]), len(targets) - 1]
    # Made before the first chunk, so that they do not lie between blocks of memory that all chunks use.
    figures = PredictionFigures.empty(states, with_guesses)

    def loss_of(logits: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Returns the loss of the predictions of chunk i and its gradient by their logits (n, Vd)."""
        chunk = order[i * size : (i + 1) * size]
        target = target_at(targets[bounds[i] : bounds[i + 1] + 1])
        which = target_of[i * size : (i + 1) * size] - bounds[i]
        losses, kept, is_right, by_logits = judged(mixture, logits.detach(), target, which, weights[chunk])
        figures.loss[chunk] = losses
        figures.acceptance[chunk] = kept
        figures.coverage[chunk] = target.coverage[which]
        figures.is_right[chunk] = is_right
        if figures.guess is not None and figures.greedy_acceptance is not None:
            guess = logits.detach().float().argmax(-1)
            figures.guess[chunk] = guess
            figures.greedy_acceptance[chunk] = target.p[which, guess]
        return weights[chunk] @ losses, by_logits

    trained = [parameter for parameter in drafter.get_output_embeddings().parameters() if parameter.requires_grad]
    loss = _Chunked.apply(states, order, size, drafter.score, loss_of, torch.is_grad_enabled(), *trained)
    return loss * unit, figures


def predictions_at_once(config: Any, states: Tensor, num_targets: int) -> int:
    """Returns how many of the predictions with states (N, h), compared with so many target distributions, make a chunk
    that suits the device. On a GPU the logits of both fill BYTES_AT_ONCE on average. On a CPU those of the draft are as
    large as the head's gradient (Vd, h), to which each chunk adds, within CACHED_BYTES and REUSED_BYTES."""
    bytes_each = 4 * config.draft_vocab_size
    if states.device.type == "cpu":
        return max(1, min(max(CACHED_BYTES, bytes_each * states.shape[1]), REUSED_BYTES) // bytes_each)
    bytes_of_targets = 4 * config.vocab_size * num_targets
    return max(1, BYTES_AT_ONCE * len(states) // max(1, bytes_each * len(states) + bytes_of_targets))


def unit_of(weights: Tensor) -> Tensor:
    """Returns the power of two at or below the largest of weights (N,), a scalar in fp32; 1 where all are 0. Divided by
    it, which rounds nothing, weights are so large that fp16 can hold the gradients of logits: with weights of a mean
    over thousands of predictions, those of unlikely tokens would be 0."""
    largest = torch.cat((weights.detach().float(), weights.new_zeros(1, dtype=torch.float32))).amax()
    power = (largest.view(torch.int32) & 0x7F80_0000).view(torch.float32)  # without the bits of the fraction
    return torch.where(power > 0, power, torch.ones_like(power))


def judged(
    mixture: dict[str, float], logits: Tensor, target: TargetDistribution, which: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns of predictions with these logits (n, Vd), each compared with the target's distribution `which` (n,): the
    distance, the overlap, whether p's likeliest token is q's, each (n,), and the gradient of weight times distance by
    the logits (n, Vd). Shares of KL and cross-entropy have a kernel."""
    if mixture.keys() <= {"kl", "ce"} and math.isclose(sum(mixture.values()), 1.0):
        of_target = target.p, target.coverage, target.negentropy, target.best
        return distillation_loss(logits, *of_target, which, weights, mixture.get("ce", 0.0))
    target, draft = target[which], DraftDistribution(logits)
    distance, neg_grad = mixed(mixture, target, draft)
    by_logits = neg_grad.mul_(-weights[:, None])
    return distance, overlap(target, draft), draft.is_likeliest(target.best), by_logits


class _Chunked(torch.autograd.Function):
    """The sum of the losses of all chunks; its gradients are computed along with it."""

    @staticmethod
    def forward(
        ctx,
        states: Tensor,
        order: Tensor,
        size: int,
        score: Callable,
        loss_of: Callable,
        with_grad: bool,
        *parameters: Tensor,
    ) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        state_grads = torch.zeros_like(states) if with_grad else None
        grads = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters] if with_grad else []
        for i, chunk in enumerate(order.split(size)):
            part = states[chunk].detach()
            with torch.set_grad_enabled(with_grad):
                # A view is no leaf: of leaves autocast keeps what it casts until its context ends.
                logits = score(part.requires_grad_(with_grad).view_as(part))
            with torch.autocast(logits.device.type, enabled=False):  # p - q is a difference of nearly equal numbers
                loss, by_logits = loss_of(logits, i)
            total += loss
            if with_grad:
                part_grad, *found = torch.autograd.grad(logits, (part, *parameters), by_logits.to(logits.dtype))
                state_grads[chunk] = part_grad
                for grad, new in zip(grads, found, strict=True):
                    grad += new
        ctx.save_for_backward(
            state_grads, *(grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters, strict=bool(grads)))
        )
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor):
        state_grads, *grads = ctx.saved_tensors
        # In fp32: the scale of losses in fp16 begins above the largest number that fp16 has.
        scaled = [(upstream * grad.float()).to(grad.dtype) for grad in (state_grads, *grads)]
        return scaled[0], None, None, None, None, None, *scaled[1:]
