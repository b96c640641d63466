"""The one comparison of tensors. A failure says what differs, where, and both values."""

import torch
from torch import Tensor

EXACT = 0.0  # token ids, masks, and tensors that must come out of the very same operations
FORWARD = 1e-5  # fp32: one forward in another order of summation, over rows computed together instead of one by one


def assert_close(name: str, got, expected, tolerance: float = EXACT) -> None:
    """Tensors, or tuples and lists of them however deep, equal in shape, type and, within `tolerance`, in value."""
    if isinstance(expected, (tuple, list)):
        assert type(got) is type(expected), f"{name}: got a {type(got).__name__}, expected a {type(expected).__name__}"
        assert len(got) == len(expected), f"{name}: got {len(got)} parts, expected {len(expected)}"
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert_close(f"{name}[{i}]", g, e, tolerance)
        return
    if not isinstance(expected, Tensor):
        assert got == expected, f"{name}: got {got!r}, expected {expected!r}"
        return
    assert isinstance(got, Tensor), f"{name}: got {got!r}, expected a tensor"
    assert got.shape == expected.shape, f"{name}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name}: got {got.dtype}, expected {expected.dtype}"
    difference = (got.double() - expected.double()).abs().masked_fill(got == expected, 0.0)  # equal infinities differ by nothing
    if not (difference <= tolerance).all():  # a NaN is never within the tolerance
        worst = torch.unravel_index(difference.nan_to_num(nan=torch.inf).argmax(), difference.shape)
        index = [int(i) for i in worst]
        count = int((~(difference <= tolerance)).sum())
        values = f"got {got[tuple(index)].item()}, expected {expected[tuple(index)].item()}"
        raise AssertionError(f"{name}{index}: {values}; {count} of {got.numel()} differ by more than {tolerance}")
