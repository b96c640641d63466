"""The gate of a gated MLP."""

import torch
from torch import Tensor

from .operation import operation


@operation(shapes=lambda gate, up: torch.empty_like(up, memory_format=torch.contiguous_format))
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) times up, both (..., n), strided as they may be: gate * up / (1 + exp(-gate)), rounded once."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(up.dtype)
