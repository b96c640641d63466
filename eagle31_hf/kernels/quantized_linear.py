"""A linear layer whose weight is held in 8 bits a value, for the few rows of a draft step: what it takes is the reading
of the weight.

K inputs, N outputs.
"""

import torch
from torch import Tensor

from .operation import operation


def weight_values(weight: Tensor) -> Tensor:
    """Returns a weight's values as numbers: int8 as it is; uint8, which are the bits of a float8_e4m3fn, as that."""
    return weight.view(torch.float8_e4m3fn) if weight.dtype == torch.uint8 else weight


@operation(shapes=lambda x, weight, scale, bias: x.new_empty(*x.shape[:-1], len(weight)))
def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) times a weight (N, K), see `weight_values`, each row of which `scale` (N,) multiplies, plus a bias
    (N,) -> (..., N): sums in fp32, rounded once."""
    out = torch.nn.functional.linear(x.float(), weight_values(weight).float()) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)
