"""The operation of a linear layer whose weight is held in 8 bits a value: multiplies the few rows of a draft step,
whose time is that of reading the weight.

K inputs, N outputs.
"""

import torch
from torch import Tensor

from .operation import operation


def weight_values(weight: Tensor) -> Tensor:
    """Returns a weight's values as numbers: int8 as it is; uint8, which are the bits of a float8_e4m3fn, as that."""
    return weight.view(torch.float8_e4m3fn) if weight.dtype == torch.uint8 else weight


@operation()
def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x (..., K) by a weight (N, K), see `weight_values`, whose rows `scale` (N,) multiplies, and adds a
    bias (N,) -> (..., N). Sums are in fp32, rounded once."""
    out = torch.nn.functional.linear(x.float(), weight_values(weight).float()) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)
