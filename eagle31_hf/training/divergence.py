"""Divergence: losses, gradients and weights that are no longer finite, found without waiting for the device at every
step."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from .saving import last_checkpoint

READ_EVERY = 10  # steps at most between two reads; a run also reads when it logs, evaluates or saves
PATIENCE = 5  # steps that are not finite, one after the other
# the same where fp16 losses are scaled: the scale begins at 2**16, and is halved after each step that overflows
SCALED_PATIENCE = 25


class TrainingDivergedError(RuntimeError):
    """Raised to stop a training whose losses, gradients or weights are not finite; no such weights were saved."""


class Step(NamedTuple):
    """An optimizer step: its number, its loss and the norm of its gradient, over all processes."""

    number: int
    loss: float
    gradient_norm: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class DivergenceWatch:
    """Stops a run that has diverged: records every step on the device, and reads the records only now and then.

    All processes call its methods at the same steps, so they stop at the same one.
    """

    def __init__(self, accelerator: Any, args: TrainingArguments):
        self.accelerator = accelerator
        self.args = args
        self.last: Step | None = None
        self.first_broken: Step | None = None  # the first of the latest steps, one after the other, that are not finite
        self.num_broken = 0  # their number
        self._loss: Tensor | None = None
        self._numbers, self._unread = list[int](), list[Tensor]()

    def add_loss(self, loss: Tensor) -> None:
        """Adds the loss of one batch of the step, a scalar."""
        loss = loss.detach().float()
        self._loss = loss if self._loss is None else self._loss + loss

    def end_step(self, number: int, gradient_norm: Tensor | float | None) -> None:
        """Records the step that ends. `gradient_norm`: None where the backend does not report it."""
        if self._loss is None:
            return
        norm = gradient_norm.full_tensor() if isinstance(gradient_norm, DTensor) else gradient_norm
        norm = torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float32, device=self._loss.device)
        self._numbers.append(number)
        self._unread.append(torch.stack([self._loss, norm]))
        self._loss = None

    @property
    def is_due(self) -> bool:
        return len(self._unread) >= READ_EVERY

    def check_steps(self) -> None:
        """Raises TrainingDivergedError where several steps, one after the other, were not finite."""
        self._read()
        scaler = self.accelerator.scaler
        if self.num_broken >= (PATIENCE if scaler is None else SCALED_PATIENCE):
            raise TrainingDivergedError(self._message(f"{self.num_broken} steps in a row are not finite"))

    def check_weights(self, weights: Iterable[Tensor], step: int) -> None:
        """Raises TrainingDivergedError where a weight is NaN or infinite after `step`, or where `check_steps` does."""
        self.check_steps()
        if int(self.accelerator.reduce(num_not_finite(weights).to(self.args.device), "sum")):
            raise TrainingDivergedError(self._message(f"weights are not finite after step {step}"))

    def _read(self) -> None:
        """Reads the records: the one place that waits for the device."""
        if not self._unread:
            return
        values = self.accelerator.reduce(torch.stack(self._unread), "mean").tolist()
        for number, (loss, norm) in zip(self._numbers, values, strict=True):
            self.last = Step(number, loss, norm)
            self.num_broken = 0 if self.last.is_finite else self.num_broken + 1
            self.first_broken = None if self.last.is_finite else self.first_broken or self.last
        self._numbers, self._unread = [], []

    def _message(self, consequence: str) -> str:
        """Returns the message of the error: where it began, which checkpoint is left, and what to change."""
        step = self.first_broken or self.last
        kept = last_checkpoint(self.args.output_dir)
        args = self.args
        begun = (
            [f"step {step.number}: the loss is {step.loss:g}, the norm of the gradient {step.gradient_norm:g}"]
            if step
            else []
        )
        broken = ", and ".join([*begun, consequence])
        found = f"the last checkpoint with finite weights is {kept}" if kept else "no checkpoint was written before"
        again = "train its drafter on in a new run (eagle31 train --drafter)" if kept else "begin anew"
        rates = {name: getattr(args, name, None) for name in ("learning_rate", "matrix_learning_rate")}
        lower = " or ".join(f"{name} (now {rate:g})" for name, rate in rates.items() if rate is not None)
        changes = [f"a lower {lower}"]
        changes += [] if args.max_grad_norm > 0 else ["max_grad_norm=1 (now 0: gradients are not clipped)"]
        changes += ["bf16 instead of fp16"] if args.fp16 else []
        return (
            f"{broken}. Training has diverged and was stopped; {found}. To go on, {again} with {' or '.join(changes)}."
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
