"""Linear layers of the few rows of a round, whose time is that of reading their weights: those that read the same input
as one operation, and the gate of an MLP with the product it goes into.

K inputs, N outputs.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .operation import operation


@operation()
def joint_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Multiplies x (..., K) by up to three weights (N, K) each, and adds a bias (N,) of each, unless there are none
    -> (..., the sum of all N), in the order of the weights."""
    each = biases or [None] * len(weights)
    parts = [linear(x, weight, bias) for weight, bias in zip(weights, each, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@operation()
def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Multiplies x (..., K) by two weights (N, K), and SiLU of the first product by the second -> (..., N). Both
    products are rounded, as those of linear layers are; where they are left to torch, SiLU is, too."""
    return (silu(linear(x, gate).float()) * linear(x, up).float()).to(x.dtype)
