"""Linear layers of few rows on a CPU: oneDNN over a weight that was packed for it once, as inductor's freezing does.

torch's own linear layer reads a weight as it lies: in fp32 two to eight rows take two to four times as long as one, and
in bf16 each row about twice as long as here.

N width of a layer's output, K of its input.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_available() -> bool:
    """Returns whether torch has oneDNN, and has it switched on."""
    is_on = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return is_on and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def packed(weight: Tensor) -> Tensor:
    """Returns a copy of a weight (N, K) in oneDNN's own layout, which only `packed_linear` reads."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x (..., K) by a packed weight, and adds the bias (N,) -> (..., N), in the dtype of both."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
