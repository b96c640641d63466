"""Divergence: weights that are no longer finite, and gradients that no scale of fp16 makes so."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer

from .saving import last_checkpoint

CHECK_EVERY = 10  # steps; weights are also looked at where they are saved or evaluated
# Where fp16 losses are scaled, a step that overflows is skipped, and halves the scale, which begins at 2**16.
LEAST_SCALE = 2.0**-16


class TrainingDivergedError(RuntimeError):
    """Raised to stop a training whose weights or gradients are not finite; no such weights were saved."""


def check(trainer: Trainer) -> None:
    """Raises TrainingDivergedError, in all processes at once, where a trained weight is NaN or infinite, or where the
    scale of fp16 losses has become that small that gradients cannot be finite. Waits for the device."""
    scaler, args = trainer.accelerator.scaler, trainer.args
    num_broken = num_not_finite(weight for weight in trainer.model.parameters() if weight.requires_grad)
    num_broken += scaler is not None and scaler.get_scale() < LEAST_SCALE
    if not int(trainer.accelerator.reduce(num_broken.to(args.device), "sum")):
        return
    kept = last_checkpoint(args.output_dir)
    broken = "weights are" if scaler is None else "weights or gradients are"
    found = f"the last checkpoint with finite weights is {kept}" if kept else "no checkpoint was written before"
    again = "train its drafter on in a new run (eagle31 train --drafter)" if kept else "begin anew"
    raise TrainingDivergedError(
        f"{broken} not finite after step {trainer.state.global_step}. Training has diverged and was stopped; {found}."
        f" To go on, {again} with lower rates, with max_grad_norm=1, or with bf16 instead of fp16."
    )


@torch.no_grad()
def num_not_finite(weights: Iterable[Tensor]) -> Tensor:
    """Returns the number of tensors with NaN or infinity (in this process's part, where sharded), a scalar on their
    device, without copying them."""
    num_broken = torch.zeros((), dtype=torch.long)
    for weight in weights:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.is_floating_point() and local.numel():
            is_finite = torch.stack(torch.aminmax(local)).isfinite().all()
            num_broken = num_broken.to(local.device) + ~is_finite
    return num_broken
