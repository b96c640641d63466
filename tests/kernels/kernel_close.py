"""The distance between a kernel's results and its reference's."""

from collections.abc import Sequence

import torch
from close import EXACT, assert_close
from torch import Tensor

# fp32: sums in another order. A share of the largest magnitude, as in close.py.
FP32 = 1e-6


def assert_matches(name: str, got: Tensor, expected: Tensor) -> None:
    """Asserts that a kernel's output is its reference's: integers equal, fp32 within FP32, bf16 and fp16 within one
    unit in the last place and FP32, which is more near 0. Triton's interpreter cuts off what torch rounds."""
    if not got.is_floating_point():
        assert_close(name, got, expected, EXACT)
    elif got.dtype == torch.float32:
        assert_close(name, got, expected, FP32)
    else:
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        allowed = expected.float().abs() * torch.finfo(got.dtype).eps + FP32 * expected.float().abs().max()
        worst = ((got.float() - expected.float()).abs() - allowed).max()
        assert worst <= 0, f"{name}: one value is {float(worst)} further off than one unit in the last place"


def assert_all_match(names: Sequence[str], got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Asserts that each output of a kernel is its reference's."""
    for name, one, other in zip(names, got, expected, strict=True):
        assert_matches(name, one, other)
