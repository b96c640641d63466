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


def weight_of(func: Callable, args: tuple) -> nn.Parameter | None:
    """The weight of a call of `torch.nn.functional.linear` as `nn.Linear` makes it; None for any other."""
    is_linear = func is torch.nn.functional.linear and len(args) > 1
    return args[1] if is_linear and isinstance(args[1], nn.Parameter) else None


class NotedOutputs(TorchFunctionMode):
    """A context of this thread that notes, between `begin` and `end`, what linear layers give."""

    outputs: Outputs | None = None

    def begin(self, outputs: Outputs) -> None:
        outputs.clear()
        self.outputs = outputs

    def end(self) -> None:
        self.outputs = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        weight = weight_of(func, args)
        if self.outputs is not None and weight is not None:
            self.outputs.setdefault(weight, []).append(output)
        return output


class GivenOutputs(TorchFunctionMode):
    """A context of this thread in which linear layers, between `begin` and `end`, give for the first tokens what they
    gave before. Those of which nothing was noted, as quantized ones, compute as usual."""

    left: dict[nn.Parameter, Iterator[Tensor]] | None = None

    def begin(self, outputs: Outputs) -> None:
        self.left = {weight: iter(each) for weight, each in outputs.items()}

    def end(self) -> None:
        self.left = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        weight = weight_of(func, args)
        if self.left is not None and weight is not None:
            output, x = next(self.left.get(weight, iter(())), None), args[0]
            if output is not None and x.dim() == output.dim() == 3 and x.shape[1] <= output.shape[1]:
                return output[:, : x.shape[1]]
        return func(*args, **(kwargs or {}))
