"""Linear layers of the few rows of a round, whose time is that of reading their weights: those that read the same input
as one operation, the gate of an MLP with the product it goes into, and those whose weight is held in 8 bits a value.

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


def weight_values(weight: Tensor) -> Tensor:
    """Returns a weight's values as numbers: int8 as it is; uint8, which are the bits of a float8_e4m3fn, as that."""
    return weight.view(torch.float8_e4m3fn) if weight.dtype == torch.uint8 else weight


@operation()
def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x (..., K) by a weight (N, K), see `weight_values`, whose rows `scale` (N,) multiplies, and adds a
    bias (N,) -> (..., N). Sums are in fp32, rounded once."""
    out = linear(x.float(), weight_values(weight).float()) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)
