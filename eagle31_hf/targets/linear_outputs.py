"""What the linear layers within a module gave for the tokens of a chain, given again for the first of these: a module
that runs again over accepted tokens then reads no weight of theirs, and its products are those of the first run.

B sequences, N tokens, D numbers of a token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Outputs = dict[nn.Parameter, list[Tensor]]  # by weight, one (B, N, D) after the other


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
        if self.outputs is not None and func is torch.nn.functional.linear and isinstance(args[1], nn.Parameter):
            self.outputs.setdefault(args[1], []).append(output)
        return output


class GivenOutputs(TorchFunctionMode):
    """A context of this thread in which linear layers, between `begin` and `end`, give for the first tokens what they
    gave before; those of which nothing was noted, as of a class that quantizes, compute it."""

    left: dict[nn.Parameter, Iterator[Tensor]] | None = None

    def begin(self, outputs: Outputs) -> None:
        self.left = {weight: iter(each) for weight, each in outputs.items()}

    def end(self) -> None:
        self.left = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.left is not None and func is torch.nn.functional.linear and isinstance(args[1], nn.Parameter):
            output, x = next(self.left.get(args[1], iter(())), None), args[0]
            if output is not None and x.dim() == output.dim() == 3 and x.shape[1] <= output.shape[1]:
                return output[:, : x.shape[1]]
        return func(*args, **(kwargs or {}))
