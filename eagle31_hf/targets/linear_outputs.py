"""Outputs of the linear layers within a module, noted while it runs over a chain's tokens, and returned when it runs
again over the first of them: their weights, most of what it reads, are read once.

B sequences, N tokens, D numbers of a token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Outputs = dict[nn.Parameter, list[Tensor]]  # by weight, one (B, N, D) after the other


class LinearOutputs(TorchFunctionMode):
    """A context of this thread in which linear layers are looked at, between `begin` and `end`: calls as `nn.Linear`
    makes them, of inputs (B, N, D) of the shape that is said. All others, as those of quantized weights, compute as
    usual."""

    outputs: Outputs | None = None
    shape: tuple[int, int] = (0, 0)  # B, N

    def begin(self, outputs: Outputs, shape: tuple[int, int]) -> None:
        self.outputs = outputs
        self.shape = shape

    def end(self) -> None:
        self.outputs = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def compute() -> Any:
            return func(*args, **(kwargs or {}))

        is_linear = self.outputs is not None and func is torch.nn.functional.linear and len(args) > 1
        if not is_linear or not isinstance(args[1], nn.Parameter) or args[0].shape[:-1] != self.shape:
            return compute()
        return self.output_of(args[1], compute)

    def output_of(self, weight: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
        """The output of a layer of this weight, which `compute` computes."""
        raise NotImplementedError


class NotedOutputs(LinearOutputs):
    """Notes outputs: copies, since what comes after a layer may write to them, as adapters do."""

    def begin(self, outputs: Outputs, shape: tuple[int, int]) -> None:
        outputs.clear()
        super().begin(outputs, shape)

    def output_of(self, weight: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
        output = compute()
        assert self.outputs is not None
        self.outputs.setdefault(weight, []).append(output.clone())
        return output


class GivenOutputs(LinearOutputs):
    """Gives, for the first tokens, what was noted."""

    left: dict[nn.Parameter, Iterator[Tensor]]

    def begin(self, outputs: Outputs, shape: tuple[int, int]) -> None:
        super().begin(outputs, shape)
        self.left = {weight: iter(each) for weight, each in outputs.items()}

    def output_of(self, weight: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
        noted = next(self.left.get(weight, iter(())), None)
        return compute() if noted is None else noted[:, : self.shape[1]].clone()
