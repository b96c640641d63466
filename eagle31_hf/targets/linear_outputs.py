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
    usual.

    `gives`: returns, for the first tokens, what was noted. Else it notes outputs: copies, since what comes after a
    layer may write to them, as adapters do.
    """

    outputs: Outputs | None = None
    shape: tuple[int, int] = (0, 0)  # B, N

    def __init__(self, gives: bool):
        super().__init__()
        self.gives = gives
        self.left: dict[nn.Parameter, Iterator[Tensor]] = {}  # of what was noted

    def begin(self, outputs: Outputs, shape: tuple[int, int]) -> None:
        self.outputs = outputs
        self.shape = shape
        if self.gives:
            self.left = {weight: iter(each) for weight, each in outputs.items()}
        else:
            outputs.clear()

    def end(self) -> None:
        self.outputs = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_linear = self.outputs is not None and func is torch.nn.functional.linear and len(args) > 1
        if not is_linear or not isinstance(args[1], nn.Parameter) or args[0].shape[:-1] != self.shape:
            return func(*args, **(kwargs or {}))
        noted = next(self.left.get(args[1], iter(())), None)
        if noted is not None:
            return noted[:, : self.shape[1]].clone()
        output = func(*args, **(kwargs or {}))
        if not self.gives and self.outputs is not None:
            self.outputs.setdefault(args[1], []).append(output.clone())
        return output
