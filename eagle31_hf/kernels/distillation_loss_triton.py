"""The kernel of `distillation_loss`: a program takes a prediction, and reads its logits and its p twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operation import with_close_entries

BLOCK = 4096
NUM_WARPS = 16
LOWEST = tl.constexpr(-3.0e38)  # in place of -inf: LOWEST - LOWEST is 0, and -inf - -inf is no number


@triton.jit
def distillation_loss_kernel(
    logits,
    p,
    coverage,
    negentropy,
    best,
    which,
    weights,
    distance,
    overlap,
    is_right,
    by_logits,
    hard,
    vocab,
    stride_logits,
    stride_p,
    BLOCK: tl.constexpr,
):
    """One program takes one prediction: first the sum of exp z, its maximum and p z, each lane for itself, then
    gradient and overlap.

    The second time it reads from behind, where its caches still have what it read last."""
    n = tl.program_id(0).to(tl.int64)
    m = tl.load(which + n).to(tl.int64)
    z_row, p_row = logits + n * stride_logits, p + m * stride_p
    out_row = by_logits + n * vocab
    v = tl.arange(0, BLOCK)
    highs = tl.full((BLOCK,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    dots = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, vocab, BLOCK):
        inside = at + v < vocab
        z = tl.load(z_row + at + v, mask=inside, other=float("-inf")).to(tl.float32)
        target = tl.load(p_row + at + v, mask=inside, other=0.0).to(tl.float32)
        dots += target * tl.where(inside, z, 0.0)
        step = tl.exp(-tl.abs(z - highs))  # one of both terms is exp 0
        sums = tl.where(z > highs, sums * step + 1.0, sums + step)
        highs = tl.maximum(highs, z)
    high = tl.max(highs, 0)
    total = tl.sum(sums * tl.exp(highs - high), 0)
    mass = tl.load(coverage + m).to(tl.float32)
    weight = tl.load(weights + n).to(tl.float32)
    token = tl.load(best + m)
    soft = 1.0 - hard
    hard_known = tl.where(token >= 0, hard, 0.0)
    kept = tl.zeros((BLOCK,), tl.float32)
    last = (tl.cdiv(vocab, BLOCK) - 1) * BLOCK
    for back in range(0, vocab, BLOCK):
        at = last - back
        inside = at + v < vocab
        z = tl.load(z_row + at + v, mask=inside, other=float("-inf")).to(tl.float32)
        target = tl.load(p_row + at + v, mask=inside, other=0.0).to(tl.float32)
        q = tl.exp(z - high) / total
        kept += tl.minimum(target, q, propagate_nan=tl.PropagateNan.ALL)
        by_z = soft * (mass * q - target) + hard_known * (q - tl.where(at + v == token, 1.0, 0.0))
        tl.store(out_row + at + v, (by_z * weight).to(by_logits.dtype.element_ty), mask=inside)
    z_best = tl.load(z_row + tl.maximum(token, 0)).to(tl.float32)
    log_sum = high + tl.log(total)
    kl = tl.load(negentropy + m).to(tl.float32) - tl.sum(dots, 0) + mass * log_sum
    # a term without weight may be infinite, and 0 times that is no number
    soft_part = tl.where(soft > 0, soft * kl, 0.0)
    hard_part = tl.where(hard_known > 0, hard_known * (log_sum - z_best), 0.0)
    tl.store(distance + n, soft_part + hard_part)
    tl.store(overlap + n, tl.sum(kept, 0))
    tl.store(is_right + n, (token >= 0) & (z_best >= high) & (total == total))


def distillation_loss(
    logits: Tensor,
    p: Tensor,
    coverage: Tensor,
    negentropy: Tensor,
    best: Tensor,
    which: Tensor,
    weights: Tensor,
    hard: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel; see the operation."""
    count, vocab = logits.shape
    logits, p = (with_close_entries(x) for x in (logits, p))
    of_target = [x.contiguous() for x in (coverage, negentropy, best)]
    of_prediction = [x.contiguous() for x in (which, weights)]
    distance, overlap = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    is_right = torch.empty(count, dtype=torch.bool, device=logits.device)
    out = distance, overlap, is_right, torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    sizes = hard, vocab, logits.stride(0), p.stride(0)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    distillation_loss_kernel[(count,)](
        logits, p, *of_target, *of_prediction, *out, *sizes, BLOCK=block, num_warps=NUM_WARPS
    )
    return out
