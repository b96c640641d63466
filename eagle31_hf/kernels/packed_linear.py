"""Linear layers of few rows on a CPU, over a weight that was packed for them once: by oneDNN, as inductor's freezing
does, or by FBGEMM, which keeps the weight in fp16 and multiplies in fp32.

torch's own linear layer reads a weight as it lies: in fp32 two to eight rows take two to four times as long as one, and
in bf16 each row about twice as long as here. A few rows take as long as their weight takes to be read, so a weight in
fp16 takes half as long as one in fp32; and where a processor has no instructions for bf16, oneDNN takes three times as
long in bf16 as FBGEMM does.

N width of a layer's output, K of its input.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANGE = 2**-26  # the most that fp16 may change a row, of the sum of its sizes: a quarter of fp32's rounding error
ROWS = 64  # that are looked at together: few enough to stay in a cache


class Packed(NamedTuple):
    """A copy of a weight (N, K), and of its bias, in a kernel's own layout. `run` multiplies x (..., K) by it and adds
    the bias -> (..., N); `num_bytes` is what the copy takes."""

    run: Callable[[Tensor], Tensor]
    num_bytes: int


def is_available() -> bool:
    """Returns whether torch has oneDNN, and has it switched on."""
    is_on = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return is_on and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fits_fp16(weight: Tensor) -> bool:
    """Returns whether a copy in fp16 of a weight (N, K) is as good as one in fp32: it changes each row by less than
    fp32's own rounding does. True of most weights that are stored in 16 bits, in whatever dtype they are loaded."""
    for rows in weight.detach().split(ROWS):
        values = rows.float()
        changes = (values.half().float() - values).abs().sum(1)
        if not bool((changes <= CHANGE * values.abs().sum(1)).all()):  # nor where one is too large for fp16, or NaN
            return False
    return True


def packed_by_onednn(weight: Tensor, bias: Tensor | None) -> Packed:
    """Packs a weight of any of DTYPES."""
    own = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return Packed(functools.partial(onednn_linear, weight=own, bias=bias), weight.nbytes)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def packed_by_fbgemm(weight: Tensor, bias: Tensor | None) -> Packed:
    """Packs a weight that `fits_fp16`. Raises RuntimeError where torch has no FBGEMM, as on Arm."""
    own = torch.ops.quantized.linear_prepack_fp16(
        weight.detach().float().contiguous(), None if bias is None else bias.detach().float()
    )
    return Packed(functools.partial(fbgemm_linear, weight=own), 2 * weight.numel())


def fbgemm_linear(x: Tensor, weight: Any) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x.float(), weight).to(x.dtype)


# By the names that a choice among them is kept under.
KERNELS: dict[str, Callable[[Tensor, Tensor | None], Packed]] = {"onednn": packed_by_onednn, "fbgemm": packed_by_fbgemm}
